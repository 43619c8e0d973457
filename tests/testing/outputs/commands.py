"""Output of the commands on pages, run on recorded or built jobs."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.testing.api.recorded_jobs import RECORDED
from tests.testing.outputs.recording import FirstFrameTerminal, Recording, replay
from tests.testing.outputs.tables import table
from trainium_client.commands import simulate as simulating
from trainium_client.commands.ui_server import UiServer
from trainium_client.importing.importer import Options, import_jobs
from trainium_client.importing.writer import write_job
from trainium_devcluster import cli as devcluster
from trainium_devcluster import cluster as devcluster_parts
from trainium_simulator.command import main as simulate

ROOT = Path(__file__).parents[3]
PAGES = (
    "README.md", "docs/first-job.md", "docs/goodput.md", "docs/import.md", "docs/kubectl-trn.md", "docs/program.md",
    "docs/simulate.md", "docs/watch.md",
)  # fmt: skip
"""Pages with outputs."""
SIMULATION = (
    "trainium-operator simulate manifests/examples/hlat-7b.yaml --spares 0..2 --failures-per-1000-node-days 4 "
    "--days 15 --seeds 2 --goal 0.999"
)
SIMULATE = (
    "kubectl trn simulate llama -n team --learn --spares 0..1 --failures-per-1000-node-days 22 --days 4 --seeds 2"
)
SLOW = frozenset({SIMULATION, SIMULATE})
"""Commands that take seconds of processor time."""
_NOW = 1_795_561_800.0
_RECORDED = {
    "list": "asked/list",
    "status llama": "asked/job",
    "watch llama": "asked/recovering",
    "why llama": "asked/job",
    "history llama": "asked/job",
    "goodput llama": "asked/job",
    "sizes llama": "asked/job",
    "ranks llama": "asked/ranks",
    "checkpoints llama": "asked/checkpoints",
    "logs llama": "asked/follow",
    "stacks llama": "asked/stacks",
    "profile llama": "asked/profile",
    "report llama": "asked/report",
    "support-bundle llama": "asked/bundle",
    "simulate llama": "asked/job",
    "suspend llama": "asked/suspend",
    "resume llama": "asked/resume",
    "scale llama": "asked/scale",
    "retry llama": "asked/retry",
    "nodes": "asked/nodes",
    "release": "asked/release",
    "status demo": "first-job/waiting",
    "why demo": "first-job/killed",
    "why mistake": "first-job/mistake",
    "status program": "program/status",
    "scaling program": "program/scaling",
}


_STEP_AGE_SECONDS = 2.0


def output(command: str) -> str:
    """Return the output of a command. Raises KeyError for an unknown one."""
    if command.startswith("kubectl trn ") and command not in _BUILT:
        return _replay(shlex.split(command)[2:])
    return _BUILT[command]()


def _replay(arguments: Sequence[str], out: io.StringIO | None = None) -> str:
    return replay(recording_of(arguments), arguments, out=out)


def recording_of(arguments: Sequence[str]) -> Recording:
    """Return the recording of a `kubectl trn` command. Raises KeyError without one."""
    name = arguments[0] if arguments[0] in _RECORDED else " ".join(arguments[:2])
    return Recording.read(RECORDED / f"{_RECORDED[name]}.json")


def _kubectl_get(name: str, age: float, spec: dict[str, Any], **status: Any) -> str:
    created, updated = (
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(_NOW - seconds)) for seconds in (age, _STEP_AGE_SECONDS)
    )
    status["progress"]["updated"] = updated
    metadata = {"name": name, "creationTimestamp": created}
    return table([{"metadata": metadata, "spec": spec, "status": status}], _NOW)


def _kubectl_get_of_readme() -> str:
    return _kubectl_get(
        "llama3-8b",
        5 * 3600,
        {"workers": {"replicas": 16}},
        phase="Running",
        conditions=[{"type": "Ready", "reason": "Training"}],
        readyReplicas=16,
        progress={"step": 8123, "loss": 2.417353},
        checkpoint={"durableStep": 8000},
        restarts={"total": 2},
    )


def _kubectl_get_of_demo() -> str:
    return _kubectl_get(
        "demo",
        95,
        {"workers": {"replicas": 4}},
        phase="Running",
        conditions=[{"type": "Ready", "reason": "Training"}],
        readyReplicas=4,
        progress={"step": 70, "loss": 4.25},
        checkpoint={"durableStep": 60},
        restarts={"total": 2},
    )


def _watch_screen() -> str:
    """Return the first frame of `watch` on a terminal."""
    return _replay(["watch", "llama", "-n", "team"], FirstFrameTerminal()).removeprefix("\x1b[H\x1b[J")


def _simulate_job() -> str:
    """Run the simulator, which prints directly to the terminal, with captured output."""

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": ""})
        sys.stdout.write(done.stdout + done.stderr)
        return done

    with mock.patch.object(simulating, "subprocess", SimpleNamespace(run=run)):
        return _replay(shlex.split(SIMULATE)[2:])


def _ui() -> str:
    """Return the output of `ui` with a fixed port and secret."""
    with mock.patch.object(UiServer, "serve_forever"):
        shown = replay(Recording.read(RECORDED / "asked/job.json"), ["ui", "llama", "-n", "team", "--no-browser"])
    return re.sub(r"(http://127\.0\.0\.1):\d+/[^/]+/", r"\1:43717/…/", shown)


def _devcluster_up() -> str:
    """Run the command without starting processes; it took 10.6 s on two cores."""
    ready = iter((0.0, 10.6))

    @contextlib.contextmanager
    def free(_: Any) -> Iterator[None]:
        yield

    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"HOME": "/home/you"}),
        mock.patch.object(devcluster_parts, "ensure_binaries", return_value=SimpleNamespace(folder=Path())),
        mock.patch.object(devcluster_parts, "reserve_name", free),
        mock.patch.object(devcluster_parts, "launch_supervisor"),
        mock.patch.object(devcluster_parts.Cluster, "request_supervisor"),
        mock.patch.object(devcluster_parts.Cluster, "wait_for_nodes"),
        mock.patch.object(devcluster_parts.Cluster, "ports", SimpleNamespace(server="https://127.0.0.1:18895")),
        mock.patch.object(devcluster, "time", SimpleNamespace(monotonic=lambda: next(ready))),
        contextlib.redirect_stderr(out),
    ):
        devcluster.up(nodes=5)
    return "\n".join(out.getvalue().splitlines()[:3])


def _simulate_example() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), mock.patch.dict(os.environ, {"COLUMNS": "160", "NO_COLOR": "1"}):
        simulate(shlex.split(SIMULATION.replace("manifests/", f"{ROOT}/manifests/"))[2:])
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _import_mingpt() -> str:
    text = (ROOT / "tests/unit/client/importing/cases/mingpt.pytorch_job.yaml").read_text(encoding="utf-8")
    ((name, job),) = import_jobs([("mingpt.yaml", text)], Options(instance_type="trn1.32xlarge"))
    return write_job(job, name)


def _log_lines() -> str:
    text = (RECORDED / "log-lines.jsonl").read_text(encoding="utf-8")
    return "\n".join(json.dumps(json.loads(line)) for line in text.splitlines())


_BUILT: dict[str, Callable[[], str]] = {
    "kubectl get trainingjobs": _kubectl_get_of_readme,
    "kubectl get trn": _kubectl_get_of_demo,
    "kubectl trn watch llama -n team": _watch_screen,
    SIMULATE: _simulate_job,
    "kubectl trn ui llama -n team": _ui,
    "trainium-devcluster up --nodes 5": _devcluster_up,
    "kubectl trn import mingpt.yaml --instance-type trn1.32xlarge": _import_mingpt,
    "lines of a log": _log_lines,
    SIMULATION: _simulate_example,
}
