"""Automatic growth: its cooldown, the steps that repay it, and the cost of compilation."""

from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_contract.status.ledger import SizeAccount
from trainium_contract.status.public import CompiledStatus, ProgressStatus
from trainium_operator.plan.membership import growth
from trainium_operator.plan.view.context import PlanContext

RESCALE_AFTER_SECONDS = 30


def job_facts(count: int = 2, **changes: Any) -> PlanContext:
    recovery = {"rescaleAfterSeconds": RESCALE_AFTER_SECONDS}
    workers = {"replicas": 8, "minReplicas": 2}
    return build.context(build.running_job(count, job_spec=build.spec(workers=workers, recovery=recovery, **changes)))


def with_history(*entries: Interruption, **fields: Any) -> TrainingJobStatus:
    return TrainingJobStatus(history=entries, **fields)


def with_shrinks(*ago: float) -> TrainingJobStatus:
    return with_history(*(build.interruption(RecoveryResponse.SHRINK, ago=seconds) for seconds in ago))


CAPACITY, BY_A_PERSON = {"cause": Cause.CAPACITY}, {"cause": Cause.RESIZE}


@pytest.mark.parametrize(
    ("status", "until"),
    [
        (with_history(), RESCALE_AFTER_SECONDS),
        (with_history(build.interruption(RecoveryResponse.REPLACE, ago=60)), NOW - 60 + RESCALE_AFTER_SECONDS),
        (
            with_history(build.interruption(RecoveryResponse.REPLACE, ago=60, took=None)),
            NOW - 60 + RESCALE_AFTER_SECONDS,
        ),  # not over: from the failure
        (
            with_history(build.interruption(RecoveryResponse.REPLACE, ago=5, took=40, failed_at=None)),
            40 + RESCALE_AFTER_SECONDS,
        ),
        (
            with_history(
                build.interruption(RecoveryResponse.REPLACE, ago=9), build.interruption(RecoveryResponse.SPARE, ago=50)
            ),
            NOW - 9 + RESCALE_AFTER_SECONDS,
        ),
        (
            with_history(
                build.interruption(RecoveryResponse.GROW, ago=5), build.interruption(RecoveryResponse.STOP, ago=5)
            ),
            RESCALE_AFTER_SECONDS,
        ),
        (with_history(build.interruption(RecoveryResponse.RESIZE, ago=5, **BY_A_PERSON)), RESCALE_AFTER_SECONDS),
        (with_history(build.interruption(RecoveryResponse.RESIZE, ago=5, **CAPACITY)), NOW - 5 + RESCALE_AFTER_SECONDS),
        (with_history(*[build.interruption(RecoveryResponse.REPLACE, ago=5)] * 4), NOW - 5 + RESCALE_AFTER_SECONDS),
        (with_shrinks(70), NOW - 70 + RESCALE_AFTER_SECONDS),
        (with_shrinks(90, 70), NOW - 70 + 2 * RESCALE_AFTER_SECONDS),
        (with_shrinks(90, 80, 70), NOW - 70 + 4 * RESCALE_AFTER_SECONDS),
        (with_shrinks(90, 80, 75, 70), NOW - 70 + 8 * RESCALE_AFTER_SECONDS),
        (with_shrinks(90, 85, 80, 75, 70), NOW - 70 + 8 * RESCALE_AFTER_SECONDS),
        (with_shrinks(3601, 3600, 3599, 70), NOW - 70 + 2 * RESCALE_AFTER_SECONDS),
        (
            with_history(*[build.interruption(RecoveryResponse.RESIZE, ago=70, **CAPACITY)] * 2),
            NOW - 70 + 2 * RESCALE_AFTER_SECONDS,
        ),
    ],
)
def test_the_cooldown_of_growth_doubles_with_each_recent_shrink(status: TrainingJobStatus, until: float) -> None:
    assert growth.find_growth_resume_time(job_facts(), status) == until


def with_step_time(*, total: int = 100, step: int = 60, seconds: float | None = 2.0, price: float | None = 30.0) -> Any:
    """Return a status with this step time on two nodes and this resize cost."""
    sizes = (SizeAccount(size=4, step_seconds=0.5), SizeAccount(size=2, step_seconds=seconds))
    return with_history(
        *([] if price is None else [build.interruption(RecoveryResponse.REPLACE, ago=500, took=price)]),
        goodput=GoodputStatus(sizes=sizes),
        progress=ProgressStatus(step=step, total_steps=total),
    )


