"""When a standstill is a hang, and who is to blame for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_store import Shared

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.hang import response
from trainium_agent.hang.detection import (
    Calibration,
    Finding,
    FindingKind,
    RankSample,
    Stall,
    StallWatch,
    Usual,
    after_hang,
    decode,
    describe,
    encode,
    find,
    limit_of,
    percentile,
)
from trainium_agent.hang.response import Inquiry
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.recovery import HangSpec
from trainium_contract.status.results import RunStage
from trainium_contract.wire.messages import TrainerPhase
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_worker import read_with_pulse

if TYPE_CHECKING:
    from pathlib import Path


SPEC = HangSpec()
STEP, SAVE, COMPILE, INIT, LOAD = (
    TrainerPhase.STEP,
    TrainerPhase.SAVE,
    TrainerPhase.COMPILE,
    TrainerPhase.INIT,
    TrainerPhase.LOAD,
)


def still(rank: int, seconds: float = 16.0, *, waiting: bool | None = True, **changes: object) -> Stall:
    """A rank that has waited for its peers in step 120 for longer than its limit."""
    base = Stall(rank=rank, phase=STEP, step=119, seconds=seconds, limit=15.0, waiting=waiting)
    return replace(base, **changes)


UNREPORTED = still(1, waiting=None, phase=TrainerPhase.INIT, step=-1, limit=1e9, unreported=True)


@pytest.mark.parametrize(
    ("phase", "usual", "limit"),
    [
        (STEP, Usual(steps=(1.0,) * 100), 15),
        (STEP, Usual(steps=(4.0,) * 100), 20),
        (STEP, Usual(steps=(1.0,) * 99 + (60.0,)), 15),  # one slow step in a hundred
        (STEP, Usual(steps=(1.0,) * 97 + (60.0,) * 3), 300),
        (STEP, Usual(first_step=40.0), 200),  # nothing else is known yet
        (STEP, Usual(steps=(2.0, 2.0, 2.0), first_step=600.0), 15),
        (COMPILE, Usual(), 7200),
        (COMPILE, Usual(first_step=100.0), 500),
        (COMPILE, Usual(first_step=2.0), 60),
        (INIT, Usual(), 600),
        (INIT, Usual(init=3.0), 120),
        (INIT, Usual(init=1000.0), 600),
        (LOAD, Usual(init=3.0, first_step=1.0, steps=(1.0,)), 1200),
        (SAVE, Usual(steps=(1.0,) * 100), 1200),
    ],
)
def test_each_phase_has_its_own_limit_and_steps_calibrate_theirs(phase: TrainerPhase, usual: Usual, limit: int) -> None:
    assert limit_of(phase, SPEC, usual) == pytest.approx(limit)


@pytest.mark.parametrize("phase", [INIT, LOAD, COMPILE, SAVE, STEP])
@pytest.mark.parametrize("state", ["T", "t"])
def test_what_is_stopped_has_no_longer_than_in_a_step_whatever_it_was_at(phase: TrainerPhase, state: str) -> None:
    usual = Usual(steps=(6.0,) * 20, first_step=100.0, init=50.0)
    assert limit_of(phase, SPEC, usual, state=state) == pytest.approx(30)
    assert limit_of(phase, SPEC, usual, state="D") == limit_of(phase, SPEC, usual)


@given(
    st.sampled_from(list(TrainerPhase)),
    st.lists(st.floats(0, 1e4), max_size=128),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)
def test_no_limit_is_below_the_floor_or_above_that_of_its_phase(
    phase: TrainerPhase, steps: list[float], first: float, init: float
) -> None:
    limit = limit_of(phase, SPEC, Usual(tuple(steps), first, init))
    assert limit >= SPEC.step_floor_seconds
    highest = {INIT: SPEC.init_seconds, COMPILE: SPEC.compile_seconds, LOAD: SPEC.load_seconds, SAVE: SPEC.save_seconds}
    assert limit <= highest.get(phase, max(SPEC.step_floor_seconds, SPEC.step_factor * max([*steps, first])))


@given(st.lists(st.floats(0.1, 1e3), min_size=3, max_size=128))
def test_a_step_like_those_before_is_never_hung(steps: list[float]) -> None:
    assert limit_of(STEP, SPEC, Usual(tuple(steps))) >= percentile(steps, 0.99)


def test_experience_of_another_world_size_does_not_count() -> None:
    calibration = Calibration()
    calibration.note_first_step(64, 30.0)
    assert calibration.usual(64, ()).first_step == 30.0
    assert calibration.usual(32, ()).first_step == 0.0


def sample(watch: StallWatch, now: float, beats: int = 7, **changes: object) -> Stall:
    sample = RankSample(rank=0, sign=(1, beats), phase=STEP, step=4, limit=15.0, waiting=False)
    (seen,) = watch.sample(now, [replace(sample, **changes)])
    return seen


def test_a_standstill_grows_while_no_sign_of_life_comes_and_ends_with_one() -> None:
    watch = StallWatch()
    assert [sample(watch, at).seconds for at in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    assert sample(watch, 1.5, beats=8).seconds == 0.0
    assert sample(watch, 2.0, beats=8).seconds == 0.5


def test_time_in_which_the_agent_did_not_sample_hardly_counts() -> None:
    watch = StallWatch()
    sample(watch, 0.0)
    assert sample(watch, 3600.0).seconds == 2.0


def test_processor_time_distinguishes_a_loop_from_a_sleep() -> None:
    watch = StallWatch()
    sample(watch, 0.0)
    sample(watch, 1.0, state="R", cpu_seconds=50.0)
    assert sample(watch, 2.0, state="R", cpu_seconds=50.9).busy == pytest.approx(0.9)


WAITING = {0: (still(0), still(1)), 1: (still(2), still(3))}


@pytest.mark.parametrize(
    ("testimony", "finding"),
    [
        (WAITING, Finding(FindingKind.COLLECTIVE)),
        ({**WAITING, 1: (still(2), still(3, waiting=False))}, Finding(FindingKind.STUCK, (3,))),
        ({**WAITING, 1: (still(2), still(3, state="T"))}, Finding(FindingKind.STUCK, (3,))),
        ({**WAITING, 1: (still(2, waiting=False), still(3, waiting=False))}, Finding(FindingKind.STUCK, (2, 3))),
        ({0: (still(0, waiting=False),), 1: (still(1, waiting=False),)}, Finding(FindingKind.COLLECTIVE)),
        ({0: (still(0, waiting=False, limit=15.0),)}, Finding(FindingKind.STUCK, (0,))),
        ({0: WAITING[0]}, Finding(FindingKind.SILENT, silent=(1,))),
        ({0: (still(0, 3.0), still(1, 3.0)), 1: (still(2, 2.0), still(3, 0.0))}, Finding(FindingKind.MOVING)),
        # All collectives are inside the work: the processor, then the kernel's state, then nothing distinguishes them.
        ({0: (still(0, waiting=None),), 1: (still(1, waiting=None),)}, Finding(FindingKind.COLLECTIVE)),
        # Ranks of a program that report nothing: no excuse for one that does, and no sign of who is to blame.
        ({0: (still(0, waiting=False),), 1: (UNREPORTED,)}, Finding(FindingKind.COLLECTIVE)),
        ({0: (still(0),), 1: (replace(UNREPORTED, state="T"),)}, Finding(FindingKind.STUCK, (1,))),
        ({0: (still(0, 3.0),), 1: (replace(UNREPORTED, limit=10.0),)}, Finding(FindingKind.MOVING, retry_seconds=5.0)),
        ({0: (replace(UNREPORTED, limit=10.0),), 1: (UNREPORTED,)}, Finding(FindingKind.MOVING, retry_seconds=5.0)),
        ({0: (still(0, waiting=None),), 1: (still(1, waiting=None, busy=0.9),)}, Finding(FindingKind.STUCK, (1,))),
        ({0: (still(0, waiting=None),), 1: (still(1, waiting=None, state="D"),)}, Finding(FindingKind.STUCK, (1,))),
        ({0: (still(0, waiting=True),), 1: (still(1, waiting=None),)}, Finding(FindingKind.STUCK, (1,))),
    ],
)
def test_the_odd_one_out_is_named_and_who_waits_is_not(
    testimony: dict[int, tuple[Stall, ...]], finding: Finding
) -> None:
    assert find(testimony, 2 if len(testimony) > 1 or testimony == {0: WAITING[0]} else 1) == finding


@pytest.mark.parametrize(
    "excused",
    [
        still(2, 600.0, waiting=False, phase=SAVE, limit=1200.0),
        still(2, 900.0, waiting=False, phase=LOAD, limit=1200.0),
        still(2, 3000.0, waiting=False, phase=COMPILE, limit=7200.0),
        still(2, 0.2, waiting=False),
        still(2, 14.0, waiting=None),
        still(2, 14.0),
    ],
)
def test_one_who_has_time_left_excuses_all_who_wait_for_it(excused: Stall) -> None:
    finding = find({0: (still(0), still(1)), 1: (excused,)}, 2)
    assert finding.kind is FindingKind.MOVING
    assert 0 < finding.retry_seconds <= 5


def test_ranks_that_meet_the_same_obstacle_a_moment_apart_are_not_blamed_for_being_first() -> None:
    first, second = still(0, 15.1, waiting=False), still(1, 14.8, waiting=False)
    assert find({0: (first,), 1: (second,)}, 2).kind is FindingKind.MOVING
    late = replace(second, seconds=15.2)
    assert find({0: (first,), 1: (late,)}, 2).kind is FindingKind.COLLECTIVE


standstills = st.builds(
    Stall,
    rank=st.integers(0, 9),
    phase=st.sampled_from(list(TrainerPhase)),
    step=st.integers(-1, 100),
    seconds=st.floats(0, 100),
    limit=st.sampled_from([10.0, 50.0]),
    waiting=st.sampled_from([True, False, None]),
    state=st.sampled_from(["", "S", "R", "T", "D"]),
    busy=st.floats(0, 1),
    stage=st.sampled_from([RunStage.TRAIN, RunStage.EXPORT]),
)


@given(st.lists(st.lists(standstills, max_size=4), min_size=1, max_size=4), st.integers(0, 2))
def test_a_victim_is_never_a_culprit_and_nothing_is_done_while_nobody_is_overdue(
    nodes: list[list[Stall]], missing: int
) -> None:
    nodes = [
        [replace(each, rank=4 * node + number) for number, each in enumerate(rows)] for node, rows in enumerate(nodes)
    ]
    finding = find({node: tuple(rows) for node, rows in enumerate(nodes)}, len(nodes) + missing)
    ranks = {each.rank: each for rows in nodes for each in rows}
    for culprit in finding.culprits:
        assert ranks[culprit].overdue
        assert ranks[culprit].waits is not True
    overdue = [each for each in ranks.values() if each.overdue]
    if not overdue:
        assert finding.kind is FindingKind.MOVING
    assert (finding.kind is FindingKind.STUCK) == bool(finding.culprits)
    if finding.kind in (FindingKind.COLLECTIVE, FindingKind.SILENT):
        assert len(overdue) == len(ranks)


@given(st.lists(standstills, max_size=5))
def test_an_agents_word_survives_the_store(word: list[Stall]) -> None:
    assert decode(encode(word)) == tuple(word)


def test_a_long_stage_is_no_hang_as_long_as_it_reports(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "r0")
    watch, limit = StallWatch(), limit_of(SAVE, SPEC, Usual())

    def sample(now: int) -> Stall:
        found = read_with_pulse(tmp_path / "r0")
        assert found is not None
        assert found[1] is not None
        sample = RankSample(0, (1, found[1].beats), SAVE, 100, limit, waiting=None, stage=RunStage.of(found[0].stage))
        return watch.sample(float(now), [sample])[0]

    for now in range(10 * int(limit)):
        if now % (int(limit) // 2) == 0:
            writer.stage(RunStage.EXPORT, now / (10 * limit))
        assert not sample(now).overdue
    silent = [sample(now) for now in range(10 * int(limit), 12 * int(limit))]
    assert silent[-1].overdue
    assert silent[-1].stage is RunStage.EXPORT
    writer.close()


def test_a_finding_survives_the_store() -> None:
    finding = Finding(FindingKind.STUCK, (3, 4), (1,), 0.5)
    assert Finding.decode(finding.encode()) == finding


def test_a_hang_counts_once_like_a_crash_and_only_one_without_a_culprit_stays_unexplained() -> None:
    state = GenerationState(best_step=100)
    stuck = after_hang(Finding(FindingKind.STUCK, (3,)), 0, 120, state, 3)
    assert (stuck.attempt, stuck.cause, stuck.fruitless, stuck.unexplained) == (1, Cause.HANG, 1, 0)
    again = after_hang(Finding(FindingKind.STUCK, (3,)), 0, 120, stuck, 3)
    assert again == stuck
    collective = after_hang(Finding(FindingKind.COLLECTIVE), 1, 120, stuck, 3)
    assert (collective.attempt, collective.unexplained) == (2, 1)
    assert after_hang(Finding(FindingKind.COLLECTIVE), 1, 120, collective, 3).unexplained == 1
    hopeless = after_hang(Finding(FindingKind.STUCK, (3,)), 2, 120, replace(collective, fruitless=3), 3)
    assert hopeless.stopped == 77


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (
            still(3, waiting=False, state="T"),
            "rank 3 of pod w-1 stood still for 16 s in step 120 (not waiting for peers, stopped by a signal)",
        ),
        (still(3), "rank 3 of pod w-1 stood still for 16 s in step 120 (waiting for its peers)"),
        (
            still(3, waiting=False, phase=COMPILE, step=0, busy=0.9),
            (
                "rank 3 of pod w-1 stood still for 16 s in step 1, its first "
                "(not waiting for peers, using 90% of a processor)"
            ),
        ),
        (
            still(3, waiting=False, phase=SAVE, stage=RunStage.EXPORT),
            "rank 3 of pod w-1 stood still for 16 s while writing artifacts after step 119 (not waiting for peers)",
        ),
        (
            still(3, phase=SAVE),
            "rank 3 of pod w-1 stood still for 16 s while saving after step 119 (waiting for its peers)",
        ),
        (
            still(3, phase=LOAD, waiting=None),
            "rank 3 of pod w-1 stood still for 16 s while loading its state (in work that has collectives inside)",
        ),
        (still(3, phase=INIT), "rank 3 of pod w-1 stood still for 16 s while starting (waiting for its peers)"),
    ],
)
def test_a_standstill_is_one_sentence(seen: Stall, sentence: str) -> None:
    assert describe(seen, "w-1") == sentence


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(response.time, "monotonic", lambda: now[0])
    return now


def suspect(rank: int, *, waiting: bool) -> Stall:
    return Stall(rank=rank, phase=TrainerPhase.STEP, step=9, seconds=60.0, limit=15.0, waiting=waiting)


def agents(shared: Shared, count: int = 2) -> list[Inquiry]:
    """The first agent's rank does not wait for its peers, all others do."""
    return [
        Inquiry(shared, at, count, lambda at=at: (suspect(at, waiting=at > 0),))  # type: ignore[arg-type]
        for at in range(count)
    ]


