"""Inject faults into checkpoints: a failure during a save, a damaged checkpoint, storage that hangs."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from trainium_trainer.checkpoint.root.survey import survey, verify
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.faults.recovery import Run
    from benchmarks.faults.target import TargetJob

_STALL_SECONDS = 20.0
_MAX_STALLED_STEP_SECONDS = 2.0


def _find_damaged_checkpoints(target: TargetJob) -> list[str]:
    """Return the incomplete committed checkpoints, except those that are being removed."""
    storage = PosixStorage(target.folder)
    report = survey(storage)
    damaged = [*report.damaged, *(f"step-{item.step}" for item in report.committed if verify(storage, item, Retry()))]
    present = {f"step-{step}" for step in target.list_committed_steps()}
    return [name for name in damaged if name in present]


def _find_uncommitted_files(target: TargetJob, pattern: str = "*") -> list[Path]:
    folders = (path for path in target.folder.glob("step-*") if not (path / "COMMITTED").exists())
    return [path for folder in folders for path in folder.glob(pattern)]


def _find_newest_committed(target: TargetJob) -> int:
    return max(target.list_committed_steps(), default=0)


def _save_interval(target: TargetJob) -> int:
    return int(target.manifest["spec"]["checkpoint"]["durable"]["everySteps"])


def kill_rank_during_save(run: Run) -> None:
    """Kill a rank while a slowed save writes, or commits."""
    target = run.target
    victim = run.rng.choice(target.list_members())
    during_commit = run.rng.random() < 0.3
    (target.commands / "slow").write_text("0.3")  # delay of each file in seconds, so that a save takes long
    target.wait_for("a save in progress", lambda: _find_uncommitted_files(target), 60)
    if during_commit:
        target.wait_for("a commit in progress", lambda: _find_uncommitted_files(target, "*/manifest.json") or True, 5)
    time.sleep(run.rng.uniform(0.0, 0.6))
    pod = victim["podName"]
    run.measure(partial(target.signal_rank, pod), victim, note=f"{pod} in a save")
    (target.commands / "slow").unlink(missing_ok=True)
    newest = _find_newest_committed(target)
    target.wait_for("the next commit", lambda: _find_newest_committed(target) > newest, 60)
    damaged = _find_damaged_checkpoints(target)
    run.expect(not damaged, f"committed checkpoints are incomplete: {damaged}")


def damage_newest_checkpoint(run: Run) -> None:
    """Damage the newest checkpoint, and kill all pods and their memory tier."""
    target = run.target
    target.wait_for("two checkpoints", lambda: len(target.list_committed_steps()) >= 2, 60)
    previous = _find_newest_committed(target)
    target.wait_for("a new commit", lambda: _find_newest_committed(target) > previous, 60)
    newest = _find_newest_committed(target)
    shard = max((target.folder / f"step-{newest}").glob("*/*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[run.rng.randrange(len(content))] ^= 1 << run.rng.randrange(8)
    shard.chmod(0o644)
    shard.write_bytes(content)
    members = target.list_members()

    def kill_all_agents() -> None:
        for member in members:
            run.env.kill_agent(target.namespace, member)

    fault = run.inject(kill_all_agents)
    allowed = fault.completed_step - newest + _save_interval(target) + 2
    run.follow(fault, *members, note=f"step-{newest} damaged", steps_lost=allowed)
    resumed = target.read_history()[-1].get("resumeStep")
    run.expect(resumed is not None and resumed < newest, f"resumed from step {resumed}, damaged was {newest}")
    named = any(f"step-{newest}" in event or f"step {newest}" in event for event in target.list_events())
    run.expect(named, "no event names the damaged checkpoint")


def stall_storage(run: Run) -> None:
    """Block every access to checkpoint files for a while: training continues, with an alarm."""
    target = run.target
    before, start, saved = run.record_state(), target.read_newest_step(), _find_newest_committed(target)
    time.sleep(run.rng.uniform(0.0, 1.0))
    (target.commands / "stall").write_text("")
    stalled_at, alarm_seconds = time.time(), None
    while time.time() < stalled_at + _STALL_SECONDS:
        time.sleep(0.2)
        if alarm_seconds is None and target.find_condition("CheckpointHealthy").get("status") == "False":
            alarm_seconds = round(time.time() - stalled_at, 3)
    end = target.read_newest_step()
    longest = max(record["seconds"] or 0.0 for step, record in target.read_records().items() if start < step <= end)
    (target.commands / "stall").unlink()
    run.expect(end - start > _STALL_SECONDS / 0.5, f"only {end - start} steps in {_STALL_SECONDS:.0f} s")
    run.expect(longest < _MAX_STALLED_STEP_SECONDS, f"a step took {longest:.1f} s while storage was stalled")
    run.expect(len(target.read_history()) == len(before.interruptions), "the stall caused an interruption")
    newer = saved + _save_interval(target)
    target.wait_for("a commit after the stall", lambda: _find_newest_committed(target) > newer, 60)
    run.result.blame_correct = run.expect(alarm_seconds is not None, "no alarm: CheckpointHealthy stayed True")
    run.result.detection_seconds, run.result.steps_lost = alarm_seconds, 0
    run.result.note = f"longest step {longest:.2f} s"
