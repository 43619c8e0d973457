"""When a stalled rank counts as hung, and which rank is blamed."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.agent.fake_generation_store import FakeGenerationStore
from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.hang import response
from trainium_agent.hang.detection import (
    BaselineTimes,
    Calibration,
    Finding,
    FindingKind,
    RankSample,
    Stall,
    StallTracker,
    after_hang,
    compute_percentile,
    decode_stalls,
    describe_stall,
    encode_stalls,
    find_culprits,
    stall_limit,
)
from trainium_agent.hang.response import Inquiry
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.recovery import HangSpec
from trainium_contract.status.results import RunStage
from trainium_contract.wire.log_line import LogFormat
from trainium_contract.wire.messages import TrainerPhase
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_worker import GENERATE
from trainium_worker.progress_record import read_with_pulse

SPEC = HangSpec()
STEP, SAVE, COMPILE, INIT, LOAD = (
    TrainerPhase.STEP,
    TrainerPhase.SAVE,
    TrainerPhase.COMPILE,
    TrainerPhase.INIT,
    TrainerPhase.LOAD,
)


def build_stall(rank: int, seconds: float = 16.0, *, waiting: bool | None = True, **changes: object) -> Stall:
    """Return a rank that has waited for its peers in step 120 for longer than its limit."""
    base = Stall(rank=rank, phase=STEP, step=119, seconds=seconds, limit=15.0, reported_waiting=waiting)
    return replace(base, **changes)


UNREPORTED = build_stall(1, waiting=None, phase=TrainerPhase.INIT, step=-1, limit=1e9, unreported=True)


@pytest.mark.parametrize(
    ("phase", "baseline", "limit"),
    [
        (STEP, BaselineTimes(steps=(1.0,) * 100), 15),
        (STEP, BaselineTimes(steps=(4.0,) * 100), 20),
        (STEP, BaselineTimes(steps=(1.0,) * 99 + (60.0,)), 15),  # one slow step in a hundred
        (STEP, BaselineTimes(steps=(1.0,) * 97 + (60.0,) * 3), 300),
        (STEP, BaselineTimes(first_step=40.0), 200),  # nothing else is known yet
        (STEP, BaselineTimes(steps=(2.0, 2.0, 2.0), first_step=600.0), 15),
        (COMPILE, BaselineTimes(), 7200),
        (COMPILE, BaselineTimes(first_step=100.0), 500),
        (COMPILE, BaselineTimes(first_step=2.0), 60),
        (INIT, BaselineTimes(), 600),
        (INIT, BaselineTimes(init=3.0), 120),
        (INIT, BaselineTimes(init=1000.0), 600),
        (LOAD, BaselineTimes(init=3.0, first_step=1.0, steps=(1.0,)), 1200),
        (SAVE, BaselineTimes(steps=(1.0,) * 100), 1200),
    ],
)
def test_each_phase_has_its_own_limit_and_steps_calibrate_theirs(
    phase: TrainerPhase, baseline: BaselineTimes, limit: int
) -> None:
    assert stall_limit(phase, SPEC, baseline) == pytest.approx(limit)


@pytest.mark.parametrize("phase", [INIT, LOAD, COMPILE, SAVE, STEP])
@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_process_has_the_limit_of_a_step_in_each_phase(phase: TrainerPhase, state: str) -> None:
    baseline = BaselineTimes(steps=(6.0,) * 20, first_step=100.0, init=50.0)
    assert stall_limit(phase, SPEC, baseline, state=state) == pytest.approx(30)
    assert stall_limit(phase, SPEC, baseline, state="D") == stall_limit(phase, SPEC, baseline)


@given(
    st.sampled_from(list(TrainerPhase)),
    st.lists(st.floats(0, 1e4), max_size=128),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)
def test_a_limit_is_between_the_floor_and_the_limit_of_its_phase(
    phase: TrainerPhase, steps: list[float], first: float, init: float
) -> None:
    limit = stall_limit(phase, SPEC, BaselineTimes(tuple(steps), first, init))
    assert limit >= SPEC.step_floor_seconds
    highest = {INIT: SPEC.init_seconds, COMPILE: SPEC.compile_seconds, LOAD: SPEC.load_seconds, SAVE: SPEC.save_seconds}
    assert limit <= highest.get(phase, max(SPEC.step_floor_seconds, SPEC.step_factor * max([*steps, first])))


@given(st.lists(st.floats(0.1, 1e3), min_size=3, max_size=128))
def test_a_step_of_usual_length_is_never_hung(steps: list[float]) -> None:
    assert stall_limit(STEP, SPEC, BaselineTimes(tuple(steps))) >= compute_percentile(steps, 0.99)


def test_calibration_is_separate_for_each_world_size() -> None:
    calibration = Calibration()
    calibration.record_first_step(64, 30.0)
    assert calibration.compute_baseline(64, ()).first_step == 30.0
    assert calibration.compute_baseline(32, ()).first_step == 0.0


def sample(watch: StallTracker, now: float, beats: int = 7, state: str = "", cpu_seconds: float = 0.0) -> Stall:
    stall = Stall(rank=0, phase=STEP, step=4, seconds=0.0, limit=15.0, reported_waiting=False, state=state)
    (seen,) = watch.sample(now, [RankSample(stall, (1, beats), cpu_seconds)])
    return seen


def test_a_stall_lasts_until_the_next_heartbeat() -> None:
    watch = StallTracker()
    assert [sample(watch, now).seconds for now in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    assert sample(watch, 1.5, beats=8).seconds == 0.0
    assert sample(watch, 2.0, beats=8).seconds == 0.5


def test_time_between_distant_samples_is_capped() -> None:
    watch = StallTracker()
    sample(watch, 0.0)
    assert sample(watch, 3600.0).seconds == 2.0


def test_the_stall_of_a_stopped_process_begins_with_the_stop() -> None:
    watch = StallTracker()
    states = ("", "S", "T", "T", "S", "t")
    stalls = [sample(watch, float(now), state=state).seconds for now, state in enumerate(states)]
    assert stalls == [0.0, 1.0, 0.0, 1.0, 4.0, 0.0]


def test_a_stall_has_the_share_of_processor_time() -> None:
    watch = StallTracker()
    sample(watch, 0.0)
    sample(watch, 1.0, state="R", cpu_seconds=50.0)
    assert sample(watch, 2.0, state="R", cpu_seconds=50.9).busy == pytest.approx(0.9)


WAITING = {0: (build_stall(0), build_stall(1)), 1: (build_stall(2), build_stall(3))}


@pytest.mark.parametrize(
    ("reports", "finding"),
    [
        (WAITING, Finding(FindingKind.COLLECTIVE)),
        ({**WAITING, 1: (build_stall(2), build_stall(3, waiting=False))}, Finding(FindingKind.STUCK, (3,))),
        ({**WAITING, 1: (build_stall(2), build_stall(3, state="T"))}, Finding(FindingKind.STUCK, (3,))),
        (
            {**WAITING, 1: (build_stall(2, waiting=False), build_stall(3, waiting=False))},
            Finding(FindingKind.STUCK, (2, 3)),
        ),
        ({0: (build_stall(0, waiting=False),), 1: (build_stall(1, waiting=False),)}, Finding(FindingKind.COLLECTIVE)),
        ({0: (build_stall(0, waiting=False, limit=15.0),)}, Finding(FindingKind.STUCK, (0,))),
        ({0: WAITING[0]}, Finding(FindingKind.SILENT, silent=(1,))),
        (
            {0: (build_stall(0, 3.0), build_stall(1, 3.0)), 1: (build_stall(2, 2.0), build_stall(3, 0.0))},
            Finding(FindingKind.PROGRESSING),
        ),
        # All collectives are inside the work: the processor, then the kernel's state, then nothing distinguishes them.
        ({0: (build_stall(0, waiting=None),), 1: (build_stall(1, waiting=None),)}, Finding(FindingKind.COLLECTIVE)),
        # Ranks of a program that report nothing neither excuse a reporting one nor show the cause.
        ({0: (build_stall(0, waiting=False),), 1: (UNREPORTED,)}, Finding(FindingKind.COLLECTIVE)),
        ({0: (build_stall(0),), 1: (replace(UNREPORTED, state="T"),)}, Finding(FindingKind.STUCK, (1,))),
        (
            {0: (build_stall(0, 3.0),), 1: (replace(UNREPORTED, limit=10.0),)},
            Finding(FindingKind.PROGRESSING, retry_seconds=5.0),
        ),
        (
            {0: (replace(UNREPORTED, limit=10.0),), 1: (UNREPORTED,)},
            Finding(FindingKind.PROGRESSING, retry_seconds=5.0),
        ),
        (
            {0: (build_stall(0, waiting=None),), 1: (build_stall(1, waiting=None, busy=0.9),)},
            Finding(FindingKind.STUCK, (1,)),
        ),
        (
            {0: (build_stall(0, waiting=None),), 1: (build_stall(1, waiting=None, state="D"),)},
            Finding(FindingKind.STUCK, (1,)),
        ),
        ({0: (build_stall(0, waiting=True),), 1: (build_stall(1, waiting=None),)}, Finding(FindingKind.STUCK, (1,))),
    ],
)
def test_a_finding_blames_ranks_that_do_not_wait(reports: dict[int, tuple[Stall, ...]], finding: Finding) -> None:
    assert find_culprits(reports, 2 if len(reports) > 1 or reports == {0: WAITING[0]} else 1) == finding


@pytest.mark.parametrize(
    "excused",
    [
        build_stall(2, 600.0, waiting=False, phase=SAVE, limit=1200.0),
        build_stall(2, 900.0, waiting=False, phase=LOAD, limit=1200.0),
        build_stall(2, 3000.0, waiting=False, phase=COMPILE, limit=7200.0),
        build_stall(2, 0.2, waiting=False),
        build_stall(2, 14.0, waiting=None),
        build_stall(2, 14.0),
    ],
)
def test_a_rank_within_its_limit_excuses_its_waiting_peers(excused: Stall) -> None:
    finding = find_culprits({0: (build_stall(0), build_stall(1)), 1: (excused,)}, 2)
    assert finding.kind is FindingKind.PROGRESSING
    assert 0 < finding.retry_seconds <= 5


def test_the_first_of_several_stalled_ranks_is_not_blamed() -> None:
    first, second = build_stall(0, 15.1, waiting=False), build_stall(1, 14.8, waiting=False)
    assert find_culprits({0: (first,), 1: (second,)}, 2).kind is FindingKind.PROGRESSING
    late = replace(second, seconds=15.2)
    assert find_culprits({0: (first,), 1: (late,)}, 2).kind is FindingKind.COLLECTIVE


stalls = st.builds(
    Stall,
    rank=st.integers(0, 9),
    phase=st.sampled_from(list(TrainerPhase)),
    step=st.integers(-1, 100),
    seconds=st.floats(0, 100),
    limit=st.sampled_from([10.0, 50.0]),
    reported_waiting=st.sampled_from([True, False, None]),
    state=st.sampled_from(["", "S", "R", "T", "D"]),
    busy=st.floats(0, 1),
    stage=st.sampled_from([RunStage.TRAIN, RunStage.EXPORT]),
)


@given(st.lists(st.lists(stalls, max_size=4), min_size=1, max_size=4), st.integers(0, 2))
def test_only_overdue_ranks_that_do_not_wait_are_blamed(nodes: list[list[Stall]], missing: int) -> None:
    nodes = [
        [replace(stall, rank=4 * node + number) for number, stall in enumerate(node_stalls)]
        for node, node_stalls in enumerate(nodes)
    ]
    finding = find_culprits({node: tuple(node_stalls) for node, node_stalls in enumerate(nodes)}, len(nodes) + missing)
    ranks = {stall.rank: stall for node_stalls in nodes for stall in node_stalls}
    for culprit in finding.culprits:
        assert ranks[culprit].overdue
        assert ranks[culprit].is_waiting is not True
    overdue = [stall for stall in ranks.values() if stall.overdue]
    if not overdue:
        assert finding.kind is FindingKind.PROGRESSING
    assert (finding.kind is FindingKind.STUCK) == bool(finding.culprits)
    if finding.kind in (FindingKind.COLLECTIVE, FindingKind.SILENT):
        assert len(overdue) == len(ranks)


@given(st.lists(stalls, max_size=5))
def test_stalls_are_decoded_as_encoded(samples: list[Stall]) -> None:
    assert decode_stalls(encode_stalls(samples)) == tuple(samples)


def test_a_long_stage_that_reports_progress_is_no_hang(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "r0")
    watch, limit = StallTracker(), stall_limit(SAVE, SPEC, BaselineTimes())

    def sample(now: int) -> Stall:
        reading = read_with_pulse(tmp_path / "r0")
        assert reading is not None
        assert reading.pulse is not None
        stall = Stall(0, SAVE, 100, 0.0, limit, reported_waiting=None, stage=RunStage.parse(reading.record.stage))
        return watch.sample(float(now), [RankSample(stall, (1, reading.pulse.beats))])[0]

    for now in range(10 * int(limit)):
        if now % (int(limit) // 2) == 0:
            writer.enter_stage(RunStage.EXPORT, now / (10 * limit))
        assert not sample(now).overdue
    later = [sample(now) for now in range(10 * int(limit), 12 * int(limit))]
    assert later[-1].overdue
    assert later[-1].stage is RunStage.EXPORT
    writer.close()


def test_a_finding_is_decoded_as_encoded() -> None:
    finding = Finding(FindingKind.STUCK, (3, 4), (1,), 0.5)
    assert Finding.decode(finding.encode()) == finding


def test_a_hang_counts_once_and_is_unexplained_without_a_blamed_rank() -> None:
    state = GenerationState(best_progress=100)
    stuck = after_hang(Finding(FindingKind.STUCK, (3,)), 0, 120, state, 3)
    assert (stuck.attempt, stuck.cause, stuck.restarts_without_progress) == (1, Cause.HANG, 1)
    assert stuck.unexplained_failures == 0
    assert after_hang(Finding(FindingKind.STUCK, (3,)), 0, 120, stuck, 3) == stuck
    collective = after_hang(Finding(FindingKind.COLLECTIVE), 1, 120, stuck, 3)
    assert (collective.attempt, collective.unexplained_failures) == (2, 1)
    assert after_hang(Finding(FindingKind.COLLECTIVE), 1, 120, collective, 3).unexplained_failures == 1
    exhausted = after_hang(
        Finding(FindingKind.STUCK, (3,)), 2, 120, replace(collective, restarts_without_progress=3), 3
    )
    assert exhausted.stopped == 77


@pytest.mark.parametrize(
    ("stall", "circumstances"),
    [
        (build_stall(3, waiting=False, state="T"), "in step 120 (not waiting for peers, stopped by a signal)"),
        (build_stall(3), "in step 120 (waiting for its peers)"),
        (
            build_stall(3, waiting=False, phase=COMPILE, step=0, busy=0.9),
            "in step 1, its first (not waiting for peers, using 90% of a processor)",
        ),
        (
            build_stall(3, waiting=False, phase=SAVE, stage=RunStage.EXPORT),
            "while writing artifacts after step 119 (not waiting for peers)",
        ),
        (
            build_stall(3, waiting=None, phase=SAVE, stage=GENERATE),
            "while waiting for answers after step 119 (in work that has collectives inside)",
        ),
        (build_stall(3, phase=SAVE, stage="Shuffle"), "while saving after step 119 (waiting for its peers)"),
        (build_stall(3, phase=SAVE), "while saving after step 119 (waiting for its peers)"),
        (
            build_stall(3, phase=LOAD, waiting=None),
            "while loading its state (in work that has collectives inside)",
        ),
        (build_stall(3, phase=INIT), "while starting (waiting for its peers)"),
    ],
)
def test_a_stall_is_described_in_one_sentence(stall: Stall, circumstances: str) -> None:
    assert describe_stall(stall, "w-1") == f"rank 3 of pod w-1 made no progress for 16 s {circumstances}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def create_inquiries(shared: FakeGenerationStore, count: int = 2) -> list[Inquiry]:
    """Return the inquiries of agents whose ranks wait for peers, except the first."""
    return [
        Inquiry(shared, node_rank, count, lambda node_rank=node_rank: (build_stall(node_rank, waiting=node_rank > 0),))  # type: ignore[arg-type]
        for node_rank in range(count)
    ]


@pytest.mark.usefixtures("clock")
def test_the_agent_that_asked_concludes_once_all_have_answered() -> None:
    shared = FakeGenerationStore()
    first, second = create_inquiries(shared)
    second.open(0)
    assert second.is_open
    assert not first.is_open
    assert second.conclude(0) is None, "one answer is missing"
    first.answer(shared.read_state())
    first.answer(shared.read_state())  # one answer per inquiry
    finding = second.conclude(0)
    assert finding is not None
    assert [*finding.culprits] == [0]
    assert not second.is_open
    assert first.read_finding(0) == finding


@pytest.mark.usefixtures("clock")
def test_a_missing_finding_blames_no_rank() -> None:
    assert create_inquiries(FakeGenerationStore())[0].read_finding(0) == Finding(FindingKind.COLLECTIVE)


@pytest.mark.usefixtures("clock")
def test_no_inquiry_is_opened_after_the_attempt_or_generation_ended() -> None:
    for shared in (FakeGenerationStore(attempt=1), FakeGenerationStore(stopped=64)):
        first = create_inquiries(shared)[0]
        first.open(0)
        assert not first.is_open
        assert shared.values == {}
        assert first.conclude(0) is None


@pytest.mark.usefixtures("clock")
def test_an_inquiry_of_an_earlier_attempt_is_not_answered() -> None:
    shared = FakeGenerationStore()
    first, second = create_inquiries(shared)
    first.open(0)
    second.answer(
        shared.update_state(lambda state: GenerationState(attempt=1, inquiry=state.inquiry, inquiry_attempt=0))
    )
    assert "0/hang/1" not in shared.values


def test_an_agent_takes_over_only_an_overdue_inquiry(clock: list[float]) -> None:
    shared = FakeGenerationStore()
    first, second = create_inquiries(shared)
    first.open(0)
    second.answer(shared.read_state())
    second.open(0)
    assert not second.is_open
    clock[0] += 1000.0
    second.open(0)
    assert second.is_open, "the asking agent is assumed to have failed"
    first.answer(shared.read_state())
    assert not first.is_open, "another agent took over"


def test_an_open_inquiry_is_not_repeated_and_is_forgotten_with_its_attempt(clock: list[float]) -> None:
    shared = FakeGenerationStore()
    first = create_inquiries(shared)[0]
    first.open(0)
    first.open(0)
    assert shared.read_state().inquiry == 1
    first.reset()
    assert not first.is_open


def test_an_inquiry_times_out_and_answers_to_it_do_not_count_for_the_next(clock: list[float]) -> None:
    shared = FakeGenerationStore()
    first, second, third = create_inquiries(shared, 3)
    third.open(0)
    second.answer(shared.read_state())
    clock[0] += 1000.0
    finding = third.conclude(0)
    assert finding is not None
    clock[0] += 1000.0
    second.open(0)  # the third's answer belongs to the first inquiry
    first.answer(shared.read_state())
    clock[0] += 1000.0
    assert set(second._read_answers(shared, 0)) == {0, 1}  # type: ignore[arg-type]


SILENT_RANK = Stall(rank=1, phase=TrainerPhase.STEP, step=9, seconds=60.0, limit=15.0, reported_waiting=None)


@pytest.mark.parametrize(
    ("finding", "summary"),
    [
        (Finding(FindingKind.STUCK, culprits=(1,)), "rank 1 is to blame"),
        (Finding(FindingKind.STUCK, culprits=(1, 3)), "ranks 1, 3 are to blame"),
        (Finding(FindingKind.SILENT, silent=(0, 2)), "the agents of node ranks 0, 2 do not answer"),
        (Finding(FindingKind.COLLECTIVE), "all ranks are in the same state, none is to blame"),
    ],
)
def test_the_log_has_the_finding_and_the_stack_of_each_rank(
    finding: Finding, summary: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    hang_response = object.__new__(response.HangResponse)
    hang_response._settings = SimpleNamespace(pod_name="w-1", log_format=LogFormat.TEXT)
    stack = SimpleNamespace(innermost="train.py:7", text="frame one\nframe two")
    hang_response._stacks = {}
    hang_response._write_log(finding, (SILENT_RANK, SILENT_RANK))
    hang_response._stacks = {1: stack}
    hang_response._write_log(finding, (SILENT_RANK,))
    assert summary in caplog.text
    assert "not asked" in caplog.text
    assert "train.py:7" in caplog.text
    assert capsys.readouterr().out == "[rank 1] frame one\n[rank 1] frame two\n"
    caplog.clear()
    hang_response._settings = SimpleNamespace(pod_name="w-1", log_format=LogFormat.JSON)
    hang_response._write_log(finding, (SILENT_RANK,))
    assert (caplog.records[-1].getMessage(), vars(caplog.records[-1])["rank"]) == ("frame one\nframe two", 1)
    assert capsys.readouterr().out == "", "the log has it as a structured line"


def test_a_stack_decides_whether_a_rank_waits_where_that_is_unknown() -> None:
    assert response._apply_stack(SILENT_RANK, None) is SILENT_RANK
    assert response._apply_stack(SILENT_RANK, SimpleNamespace(in_collective=None)) is SILENT_RANK
    assert response._apply_stack(SILENT_RANK, SimpleNamespace(in_collective=True)).reported_waiting is True
    active_rank = Stall(rank=1, phase=TrainerPhase.STEP, step=9, seconds=60.0, limit=15.0, reported_waiting=False)
    assert response._apply_stack(active_rank, SimpleNamespace(in_collective=True)) is active_rank