@pytest.mark.usefixtures("clock")
def test_all_answer_and_the_one_who_asked_concludes() -> None:
    shared = Shared()
    first, second = agents(shared)
    second.ask(0)
    assert second.open
    assert not first.open
    assert second.conclude(0) is None, "one answer is missing"
    first.answer(shared.state())
    first.answer(shared.state())  # one answer per inquiry
    finding = second.conclude(0)
    assert finding is not None
    assert [*finding.culprits] == [0]
    assert not second.open
    second.publish(0, finding)
    assert first.published(0) == finding


@pytest.mark.usefixtures("clock")
def test_a_finding_that_nobody_left_names_nobody() -> None:
    assert agents(Shared())[0].published(0) == Finding(FindingKind.COLLECTIVE)


@pytest.mark.usefixtures("clock")
def test_nobody_is_asked_in_an_attempt_that_is_over_or_in_a_generation_that_stopped() -> None:
    for shared in (Shared(attempt=1), Shared(stopped=64)):
        first = agents(shared)[0]
        first.ask(0)
        assert not first.open
        assert shared.values == {}
        assert first.conclude(0) is None


@pytest.mark.usefixtures("clock")
def test_an_inquiry_of_an_earlier_attempt_is_not_answered() -> None:
    shared = Shared()
    first, second = agents(shared)
    first.ask(0)
    second.answer(shared.change(lambda state: GenerationState(attempt=1, inquiry=state.inquiry, asked_in=0)))
    assert "0/standstill/1" not in shared.values


