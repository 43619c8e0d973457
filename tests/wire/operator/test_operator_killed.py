"""The real plan, executor and caches against a fake API server: the operator dies after each of its writes.

For each scenario an undisturbed run counts the writes and records the end. Then the scenario is repeated once per write
(every third one with each change, all of them nightly): the operator is killed right after the write, before the
response arrives, and started again. The end must be the same, no generation may have two memberships, and no name of
a pod may be used twice.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from tests.testing.api.fake_api_server import Write, http_error
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import run_virtual
from tests.testing.virtual.fake_workers import lose_node
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import OperatorDeployment, check_each_kill_point, run_deployment
from trainium_contract.wire.recorded_membership import parse_refused_status
from trainium_operator.cluster.api.resources import CONFIG_MAPS, EVENTS, JOBS
from trainium_operator.cluster.api.transport import HttpResponse
from trainium_operator.cluster.cache.membership_record import read_membership

JOB = "llama"

SETTLE_SECONDS = 12.0
CREATION_PAUSE_SECONDS = 60.0
"""Longest pause before a refused status is sent again."""
START_WRITES = 15
"""Writes until the job trains: the scenario of the first start tests those."""
FILLED = {"Replace": "Spare"}
"""Both fill the lost rank. A new operator uses the first agents that register, and pods start at once here."""
EDITED = defaultdict(bool, {"resize": True, "suspend and resume": True})


@dataclass
class Record:
    """The memberships, pods and generations of a run."""

    memberships: dict[int, set[str]] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    refused: list[Write] = field(default_factory=list)

    def watch(self, deployment: OperatorDeployment) -> None:
        def observe(write: Write) -> None:
            if "/leases" in write.path:
                return
            if write.status >= 400:
                self.refused.append(write)
                return
            if write.method == "POST" and write.path.endswith("/pods"):
                self.created.append(write.body["metadata"]["name"])
            key = (CONFIG_MAPS.plural, "default", f"{JOB}-membership")
            if key in deployment.cluster.objects:
                recorded = read_membership(deployment.cluster.objects[key])
                if recorded is not None:  # otherwise the object holds only a status that was refused
                    self.memberships.setdefault(recorded.generation, set()).add(recorded)
            if write.path.endswith("/status"):
                self.generations.append(deployment.status().get("membership", {}).get("generation", 0))

        deployment.cluster.after_write = observe

    def check(self) -> None:
        assert all(len(contents) == 1 for contents in self.memberships.values()), "one generation, two memberships"
        assert len(self.created) == len(set(self.created)), "a pod's name was used twice"
        assert self.generations == sorted(self.generations), "the generation went back"


async def start(deployment: OperatorDeployment) -> None:
    await deployment.wait_until_running()


async def kill_a_process(deployment: OperatorDeployment) -> None:
    await deployment.wait_until_running()
    deployment.workers.crash_process(JOB, 1)
    await until(lambda: deployment.status().get("restarts", {}).get("total") == 1, "the restart is counted", 60)
    await deployment.wait_until_running()


async def lose_a_node(deployment: OperatorDeployment) -> None:
    await deployment.wait_until_running()
    lose_node(deployment.workers, deployment.membership()["members"][1]["nodeName"])
    await until(lambda: deployment.status().get("restarts", {}).get("total") == 1, "the loss is counted", 60)
    await deployment.wait_for_steps()
    await deployment.wait_until_running()


async def kill_a_pod(deployment: OperatorDeployment) -> None:
    await deployment.wait_until_running()
    deployment.workers.kill_pod(deployment.membership()["members"][0]["podName"])
    await until(lambda: deployment.status().get("restarts", {}).get("total") == 1, "the loss is counted", 60)
    await deployment.wait_for_steps()
    await deployment.wait_until_running()


async def resize(deployment: OperatorDeployment) -> None:
    await deployment.wait_until_running()
    for size in (3, 1):
        deployment.change_spec(lambda spec, size=size: spec["workers"].update(replicas=size))  # type: ignore[misc]
        await until(lambda size=size: deployment.status().get("replicas") == size, f"{size} nodes", 120)  # type: ignore[misc]
        await deployment.wait_for_steps()
        await deployment.wait_until_running()


async def suspend_and_resume(deployment: OperatorDeployment) -> None:
    await deployment.wait_until_running()
    deployment.change_spec(lambda spec: spec.update(suspend=True))
    await until(lambda: deployment.status().get("phase") == "Suspended", "it is suspended", 120)
    deployment.change_spec(lambda spec: spec.update(suspend=False))
    await until(lambda: deployment.status().get("phase") == "Running", "it runs again", 120)
    await deployment.wait_for_steps()
    await deployment.wait_until_running()


async def fail(deployment: OperatorDeployment) -> None:
    await deployment.wait_until_running()
    await deployment.wait_for_steps()
    deployment.workers.give_up(JOB, 1, 64)
    await until(lambda: deployment.status().get("phase") == "Failed", "the verdict", 120)


async def complete(deployment: OperatorDeployment) -> None:
    await deployment.wait_until_running()
    deployment.workers.total_steps = deployment.workers.step + 5
    await until(lambda: deployment.status().get("phase") == "Completed", "the end", 120)


async def expire(deployment: OperatorDeployment) -> None:
    await complete(deployment)
    await until(lambda: (JOBS.plural, "default", JOB) not in deployment.cluster.objects, "the job is deleted", 120)


SCENARIOS: dict[str, tuple[Callable[[OperatorDeployment], Awaitable[None]], dict[str, Any]]] = {
    "first start": (start, {}),
    "killed process": (kill_a_process, {}),
    "killed pod": (kill_a_pod, {}),
    "lost node": (lose_a_node, {}),
    "resize": (resize, {}),
    "suspend and resume": (suspend_and_resume, {}),
    "verdict": (fail, {}),
    "completion": (complete, {}),
    "expiry": (expire, {"ttlSecondsAfterFinished": 10}),
}


def refuse_statuses(method: str, path: str) -> HttpResponse | None:
    """Refuse the status of every job, as a policy on `trainingjobs/*` does."""
    if method == "PATCH" and path.endswith("/status"):
        return http_error(403, "Forbidden", "a TrainingJob needs the label cost-center")
    return None


def run_scenario(
    name: str, die_after_write: int | None, *, refused: bool = False
) -> tuple[dict[str, Any], int, Record]:
    """Run a scenario and return its end, the writes of its first operator, and the record.

    `refused`: no status of a job is accepted before the end.
    """
    act, spec = SCENARIOS[name]
    job = training_job(replicas=2, spares=1, minReplicas=1)
    job["spec"].update(spec)
    record = Record()

    async def scenario() -> tuple[dict[str, Any], int]:
        async with run_deployment(job=job, nodes=6, replicas=0, start=False) as deployment:
            record.watch(deployment)
            if refused:
                deployment.cluster.faults.append(refuse_statuses)
            first = await deployment.start_operator("operator-0", die_after_write=die_after_write)
            await act(deployment)
            if refused:
                deployment.cluster.faults.remove(refuse_statuses)
                await asyncio.sleep(CREATION_PAUSE_SECONDS)
            await asyncio.sleep(SETTLE_SECONDS)
            return final_state(deployment), len(first.connection.writes)

    end, writes = run_virtual(scenario())
    record.check()
    return end, writes, record


def final_state(deployment: OperatorDeployment) -> dict[str, Any]:
    """Return what must be the same however often the operator died."""
    if (JOBS.plural, "default", JOB) not in deployment.cluster.objects:
        remaining = [key for key in deployment.cluster.objects if key[0] not in ("nodes", "leases", EVENTS.plural)]
        return {"left": [key for key in remaining if key[1] == "default"]}
    status = deployment.stored_status()
    membership = deployment.membership()
    running = status["phase"] == "Running"
    # The last condition of checkpoints of an ended job depends on the moment of its end.
    conditions = {condition["type"]: (condition["status"], condition["reason"]) for condition in status["conditions"]}
    return {
        "phase": status["phase"],
        "verdict": re.sub("after step [0-9]+", "after some step", status.get("verdict", "")),
        "restarts": status.get("restarts"),
        "history": [
            (entry["cause"], FILLED.get(entry["response"], entry["response"])) for entry in status.get("history", ())
        ],
        "failures": [failure["cause"] for failure in status.get("failures", ())],
        "size": status["membership"].get("size"),
        "ranks": [member["nodeRank"] for member in membership["members"]],
        "recorded": membership["generation"] == status["membership"]["generation"],
        "conditions": conditions
        if running
        else {kind: conditions[kind] for kind in conditions if kind != "DisruptionAllowed"},
        "pods": len(deployment.pods()) if running else None,
        "kept": parse_refused_status(deployment.cluster.get(CONFIG_MAPS, "default", f"{JOB}-membership")),
    }


@cache
def run_without_kill(name: str) -> tuple[dict[str, Any], int]:
    end, writes, record = run_scenario(name, None)
    # The user's own change may come between a plan and its write.
    refused = [write for write in record.refused if not (EDITED[name] and write.path.endswith("/status"))]
    assert refused == [], "a write was refused without a concurrent change"
    return end, writes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_ends_the_same_after_each_death_of_the_operator(name: str, stride: int) -> None:
    def run(write: int | None) -> tuple[dict[str, Any], int]:
        return run_without_kill(name) if write is None else run_scenario(name, write)[:2]

    check_each_kill_point(run, stride, first_write=1 if name == "first start" else START_WRITES)


@cache
def run_with_refused_statuses(name: str) -> tuple[dict[str, Any], int]:
    end, writes, _ = run_scenario(name, None, refused=True)
    return end, writes


REFUSED = [name for name in SCENARIOS if name != "expiry"]
"""The job of the last one is deleted before its status is accepted."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_scenario_ends_the_same_if_no_status_is_accepted_before_its_end(name: str) -> None:
    assert run_with_refused_statuses(name)[0] == run_without_kill(name)[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_decisions_survive_each_death_of_the_operator(name: str, stride: int) -> None:
    def run(write: int | None) -> tuple[dict[str, Any], int]:
        return run_with_refused_statuses(name) if write is None else run_scenario(name, write, refused=True)[:2]

    check_each_kill_point(run, stride, first_write=1 if name == "first start" else START_WRITES)


@pytest.mark.parametrize("name", ["first start", "lost node"])
def test_an_undisturbed_scenario_has_few_writes(name: str) -> None:
    _, writes = run_without_kill(name)
    assert writes < 45, "status is written when something happened, not all the time"
