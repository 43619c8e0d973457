"""Run the operator in virtual time beside nodes whose clocks are wrong, with seeded moments."""

import asyncio
import logging
import random
from collections.abc import Iterator

import pytest

from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import Scenario

HOUR = 3600.0


@pytest.fixture(autouse=True)
def without_logs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def spare_nodes(scenario: Scenario) -> list[str]:
    """Return the nodes of the ready spares in their order of use."""
    members = {member["podUid"] for member in scenario.membership()["members"]}
    agents = sorted(scenario.workers.agents.values(), key=lambda agent: int(agent.name.rpartition("-")[2]))
    return [agent.node for agent in agents if agent.uid not in members]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@in_virtual_time
async def test_a_clock_that_is_an_hour_wrong_affects_no_figure(seed: int) -> None:
    rng = random.Random(seed)
    offset, rank = rng.choice((-HOUR, HOUR)), rng.randrange(2)
    job = training_job(replicas=2, spares=2)
    job["spec"]["trainer"]["steps"] = 400

    async with Scenario(job, nodes=5, total_steps=400) as scenario:
        scenario.cluster.graceful_pods = True
        await scenario.wait_for_steps(10)
        await asyncio.sleep(5)
        spares = spare_nodes(scenario)
        wrong = [scenario.membership()["members"][rank]["nodeName"], spares[0]]
        scenario.workers.clock_offsets = dict.fromkeys(wrong, offset)

        def is_reported() -> bool:
            message = str(scenario.condition("NodesHealthy").get("message", ""))
            return all(f"{node}: check Clock" in message for node in wrong)

        await until(is_reported, "the clocks are reported", 30)
        await asyncio.sleep(60)
        assert not scenario.status().get("history"), "a wrong clock interrupted training"
        scenario.workers.crash_process("llama", rank)
        await asyncio.sleep(20)
        scenario.workers.kill_pod(scenario.membership()["members"][1 - rank]["podName"])
        await until(lambda: scenario.membership()["generation"] == 2, "a spare has the rank", 60)
        assert spares[0] not in {member["nodeName"] for member in scenario.membership()["members"]}
        await until(lambda: scenario.status().get("phase") == "Completed", "the job completes", 600)
        history = scenario.status()["history"]
        assert [entry["response"] for entry in history] == ["InPlace", "Spare"]
        assert all(entry["recoveredSeconds"] < 60 for entry in history)
        assert sum((scenario.status().get("goodput", {}).get("lostSeconds") or {}).values()) < 120