def test_an_agent_that_knows_of_anothers_inquiry_does_not_ask_until_that_one_is_overdue(clock: list[float]) -> None:
    shared = Shared()
    first, second = agents(shared)
    first.ask(0)
    second.answer(shared.state())
    second.ask(0)
    assert not second.open
    clock[0] += 1000.0
    second.ask(0)
    assert second.open, "who asked is gone, it seems"
    first.answer(shared.state())
    assert not first.open, "the other took over"


def test_an_agent_that_asks_does_not_ask_again_meanwhile_but_an_attempt_later(clock: list[float]) -> None:
    shared = Shared()
    first = agents(shared)[0]
    first.ask(0)
    first.ask(0)
    assert shared.state().inquiry == 1
    first.forget()
    assert not first.open


def test_time_is_up_when_one_does_not_answer_and_what_it_reported_before_does_not_count(clock: list[float]) -> None:
    shared = Shared()
    first, second, third = agents(shared, 3)
    third.ask(0)
    second.answer(shared.state())
    clock[0] += 1000.0
    finding = third.conclude(0)
    assert finding is not None
    clock[0] += 1000.0
    second.ask(0)  # the third's answer belongs to the first inquiry
    first.answer(shared.state())
    clock[0] += 1000.0
    assert set(second._read_answers(shared, 0)) == {0, 1}  # type: ignore[arg-type]
