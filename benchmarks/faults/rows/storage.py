"""Define the rows about checkpoints: a failure during a save, a damaged checkpoint, hanging storage."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.faults.record import FaultRun, Findings
from benchmarks.faults.recovery import SPARE_OR_REPLACE, ExpectedRecovery, Run, expect_in_place
from benchmarks.faults.row import Row
from trainium_trainer.checkpoint.root.survey import survey, verify
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.faults.target import TargetJob

SAVE_EVERY = 10
SELDOM = 20
SAVES = f"checkpoint: {{durable: {{everySteps: {SAVE_EVERY}, keepLast: 3}}}}"
STALL_SECONDS = 20.0


def _damaged(target: TargetJob) -> list[str]:
    """Return the incomplete committed checkpoints, except those that are being removed."""
    storage = PosixStorage(target.job.folder)
    found = survey(storage)
    damaged = [*found.damaged, *(f"step-{item.step}" for item in found.committed if verify(storage, item, Retry()))]
    present = {f"step-{step}" for step in target.committed()}
    return [name for name in damaged if name in present]


def _uncommitted(target: TargetJob, inside: str = "*") -> list[Path]:
    folders = (path for path in target.job.folder.glob("step-*") if not (path / "COMMITTED").exists())
    return [found for folder in folders for found in folder.glob(inside)]


def _newest(target: TargetJob) -> int:
    return max(target.committed(), default=0)


def _kill_during_save(run: Run) -> FaultRun:
    target = run.target
    pod = run.rng.choice(target.members())["podName"]
    during_commit = run.rng.random() < 0.3
    (target.commands / "slow").write_text("0.3")  # delay of each file in seconds, so that a save takes long
    target.until(lambda: _uncommitted(target), "save in progress", 60)
    if during_commit:
        target.until(lambda: _uncommitted(target, "*/manifest.json") or True, "commit in progress", 5)
    time.sleep(run.rng.uniform(0.0, 0.6))
    result = run.inject(lambda: target.signal(pod, "KILL"), expect_in_place("Crash", pod), note=f"{pod} in a save")
    (target.commands / "slow").unlink(missing_ok=True)
    newest = _newest(target)
    target.until(lambda: _newest(target) > newest, "next commit", 60)
    found = Findings(list(result.deviations))
    found.expect(not _damaged(target), f"committed checkpoints are incomplete: {_damaged(target)}")
    return replace(result, deviations=tuple(found.deviations))


def _damage_newest(run: Run) -> FaultRun:
    """Damage the newest checkpoint, and kill all pods and their memory tier."""
    target = run.target
    target.until(lambda: len(target.committed()) >= 2, "two checkpoints", 60)
    known = _newest(target)
    target.until(lambda: _newest(target) > known, "new commit", 60)
    newest = _newest(target)
    shard = max((target.job.folder / f"step-{newest}").glob("*/*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[run.rng.randrange(len(content))] ^= 1 << run.rng.randrange(8)
    shard.chmod(0o644)
    shard.write_bytes(content)
    before, members, moment = run.snapshot(), target.members(), time.time()
    for member in members:
        run.env.kill_agent(target.job.namespace, member["podName"], member["nodeName"])
    completed = target.step()
    lost = completed - newest + SELDOM + 2
    expect = ExpectedRecovery(causes=frozenset({"PodLost"}), rungs=SPARE_OR_REPLACE, steps_lost=lost, seconds=120)
    result = run.follow(before, moment, completed, expect, note=f"step-{newest} damaged")
    found = Findings(list(result.deviations))
    resumed = target.history()[-1].get("resumeStep")
    found.expect(resumed is not None and resumed < newest, f"resumed from step {resumed}, damaged was {newest}")
    named = any(f"step-{newest}" in event or f"step {newest}" in event for event in target.job.events())
    found.expect(named, "no event names the damaged checkpoint")
    return replace(result, deviations=tuple(found.deviations))


def _stall_storage(run: Run) -> FaultRun:
    target = run.target
    before, start, saved = run.snapshot(), target.step(), _newest(target)
    time.sleep(run.rng.uniform(0.0, 1.0))
    (target.commands / "stall").write_text("")
    moment, alarm, found = time.time(), None, Findings()
    while time.time() < moment + STALL_SECONDS:
        time.sleep(0.2)
        if alarm is None and target.condition("CheckpointHealthy").get("status") == "False":
            alarm = round(time.time() - moment, 3)
    end = target.step()
    longest = max(record["seconds"] or 0.0 for step, record in target.records().items() if start < step <= end)
    (target.commands / "stall").unlink()
    found.expect(end - start > STALL_SECONDS / 0.5, f"only {end - start} steps in {STALL_SECONDS:.0f} s")
    found.expect(longest < 2.0, f"a step took {longest:.1f} s while storage was stalled")
    found.expect(len(target.history()) == len(before.entries), "the stall made an interruption")
    target.until(lambda: _newest(target) > saved + SAVE_EVERY, "commit after the stall", 60)
    blame = found.expect(alarm is not None, "no alarm: CheckpointHealthy stayed True")
    return run.result(found, detect=alarm, steps_lost=0, blame=blame, note=f"longest step {longest:.2f} s")


ROWS = (
    Row(
        number=21,
        fault="failure during a save or a commit",
        injected="SIGKILL of a rank while a slowed save writes, or commits",
        expected="older checkpoints stay complete, no incomplete one is committed; at most 1 step lost",
        checked="as row 1; each committed checkpoint against its manifest (SHA-256); later commits; curve",
        run_once=_kill_during_save,
        spec=SAVES,
    ),
    Row(
        number=22,
        fault="newest checkpoint damaged",
        injected="one bit of its largest file, then all agents killed at once: their pods fail, and no memory is left",
        expected=f"found by its checksum, the one before it is used; at most 2 intervals (of {SELDOM} steps) lost",
        checked="history: resumeStep below the damaged step; an event names it; curve",
        run_once=_damage_newest,
        spares=0,
        spec=f"checkpoint: {{durable: {{everySteps: {SELDOM}, keepLast: 3}}}}",
        max_runs=5,
    ),
    Row(
        number=23,
        fault="storage hangs",
        injected=f"every open of a checkpoint file blocks, for {STALL_SECONDS:.0f} s",
        expected="training continues, 0 steps lost, an alarm; saves continue afterwards",
        checked="steps during the stall, none longer than 2 s; no interruption; CheckpointHealthy False; later commits",
        run_once=_stall_storage,
        spec=SAVES,
        max_runs=3,
    ),
)
