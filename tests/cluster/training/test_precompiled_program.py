"""A program that compiles ahead: each size once for all nodes, without a hang, and with its own place in the ledger."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.api.json_objects import merge
from tests.testing.cluster.jobs import Job

if TYPE_CHECKING:
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

COMPILE_SECONDS = 4
COMPILE = f"""
set -e
mkdir -p "$TORCHINDUCTOR_CACHE_DIR" "$1"
echo "$TRAINIUM_NODES" >> "$1/compiled-ahead"
sleep {COMPILE_SECONDS}
echo graph > "$TORCHINDUCTOR_CACHE_DIR/graph-$TRAINIUM_NODES"
"""
TRAIN = f"""
import os, sys, time
from pathlib import Path
import trainium_worker

folder, graphs, size = Path(sys.argv[1]), Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), os.environ["WORLD_SIZE"]
rank, last = int(os.environ["RANK"]), 400
done = max([0, *(int(path.name[5:]) for path in folder.glob("done-*"))])
trainium_worker.stage("compile")
if not (graphs / f"graph-{{size}}").exists():
    time.sleep({COMPILE_SECONDS})
    if rank == 0:
        (folder / f"compiled-in-a-step-{{size}}").touch()
for step in range(done + 1, last + 1):
    time.sleep(0.1)
    trainium_worker.step(step, loss=1 / step, total_steps=last)
    if rank == 0 and step % 5 == 0:
        (folder / f"done-{{step}}").touch()
        trainium_worker.saved(step, str(folder / f"done-{{step}}"))
    if trainium_worker.should_stop():
        sys.exit(trainium_worker.STOPPED)
"""


class CompiledJob(Job):
    """A job that compiles its initial size ahead, into the folder of compilers that write for torch."""

    @property
    def manifest(self) -> dict[str, Any]:
        manifest = super().manifest
        folder = f"/checkpoints/{self.namespace}/{self.name}"
        program = {
            "image": (self.cluster.settings.get("chartValues") or {}).get("trainerImage", "team/script:1"),
            "command": ["python", "-c", TRAIN, folder],
            "precompile": {"command": ["sh", "-c", COMPILE, "compile", folder], "sizes": "Start"},
            "checkpoints": {"path": folder, "committed": "done-{step}"},
        }
        manifest["spec"]["program"] = merge(program, manifest["spec"]["program"])
        return manifest


def test_a_size_is_compiled_once_ahead_and_another_one_in_its_first_step(
    operator: SharedCluster, namespace: str
) -> None:
    # It must not start on one node while the other one waits for what the first compiles.
    change = {"workers": {"minReplicas": 1}, "recovery": {"rescaleAfterSeconds": 120}, "program": {}}
    job = CompiledJob(operator, namespace, "program", json.dumps(change))
    job.apply()
    status = job.wait_until("steps", lambda status: (status.get("progress") or {}).get("step", 0) >= 5, seconds=180)
    assert (job.folder / "compiled-ahead").read_text().split() == ["2"], "the second node fetched what the first made"
    assert not (job.folder / "compiled-in-a-step-2").exists(), "all ranks found the graphs"
    assert not status.get("history")

    job.scale(1)
    entry = job.wait_for_recovery(1, seconds=180)

    assert (job.folder / "compiled-in-a-step-1").exists()
    assert (entry["cause"], entry["response"]) == ("Resize", "Resize"), entry
    assert entry["stages"]["compile"] >= COMPILE_SECONDS * 0.75, entry
    assert entry["stages"]["compile"] <= entry["recoveredSeconds"], entry
    lost = job.read_status()["goodput"]["lostByStage"]
    assert lost["Compile"] >= COMPILE_SECONDS * 0.75, lost
