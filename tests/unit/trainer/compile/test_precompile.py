"""Run `trainium-trainer precompile` with real steps on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing.trainer.fork_server import run_python
from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.wire.log_line import read_log_line
from trainium_trainer import cli
from trainium_trainer.backends.nxd import extraction
from trainium_trainer.commands import precompile
from trainium_trainer.compile import process_pool
from trainium_trainer.compile.dry_run import create_dry_run_launch
from trainium_trainer.configuration.config import resolve_settings
from trainium_trainer.exits import UserError

pytestmark = pytest.mark.timeout(240)  # processes that import torch, one after another

JOB: dict[str, Any] = {
    "kind": "TrainingJob",
    "spec": {
        "workers": {"replicas": 2, "minReplicas": 2, "maxReplicas": 4, "accelerator": {"device": "cpu"}},
        "trainer": {
            "model": {"numLayers": 1, "hiddenSize": 32, "intermediateSize": 64},
            "data": {"source": "/there/is/no/such/folder", "sequenceLength": 32, "tokenizer": {"vocabSize": 320}},
            "batch": {"globalSize": 4},
        },
    },
}


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = dict(os.environ)
    inherited.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it in a process that has compiled
    variables = inherited | {"XDG_CACHE_HOME": str(folder / "node"), "OMP_NUM_THREADS": "1"} | environment
    return run_python("-m", "trainium_trainer", *arguments, env=variables, cwd=folder)


def list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_every_size_is_compiled_once_for_all_nodes_and_nothing_else_is_written(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    shared = ("--set", f"neuron.sharedCacheDirectory={tmp_path / 'shared'}")
    first = run(tmp_path, "precompile", "--config", "job.yaml", *shared)
    assert first.returncode == 0, first.stderr
    assert [line.rsplit(" in ", 1)[0] for line in first.stdout.splitlines()] == [
        "2 nodes: data parallel 2, 1 place(s) in the model: compiled",
        "4 nodes: data parallel 4, 1 place(s) in the model: compiled",
    ]
    written = list_files(tmp_path)
    assert all(name == "job.yaml" or name.startswith(("node/trainium/compiled/", "shared/")) for name in written)
    assert len([name for name in written if name.startswith("shared/keys/")]) == 2
    repeated = run(tmp_path, "precompile", "--config", "job.yaml", *shared, TRAINIUM_LOG_FORMAT="json")
    reported = [line for text in repeated.stdout.splitlines() if (line := read_log_line(text)) is not None]
    assert [": ready in " in line.message for line in reported] == [True, True]
    other_node = run(tmp_path, "precompile", "--config", "job.yaml", *shared, XDG_CACHE_HOME=str(tmp_path / "node-2"))
    assert other_node.stdout.count(": fetched in ") == 2


def test_one_process_compiles_for_any_rank_of_any_division() -> None:
    config = JOB["spec"]["trainer"] | {
        "model": {"numLayers": 2, "hiddenSize": 32, "intermediateSize": 64},
        "data": JOB["spec"]["trainer"]["data"] | {"maskDocuments": True},
        "dataParallel": "FullySharded",
        "parallelism": {"tensor": 2, "pipeline": 2},
    }
    completed = subprocess.run(
        [sys.executable, "-m", "trainium_trainer.compile.dry_run"],
        input=json.dumps({"config": config, "rank": 5, "world_size": 8}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr


@pytest.mark.long
def test_the_places_of_a_model_are_compiled_side_by_side(tmp_path: Path) -> None:
    trainer = JOB["spec"]["trainer"] | {"model": {"numLayers": 2, "hiddenSize": 32, "intermediateSize": 64}}
    spec = JOB["spec"] | {"trainer": trainer, "parallelism": {"tensor": 2, "pipeline": 2}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"kind": "TrainingJob", "spec": spec}))
    completed = run(tmp_path, "precompile", "--config", "job.yaml", "--sizes", "4")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("4 nodes: data parallel 1, 4 place(s) in the model: compiled in ")


FAKE_TOOL = """#!/bin/sh
cat > /dev/null
echo "$2 $NEURON_RT_VISIBLE_CORES $RANK" > "$RECORDS/$RANK"
while [ "$RANK" != 0 ] && [ "$(ls "$RECORDS" | wc -l)" -lt 4 ]; do sleep 0.02; done
sleep 0.5
[ "$RANK" != "$FAILS" ] || { echo "no such operator" >&2; exit 64; }
"""


@pytest.mark.parametrize("fails", ["", "2"])
def test_the_tool_has_a_folder_and_a_core_for_each_place_and_its_failure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The real tool removes its folder at its start, and one process uses a core; this tool is fake."""
    records = tmp_path / "records"
    records.mkdir()
    (tmp_path / "neuron_parallel_compile").write_text(FAKE_TOOL)
    (tmp_path / "neuron_parallel_compile").chmod(0o755)
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORDS": str(records), "FAILS": fails}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(precompile, "_is_nxd", lambda _: True)
    monkeypatch.setattr(extraction, "find_ranks_with_distinct_graphs", lambda _: (0,))
    monkeypatch.setattr(process_pool, "read_memory", lambda _: 1)  # three processes fit on any machine
    trainer = JOB["spec"]["trainer"] | {"parallelism": {"tensor": 4}}
    settings = resolve_settings(TrainingConfig.model_validate(trainer), create_dry_run_launch(0, 4, 4))
    if fails:
        with pytest.raises(UserError, match="compiling for 4 ranks, rank 2: no such operator"):
            precompile._compile(settings, None)
        return
    precompile._compile(settings, None)
    calls = [(records / str(rank)).read_text().split() for rank in range(4)]
    assert len({folder for folder, _, _ in calls}) == 4
    assert [rank for _, _, rank in calls] == ["0", "1", "2", "3"]
    assert sorted(core for _, core, _ in calls[1:]) == ["0", "1", "2"]
    assert not any(Path(folder).parent.exists() for folder, _, _ in calls)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["precompile", "--sizes", "three"], {}, "--sizes is 'three'"),
        (["precompile", "--set", "backend=Nxd"], {}, "neuronx_distributed"),
        (["train"], {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}, "use `trainium-trainer precompile`"),
    ],
)
def test_a_model_that_cannot_be_compiled_is_reported_with_code_64(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    environment: dict[str, str],
    words: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    assert cli.run([*arguments, "--config", str(tmp_path / "job.yaml")]) == 64
    assert words in capsys.readouterr().err