@pytest.mark.parametrize(
    ("status", "beside", "pays"),
    [
        (with_step_time(), 9.0, True),  # 40 steps of two seconds at twice the speed save 40 s
        (with_step_time(), 10.0, False),
        (with_step_time(), 11.0, False),
        (with_step_time(step=50), 10.0, True),
        (with_step_time(step=100), 0.0, False),
        (with_step_time(step=101, price=0.0), 0.0, False),
        (with_step_time(step=99, price=0.0), 0.0, True),
        (with_step_time(step=101), -30.5, True),  # beyond the last step nothing is saved, and nothing is lost either
        (with_step_time(seconds=None), 10.0, True),
        (with_step_time(price=None), 10.0, True),
        (with_step_time(total=0), 10.0, True),
    ],
)
def test_growth_pays_if_the_remaining_steps_save_more_than_it_costs(
    status: TrainingJobStatus, beside: float, pays: bool
) -> None:
    assert growth.is_worth_growing(job_facts(), status, 2, 4, extra_seconds=beside) is pays


def test_growth_from_an_illegal_size_always_pays() -> None:
    pairs = job_facts(3, parallelism={"tensor": 2})
    status = with_step_time(price=1e6).replaced(goodput=GoodputStatus(sizes=(SizeAccount(size=3, step_seconds=1.0),)))
    assert growth.is_worth_growing(pairs, status, 3, 4, extra_seconds=0.0)


def with_graphs(*sizes: int, seconds: float | None = 600.0, price: float | None = None) -> TrainingJobStatus:
    """Return a status with these compiled sizes."""
    entries = [] if price is None else [build.interruption(RecoveryResponse.REPLACE, ago=500, took=price)]
    return with_history(*entries, compiled=CompiledStatus(sizes=sizes, seconds=seconds))


@pytest.mark.parametrize(
    ("status", "size", "seconds"),
    [
        (with_graphs(), 4, 0.0),  # compiled sizes are unknown
        (with_graphs(4, 8), 4, 0.0),
        (with_graphs(8), 4, 600.0),
        (with_graphs(8, seconds=None), 4, 1200.0),
    ],
)
def test_an_uncompiled_size_costs_the_slowest_compilation(status: TrainingJobStatus, size: int, seconds: float) -> None:
    assert growth.estimate_compile_seconds(job_facts(), status, size) == seconds


def test_a_size_compiled_at_the_start_costs_nothing() -> None:
    first = job_facts(precompile={"enabled": True})
    assert growth.estimate_compile_seconds(first, with_graphs(), 8) == 0.0
    assert growth.estimate_compile_seconds(first, with_graphs(seconds=None), 4) == 1200.0


@pytest.mark.parametrize(
    ("status", "nodes", "size"),
    [
        (with_graphs(), 7, 6),  # no graphs are known of: the best size
        (with_graphs(6, 4), 7, 6),
        (with_graphs(4, 2), 7, 4),
        (with_graphs(2, 4), 7, 4),
        (with_graphs(8), 7, 6),  # of what is there nothing fits
        (with_graphs(1), 7, 6),  # below the smallest size that the job may have
        (with_graphs(5, 4), 7, 5),
        (with_graphs(4, 2, price=599.0), 7, 4),
        (with_graphs(4, 2, price=600.0), 7, 6),  # compiling costs no more than coming back later
        (with_graphs(4), 1, 0),
        (with_graphs(2), 2, 2),
    ],
)
def test_the_available_size_is_the_fastest_compiled_one_unless_compiling_is_cheap(
    status: TrainingJobStatus, nodes: int, size: int
) -> None:
    assert growth.find_available_size(job_facts(), status, nodes) == size


def test_the_smallest_of_equally_fast_sizes_is_available() -> None:
    eight_samples = job_facts(trainer={"batch": {"globalSize": 8}})  # with 4 nodes and with 7 two passes
    assert growth.find_available_size(eight_samples, with_graphs(7, 4, 5), 8) == 4


def test_an_illegal_size_is_not_available() -> None:
    pairs = job_facts(parallelism={"tensor": 2})
    assert growth.find_available_size(pairs, with_graphs(5, 2), 6) == 2


@pytest.mark.parametrize(
    ("members", "status", "size", "after"),
    [
        (2, with_graphs(2, 4), 4, 0.0),
        (2, with_graphs(2), 4, 1200.0),  # at half the speed 600 s are lost in 1200
        (4, with_graphs(4), 8, 1200.0),
        (2, with_graphs(2), 8, 800.0),
        (4, with_graphs(4), 2, 0.0),  # no growth
        (4, with_graphs(2), 4, 0.0),  # nor this: it is no faster
    ],
)
def test_growth_to_an_uncompiled_size_pays_once_waiting_cost_as_much(
    members: int, status: TrainingJobStatus, size: int, after: float
) -> None:
    assert growth.compute_worthwhile_time(job_facts(members), status, size, 1000.0) == 1000.0 + after


def test_growth_from_an_illegal_size_pays_at_once() -> None:
    pairs = job_facts(3, parallelism={"tensor": 2})
    assert growth.compute_worthwhile_time(pairs, with_graphs(2), 4, 1000.0) == 1000.0
