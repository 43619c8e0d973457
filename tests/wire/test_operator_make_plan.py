"""Where plans are made: agents are answered while that of a large job is."""

from __future__ import annotations

import asyncio
import threading

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_operator.cluster.reconciler import IN_A_THREAD_FROM, make_plan
from trainium_operator.plan.model import JobView, Observed, Plan, PodPhase, PodView


def observed(pods: int) -> Observed:
    """A job with so many pods."""
    workers = {"replicas": pods, "accelerator": {"device": "cpu"}}
    trainer = {"batch": {"globalSize": pods}, "steps": 1}
    job = JobView(
        namespace="default",
        name="llama",
        uid="job",
        generation=1,
        deleting=False,
        spec=TrainingJobSpec.model_validate({"workers": workers, "trainer": trainer}),
        status=TrainingJobStatus(),
        created=0.0,
    )
    return Observed(
        job=job,
        pods=tuple(PodView(name=f"w-{n}", uid=f"{n}", ordinal=n, phase=PodPhase.RUNNING) for n in range(pods)),
        nodes={},
        agents={},
        membership=None,
        published=0,
        children={},
        ca_bundle="",
        coordinator_since=0.0,
        now=1.0,
    )


async def test_the_loop_goes_on_while_a_large_job_is_planned() -> None:
    answered = threading.Event()

    def plan(observed: Observed) -> Plan:
        assert answered.wait(30), "the loop stood still"
        return Plan(status=observed.job.status)

    asyncio.get_running_loop().call_soon(answered.set)
    large = observed(IN_A_THREAD_FROM)
    assert (await make_plan(plan, large)).status == large.job.status


async def test_a_small_job_is_planned_at_once() -> None:
    began: list[int] = []

    def plan(observed: Observed) -> Plan:
        began.append(threading.get_ident())
        return Plan(status=observed.job.status)

    await make_plan(plan, observed(IN_A_THREAD_FROM - 1))
    assert began == [threading.get_ident()]
