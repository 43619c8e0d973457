"""Inject faults into the control plane: the API server, etcd, and name servers."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING

from benchmarks.faults.injections.processes import signal_rank
from trainium_devcluster.controlplane.components import Component

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.faults.recovery import Run
    from benchmarks.faults.target import TargetJob
    from trainium_devcluster.faults import Faults

_OUTAGE_SECONDS = 20.0


def stop_api_server(run: Run) -> None:
    """Kill the API server, and start it later; training continues without an interruption."""
    target, faults = run.target, run.env.faults
    before = run.record_state()
    time.sleep(run.rng.uniform(0.0, 1.0))
    start = target.read_newest_step()
    faults.stop(Component.APISERVER, seconds=0)
    try:
        time.sleep(_OUTAGE_SECONDS)
        steps = target.read_newest_step() - start
    finally:
        faults.start(Component.APISERVER)
    target.wait_until("status of the operator", lambda status: status["progress"]["step"] > start + steps)
    target.wait_until_stable(10)
    run.expect(steps > _OUTAGE_SECONDS / 0.5, f"only {steps} steps during the outage")
    run.expect(len(target.read_history()) == len(before.interruptions), "the outage caused an interruption")
    run.expect(target.list_uids() == before.pod_uids, "pods were replaced")
    run.result.steps_lost, run.result.note = 0, f"{steps} steps during the outage"


def signal_rank_without_names(run: Run) -> None:
    """Kill a rank while no name server answers."""
    with run.env.stop_name_servers():
        time.sleep(run.rng.uniform(0.0, 2.0))
        signal_rank(run)


def restore_backup(run: Run) -> None:
    """Copy etcd's data, delete two members one after the other, and put the copy back."""
    target, faults = run.target, run.env.faults
    assert run.env.cluster.devcluster is not None
    data = run.env.cluster.devcluster.paths.root / "etcd"
    backup = data.with_name("etcd-backup")
    with _stop_control_plane(faults):
        shutil.copytree(data, backup)
    for _ in range(2):
        target.wait_until_stable(3, 120)
        generation = _read_generation(target)
        target.delete_pod(run.choose_member()["podName"], force=True)
        _wait_for_generation(target, generation + 1, 60)
    target.wait_until_stable(3, 120)
    known = _read_generation(target)
    with _stop_control_plane(faults):
        shutil.rmtree(data)
        backup.rename(data)
    restored_at, step = time.time(), target.read_newest_step()
    _wait_for_generation(target, known + 1, 180)
    target.wait_for_step(step + 20, 180)
    reached, counted = _read_generation(target), target.read_status().get("restarts", {}).get("byCause", {})
    run.expect(reached == known + 1, f"generation {reached} instead of {known + 1}, the first above the agents'")
    run.expect("Crash" not in counted, f"counted as failures of a process: {counted}")
    seconds = next(record["time"] for at, record in sorted(target.read_records().items()) if at > step) - restored_at
    run.result.recovery_seconds = round(seconds, 3)
    run.result.note = f"generation {known} before the restore, then {reached}; counted restarts: {counted}"


def _read_generation(target: TargetJob) -> int:
    return int(target.read_status().get("membership", {}).get("generation", 0))


def _wait_for_generation(target: TargetJob, generation: int, seconds: float) -> None:
    target.wait_for(f"generation {generation}", lambda: _read_generation(target) >= generation, seconds)


@contextlib.contextmanager
def _stop_control_plane(faults: Faults) -> Iterator[None]:
    components = (Component.SCHEDULER, Component.CONTROLLER_MANAGER, Component.APISERVER, Component.ETCD)
    for component in components:
        faults.stop(component)
    try:
        yield
    finally:
        faults.start(*reversed(components))
