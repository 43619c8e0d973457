"""Define the rows about checkpoints: a failure during a save, a damaged checkpoint, hanging storage."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.faults.record import Findings, RunResult
from benchmarks.faults.recovery import SPARE_OR_REPLACE, ExpectedRecovery, Run, expect_in_place
from benchmarks.faults.row import Row
from trainium_trainer.checkpoint.root.survey import survey, verify
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.faults.target import TargetJob

SAVE_EVERY_STEPS = 10
RARE_EVERY_STEPS = 20
FREQUENT_SAVES = f"checkpoint: {{durable: {{everySteps: {SAVE_EVERY_STEPS}, keepLast: 3}}}}"
STALL_SECONDS = 20.0


def _damaged_checkpoints(target: TargetJob) -> list[str]:
    """Return the incomplete committed checkpoints, except those that are being removed."""
    storage = PosixStorage(target.job.folder)
    report = survey(storage)
    damaged = [*report.damaged, *(f"step-{item.step}" for item in report.committed if verify(storage, item, Retry()))]
    present = {f"step-{step}" for step in target.committed_steps()}
    return [name for name in damaged if name in present]


def _uncommitted_files(target: TargetJob, pattern: str = "*") -> list[Path]:
    folders = (path for path in target.job.folder.glob("step-*") if not (path / "COMMITTED").exists())
    return [path for folder in folders for path in folder.glob(pattern)]


def _newest_committed(target: TargetJob) -> int:
    return max(target.committed_steps(), default=0)


def _kill_during_save(run: Run) -> RunResult:
    target = run.target
    pod = run.rng.choice(target.members())["podName"]
    during_commit = run.rng.random() < 0.3
    (target.commands / "slow").write_text("0.3")  # delay of each file in seconds, so that a save takes long
    target.wait_until(lambda: _uncommitted_files(target), "save in progress", 60)
    if during_commit:
        target.wait_until(lambda: _uncommitted_files(target, "*/manifest.json") or True, "commit in progress", 5)
    time.sleep(run.rng.uniform(0.0, 0.6))
    expected = expect_in_place("Crash", pod)
    result = run.measure_recovery(lambda: target.signal(pod, "KILL"), expected, note=f"{pod} in a save")
    (target.commands / "slow").unlink(missing_ok=True)
    newest = _newest_committed(target)
    target.wait_until(lambda: _newest_committed(target) > newest, "next commit", 60)
    findings = Findings(list(result.deviations))
    findings.expect(
        not _damaged_checkpoints(target), f"committed checkpoints are incomplete: {_damaged_checkpoints(target)}"
    )
    return replace(result, deviations=tuple(findings.deviations))


def _damage_newest(run: Run) -> RunResult:
    """Damage the newest checkpoint, and kill all pods and their memory tier."""
    target = run.target
    target.wait_until(lambda: len(target.committed_steps()) >= 2, "two checkpoints", 60)
    previous = _newest_committed(target)
    target.wait_until(lambda: _newest_committed(target) > previous, "new commit", 60)
    newest = _newest_committed(target)
    shard = max((target.job.folder / f"step-{newest}").glob("*/*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[run.rng.randrange(len(content))] ^= 1 << run.rng.randrange(8)
    shard.chmod(0o644)
    shard.write_bytes(content)
    members = target.members()

    def kill_all_agents() -> None:
        for member in members:
            run.env.kill_agent(target.job.namespace, member["podName"], member["nodeName"])

    fault = run.inject(kill_all_agents)
    expected = ExpectedRecovery(
        causes=frozenset({"PodLost"}),
        rungs=SPARE_OR_REPLACE,
        max_steps_lost=fault.completed_step - newest + RARE_EVERY_STEPS + 2,
        timeout_seconds=120,
    )
    result = run.follow_recovery(fault, expected, note=f"step-{newest} damaged")
    findings = Findings(list(result.deviations))
    resumed = target.history()[-1].get("resumeStep")
    findings.expect(resumed is not None and resumed < newest, f"resumed from step {resumed}, damaged was {newest}")
    named = any(f"step-{newest}" in event or f"step {newest}" in event for event in target.job.events())
    findings.expect(named, "no event names the damaged checkpoint")
    return replace(result, deviations=tuple(findings.deviations))


def _stall_storage(run: Run) -> RunResult:
    target = run.target
    before, start, saved = run.snapshot(), target.newest_step(), _newest_committed(target)
    time.sleep(run.rng.uniform(0.0, 1.0))
    (target.commands / "stall").write_text("")
    stalled_at, alarm_seconds, findings = time.time(), None, Findings()
    while time.time() < stalled_at + STALL_SECONDS:
        time.sleep(0.2)
        if alarm_seconds is None and target.condition("CheckpointHealthy").get("status") == "False":
            alarm_seconds = round(time.time() - stalled_at, 3)
    end = target.newest_step()
    longest = max(record["seconds"] or 0.0 for step, record in target.records().items() if start < step <= end)
    (target.commands / "stall").unlink()
    findings.expect(end - start > STALL_SECONDS / 0.5, f"only {end - start} steps in {STALL_SECONDS:.0f} s")
    findings.expect(longest < 2.0, f"a step took {longest:.1f} s while storage was stalled")
    findings.expect(len(target.history()) == len(before.interruptions), "the stall caused an interruption")
    target.wait_until(lambda: _newest_committed(target) > saved + SAVE_EVERY_STEPS, "commit after the stall", 60)
    blame_correct = findings.expect(alarm_seconds is not None, "no alarm: CheckpointHealthy stayed True")
    return run.result(
        findings,
        detection_seconds=alarm_seconds,
        steps_lost=0,
        blame_correct=blame_correct,
        note=f"longest step {longest:.2f} s",
    )


ROWS = (
    Row(
        number=21,
        fault="failure during a save or a commit",
        injected="SIGKILL of a rank while a slowed save writes, or commits",
        expected="older checkpoints stay complete, no incomplete one is committed; at most 1 step lost",
        checked="as row 1; each committed checkpoint against its manifest (SHA-256); later commits; curve",
        run_once=_kill_during_save,
        spec=FREQUENT_SAVES,
    ),
    Row(
        number=22,
        fault="newest checkpoint damaged",
        injected="one bit of its largest file, then all agents killed at once: their pods fail, and no memory is left",
        expected=(
            "detected by its checksum, the previous one is used; at most 2 intervals "
            f"(of {RARE_EVERY_STEPS} steps) lost"
        ),
        checked="history: resumeStep below the damaged step; an event names it; curve",
        run_once=_damage_newest,
        spares=0,
        spec=f"checkpoint: {{durable: {{everySteps: {RARE_EVERY_STEPS}, keepLast: 3}}}}",
        max_runs=5,
    ),
    Row(
        number=23,
        fault="storage hangs",
        injected=f"every open of a checkpoint file blocks, for {STALL_SECONDS:.0f} s",
        expected="training continues, 0 steps lost, an alarm; saves continue afterwards",
        checked="steps during the stall, none longer than 2 s; no interruption; CheckpointHealthy False; later commits",
        run_once=_stall_storage,
        spec=FREQUENT_SAVES,
        max_runs=3,
    ),
)
