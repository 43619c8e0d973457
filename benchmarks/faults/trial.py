"""One fault in a job that trains: strike, follow the answer, measure it, and judge it against what is expected."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.faults.record import FaultRun, Findings

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.faults.patient import Patient

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """What must follow from a fault; empty sets accept anything."""

    causes: frozenset[str]
    rungs: frozenset[str]
    pod: str | None = None
    """Worker that the history must name; "" for none; None: any."""
    node: str | None = None
    suspect: str | None = None
    """Node that the failure must be attributed to, so that new workers avoid it; "" for none; None: not judged."""
    steps_lost: int = 1
    replaced: int | None = None
    """Pods that joined for it; 0 also means that every pod keeps its uid. None: not judged."""
    interruptions: int = 1
    """How many entries the history may get; more means that one fault was taken for several."""
    detect_within: float | None = None
    """Seconds, where a limit is part of the row."""
    patience: float = 60.0
    also: Callable[[Findings, Json], bool] | None = None
    """Further judgement of the last history entry; False when the blame is wrong."""


@dataclass(frozen=True, slots=True)
class Before:
    """The job right before the fault."""

    entries: frozenset[tuple[Any, ...]]
    uids: frozenset[str]
    started: float = field(default_factory=time.time)

    @staticmethod
    def of(patient: Patient) -> Before:
        """Look."""
        uids = frozenset(pod["metadata"]["uid"] for pod in patient.pods())
        return Before(frozenset(key(entry) for entry in patient.history()), uids)


def key(entry: Json) -> tuple[Any, ...]:
    """What identifies an interruption: its answer may still change."""
    return (entry["generation"], entry.get("attempt", 0), entry.get("failedAt"))


def strike(
    patient: Patient, run: int, inject: Callable[[], float], expect: Expect, *, note: str = "", gap: float = 0.0
) -> FaultRun:
    """Inject a fault into a calm job and wait for the first new step; the outcome of the run."""
    before = Before.of(patient)
    moment = inject()
    completed = patient.step()
    return follow(patient, run, before, moment, completed, expect, note=note, gap=gap)


def follow(
    patient: Patient,
    run: int,
    before: Before,
    moment: float,
    completed: int,
    expect: Expect,
    *,
    note: str = "",
    gap: float = 0.0,
) -> FaultRun:
    """From a fault that struck at `moment`, when `completed` steps were done, to its judged outcome."""

    def fresh() -> list[Json]:
        return [entry for entry in patient.history() if key(entry) not in before.entries]

    def over() -> list[Json]:
        entries = fresh()
        done = entries and all(entry.get("recoveredSeconds") is not None for entry in entries)
        return entries if done else []

    patient.until("the answer to the fault and a new step", over, expect.patience)
    if gap:
        time.sleep(gap)
    entries = patient.until("the end of all interruptions", over, expect.patience)
    first, last = entries[0], entries[-1]
    found = Findings()
    blamed = _judge_blame(patient, before, first, expect, found)
    resumed = min(entry.get("resumeStep", completed) for entry in entries)
    lost = max(0, completed - resumed, *(entry.get("stepsLost") or 0 for entry in entries))
    found.expect(lost <= expect.steps_lost, f"{lost} steps were lost, expected at most {expect.steps_lost}")
    found.expect(
        len(entries) <= expect.interruptions,
        f"one fault made {len(entries)} interruptions: {', '.join(e['cause'] + '/' + e['rung'] for e in entries)}",
    )
    detect = first["failedAt"] + first["detectedSeconds"] - moment if first.get("failedAt") else None
    if expect.detect_within is not None and detect is not None:
        found.expect(detect <= expect.detect_within, f"it took {detect:.1f} s to detect")
    _judge_pods(patient, before, entries, expect, found)
    if expect.also is not None:
        blamed = expect.also(found, last) and blamed
    new = max(completed, *(entry.get("stepBefore", 0) for entry in entries), last.get("resumeStep") or 0) + 1
    patient.until_step(new, expect.patience)
    ended = patient.records().get(new, {}).get("time")
    return FaultRun(
        run=run,
        detect=None if detect is None else round(max(0.0, detect), 3),
        recover=None if ended is None else round(ended - moment, 3),
        steps_lost=lost,
        blame=blamed,
        wrong=tuple(found.wrong),
        note=note,
    )


def _judge_blame(patient: Patient, before: Before, entry: Json, expect: Expect, found: Findings) -> bool:
    start = len(found.wrong)
    text = f"{entry['cause']} ({entry['message'][:160]})"
    found.expect(not expect.causes or entry["cause"] in expect.causes, f"the cause named is {text}")
    found.expect(not expect.rungs or entry["rung"] in expect.rungs, f"it was answered by {entry['rung']}")
    for what, wanted in (("pod", expect.pod), ("node", expect.node)):
        if wanted is not None:
            named = entry.get(what, "")
            found.expect(named == wanted, f"the {what} named is {named or 'none'}, it was {wanted or 'none'}")
    if expect.suspect is not None:
        failures = patient.status().get("failures") or []
        # Times of failures are of the operator's clock, whole or not: look at what is newer than the fault.
        suspects = {record.get("node", "") for record in failures if record["at"] >= before.started - 1} - {""}
        found.expect(
            suspects == {expect.suspect} - {""},
            f"suspected nodes are {', '.join(sorted(suspects)) or 'none'}, it should be {expect.suspect or 'none'}",
        )
    return len(found.wrong) == start


def _judge_pods(patient: Patient, before: Before, entries: list[Json], expect: Expect, found: Findings) -> None:
    if expect.replaced is None:
        return
    joined = sum(entry.get("podsReplaced", 0) for entry in entries)
    found.expect(joined == expect.replaced, f"{joined} pods joined for it, expected {expect.replaced}")
    if expect.replaced == 0:
        uids = {pod["metadata"]["uid"] for pod in patient.pods()}
        found.expect(uids == before.uids, "pods were replaced, all should have been kept")
