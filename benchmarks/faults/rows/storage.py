"""Rows about checkpoints: a failure while one is written, a damaged one, a store that stands still."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.faults.record import FaultRun, Findings
from benchmarks.faults.row import Row, Session, in_one_job
from benchmarks.faults.rows.pods import ONE_SPARE
from benchmarks.faults.rows.processes import in_place
from benchmarks.faults.trial import Before, Expect, follow, strike
from trainium_trainer.checkpoint.root.survey import survey, verify
from trainium_trainer.checkpoint.storage.posix import PosixStorage
from trainium_trainer.checkpoint.storage.protocol import Retry

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.faults.patient import Patient
    from benchmarks.faults.stage import Stage

SAVE_EVERY = 10
SELDOM = 20
OFTEN = f"checkpoint: {{durable: {{everySteps: {SAVE_EVERY}, keepLast: 3}}}}"
STALL_SECONDS = 20.0


def _torn(patient: Patient) -> list[str]:
    """Committed checkpoints that are not whole; one that is removed meanwhile does not count."""
    storage = PosixStorage(patient.job.folder)
    found = survey(storage)
    torn = [*found.damaged, *(f"step-{item.step}" for item in found.committed if verify(storage, item, Retry()))]
    present = {f"step-{step}" for step in patient.committed()}
    return [name for name in torn if name in present]


def _uncommitted(patient: Patient, inside: str = "*") -> list[Path]:
    """What is there of checkpoints that are not committed yet."""
    folders = (path for path in patient.job.folder.glob("step-*") if not (path / "COMMITTED").exists())
    return [found for folder in folders for found in folder.glob(inside)]


def _during_save(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = dice.choice(patient.members())["podName"]
        at_commit = dice.random() < 0.3
        (patient.orders / "slow").write_text("0.3")  # each file takes this long, so that a save lasts
        patient.until("a save under way", lambda: _uncommitted(patient), 60)
        if at_commit:
            patient.until("a commit under way", lambda: _uncommitted(patient, "*/manifest.json") or True, 5)
        time.sleep(dice.uniform(0.0, 0.6))
        expect = in_place("Crash", victim)
        outcome = strike(patient, run, lambda: patient.signal(victim, "KILL"), expect, note=f"{victim} in a save")
        (patient.orders / "slow").unlink(missing_ok=True)
        newest = max(patient.committed(), default=0)
        patient.until("the next commit", lambda: max(patient.committed(), default=0) > newest, 60)
        found = Findings(list(outcome.wrong))
        found.expect(not _torn(patient), f"committed checkpoints are not whole: {_torn(patient)}")
        found.expect(newest == 0 or newest in patient.committed() or newest < max(patient.committed()), "one went back")
        return replace(outcome, wrong=tuple(found.wrong))

    yield from in_one_job(stage, session, "insave", f"{ONE_SPARE}\n{OFTEN}", one)


def _damaged(stage: Stage, session: Session) -> Iterator[FaultRun]:
    """All pods are lost at once, and their memory with them, while the newest checkpoint is damaged."""
    change = f"checkpoint: {{durable: {{everySteps: {SELDOM}, keepLast: 3}}}}"

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        patient.until("two checkpoints", lambda: len(patient.committed()) >= 2, 60)
        known = patient.committed()[-1]
        patient.until("one just committed", lambda: patient.committed()[-1] > known, 60)
        newest = patient.committed()[-1]
        folder = patient.job.folder / f"step-{newest}"
        shard = max(folder.glob("*/*.safetensors"), key=lambda path: path.stat().st_size)
        content = bytearray(shard.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        shard.chmod(0o644)
        shard.write_bytes(content)
        before = Before.of(patient)
        members = patient.members()
        moment = time.time()
        for member in members:
            stage.kill_agent(patient.job.namespace, member["podName"], member["nodeName"])
        completed = patient.step()
        since = completed - newest

        expect = Expect(
            causes=frozenset({"PodLost"}),
            rungs=frozenset({"Replace", "Spare"}),
            steps_lost=since + SELDOM + 2,
            patience=120,
        )
        outcome = follow(patient, run, before, moment, completed, expect, note=f"step-{newest} damaged")
        found = Findings(list(outcome.wrong))
        resumed = patient.history()[-1].get("resumeStep")
        found.expect(resumed is not None and resumed < newest, f"resumed from step {resumed}, damaged was {newest}")
        events = patient.job.events()
        told = any(f"step-{newest}" in event or f"step {newest}" in event for event in events)
        found.expect(told, "no event reports the damaged checkpoint")
        return replace(outcome, wrong=tuple(found.wrong))

    yield from in_one_job(stage, session, "damaged", change, one)


def _stalled(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        before = Before.of(patient)
        begun, saved = patient.step(), max(patient.committed(), default=0)
        time.sleep(dice.uniform(0.0, 1.0))
        (patient.orders / "stall").write_text("")
        moment = time.time()
        found = Findings()
        deadline = moment + STALL_SECONDS
        alarm: float | None = None
        while time.time() < deadline:
            time.sleep(0.2)
            if alarm is None and patient.condition("CheckpointHealthy").get("status") == "False":
                alarm = time.time() - moment
        during = patient.step()
        records = patient.records()
        longest = max(record["seconds"] or 0.0 for step, record in records.items() if begun < step <= during)
        (patient.orders / "stall").unlink()
        found.expect(during - begun > STALL_SECONDS / 0.5, f"only {during - begun} steps in {STALL_SECONDS:.0f} s")
        found.expect(longest < 2.0, f"a step took {longest:.1f} s while the store stood still")
        entries = len(patient.history())
        found.expect(entries == len(before.entries), "the stall was taken for a fault")
        patient.until("a commit after the stall", lambda: max(patient.committed(), default=0) > saved + SAVE_EVERY, 60)
        found.expect(alarm is not None, "no alarm: CheckpointHealthy stayed True")
        blame = alarm is not None
        return FaultRun(run, alarm, None, 0, blame, tuple(found.wrong), f"longest step {longest:.2f} s")

    yield from in_one_job(stage, session, "stalled", f"{ONE_SPARE}\n{OFTEN}", one)


ROWS = (
    Row(
        number=21,
        fault="failure during a save or a commit",
        injected="SIGKILL of a rank while a slowed save writes, or commits",
        expected="the older checkpoints stay whole, no torn one is ever committed; at most 1 step lost",
        judged="as row 1; each committed checkpoint against its manifest (SHA-256); commits go on; curve",
        play=_during_save,
        kubelet=True,
    ),
    Row(
        number=22,
        fault="newest checkpoint damaged",
        injected="one bit of its largest file, then all agents killed at once: their pods fail, and no memory is left",
        expected=f"found by its checksum, the one before it is used; at most 2 intervals (of {SELDOM} steps) lost",
        judged="history: resumeStep below the damaged step; an event names it; curve",
        play=_damaged,
        most=5,
        kubelet=True,
    ),
    Row(
        number=23,
        fault="storage stands still",
        injected=f"every open of a checkpoint file blocks, for {STALL_SECONDS:.0f} s",
        expected="training goes on, 0 steps lost, an alarm; saves go on afterwards",
        judged="steps during the stall, none longer than 2 s; no interruption; CheckpointHealthy False; later commits",
        play=_stalled,
        most=3,
        kubelet=True,
    ),
)
