"""Where plans are made: agents are answered while that of a large job is."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from plan_builders import job, observed, pod

from trainium_operator.cluster.reconciler import IN_A_THREAD_FROM, make_plan
from trainium_operator.plan.model import Plan

if TYPE_CHECKING:
    from trainium_operator.plan.model import Observed


def with_pods(count: int) -> Observed:
    return observed(job(), tuple(pod(ordinal) for ordinal in range(count)))


async def test_the_loop_goes_on_while_a_large_job_is_planned() -> None:
    answered = threading.Event()

    def plan(observed: Observed) -> Plan:
        assert answered.wait(30), "the loop stood still"
        return Plan(status=observed.job.status)

    asyncio.get_running_loop().call_soon(answered.set)
    large = with_pods(IN_A_THREAD_FROM)
    assert (await make_plan(plan, large)).status == large.job.status


async def test_a_small_job_is_planned_at_once() -> None:
    began: list[int] = []

    def plan(observed: Observed) -> Plan:
        began.append(threading.get_ident())
        return Plan(status=observed.job.status)

    await make_plan(plan, with_pods(IN_A_THREAD_FROM - 1))
    assert began == [threading.get_ident()]
