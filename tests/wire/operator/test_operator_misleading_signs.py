"""Run the operator in virtual time through signs that mislead and capacity that comes and goes, with seeded moments."""

import asyncio
import functools
import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import lose_node, set_readiness
from tests.testing.virtual.operator_process import training_job, until
from tests.testing.virtual.replicas import Scenario
from trainium_contract.wire.messages import StepTiming
from trainium_operator.cluster.api.resources import CONFIG_MAPS, NODES, PODS
from trainium_operator.settings import Settings

Json = dict[str, Any]
NAME = "llama"
HOUR = 3600.0
SEEDS = (1, pytest.param(2, marks=pytest.mark.long))
REASONS = ("NeuronHasError_HBM_UNCORRECTABLE_ERROR", "NeuronHasError_SRAM_UNCORRECTABLE_ERROR")
SMALL_BATCH = {"recovery": {"rescaleAfterSeconds": 30}, "trainer": {"batch": {"globalSize": 8, "microSize": 1}}}


class OneJobCluster(Scenario):
    """One job on a fake cluster with an operator."""

    def __init__(self, *, nodes: int, steps: int, change: Json | None = None, **workers: Any) -> None:
        job = training_job(NAME, **({"replicas": 2, "spares": 1} | workers))
        job["spec"] |= change or {}
        job["spec"]["trainer"]["steps"] = steps
        super().__init__(job, nodes=nodes, total_steps=steps, settings=Settings(extra_priority_class="idle-nodes"))
        self.cluster.graceful_pods = True

    def history(self) -> list[Json]:
        return list(self.status().get("history") or [])

    def members(self) -> list[Json]:
        return list(self.membership()["members"])

    def spare_nodes(self) -> list[str]:
        """Return the nodes of the ready spares in their order of use."""
        members = {member["podUid"] for member in self.members()}
        agents = sorted(self.workers.agents.values(), key=lambda agent: int(agent.name.rpartition("-")[2]))
        return [agent.node for agent in agents if agent.uid not in members]

    def waiting_events(self) -> int:
        return sum("it waits for a processor, as the others do" in note for note in self.event_messages())

    async def until_step(self, step: int) -> None:
        await until(lambda: self.workers.step >= step, 240, f"step {step}")

    async def until_size(self, size: int, seconds: float = 240) -> None:
        def trains() -> bool:
            status = self.status()
            return status.get("phase") == "Running" and status.get("membership", {}).get("size") == size

        await until(trains, seconds, f"{size} nodes")

    async def until_completed(self) -> None:
        await until(lambda: self.status().get("phase") == "Completed", 600, "the job completes")


@pytest.fixture(autouse=True)
def without_logs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", SEEDS)
@in_virtual_time
async def test_alternating_idle_capacity_loses_no_step_and_blames_no_node(seed: int) -> None:
    phase = random.Random(seed).uniform(0, 60)

    change = {**SMALL_BATCH, "elasticity": {"idleNodes": "Take"}}
    async with OneJobCluster(nodes=4, steps=100_000, change=change, spares=0, maxReplicas=4) as scenario:
        await scenario.until_size(4)
        await asyncio.sleep(phase)
        start = scenario.workers.step
        for minute in range(60):
            if minute % 2:
                scenario.workers.occupied_nodes.clear()
            else:
                assert sum(scenario.workers.occupy_node(f"node-{number}") for number in range(4)) == 2
            await asyncio.sleep(60)
            assert scenario.status()["membership"]["size"] >= 2
        assert scenario.workers.step - start > 0.9 * HOUR
        scenario.workers.occupied_nodes.clear()
        await scenario.until_size(4, 600)
        assert scenario.status()["membership"]["generation"] <= 40
        assert not scenario.status().get("failures")
        assert {entry["cause"] for entry in scenario.history()} <= {"Capacity", "Preempted"}
        assert all((entry.get("stepsLost") or 0) == 0 for entry in scenario.history())


@pytest.mark.parametrize("seed", SEEDS)
@in_virtual_time
async def test_a_job_without_spares_shrinks_to_uneven_sizes_and_grows_back(seed: int) -> None:
    rng = random.Random(seed)
    first, second = rng.randrange(4), rng.randrange(3)

    async with OneJobCluster(
        nodes=4, steps=100_000, change=SMALL_BATCH, replicas=4, spares=0, minReplicas=1
    ) as scenario:
        await scenario.until_size(4)
        await scenario.until_step(10)
        lost = [scenario.members()[first]["nodeName"]]
        lose_node(scenario.workers, lost[0])
        await scenario.until_size(3)
        assert scenario.status()["membership"]["passes"] == 3, "8 samples on 3 nodes take 3 passes"
        await asyncio.sleep(20)
        lost.append(scenario.members()[second]["nodeName"])
        lose_node(scenario.workers, lost[1])
        await scenario.until_size(2)
        await asyncio.sleep(20)
        scenario.workers.lost_nodes.clear()
        set_readiness(scenario.workers, "True", lost)
        await scenario.until_size(4, 1200)
        rungs = [entry["rung"] for entry in scenario.history()]
        assert rungs[:2] == ["Shrink", "Shrink"]
        assert set(rungs[2:]) == {"Grow"}


@pytest.mark.parametrize("seed", SEEDS)
@in_virtual_time
async def test_a_clock_that_is_an_hour_wrong_affects_no_figure(seed: int) -> None:
    rng = random.Random(seed)
    offset, rank = rng.choice((-HOUR, HOUR)), rng.randrange(2)

    async with OneJobCluster(nodes=5, replicas=2, spares=2, steps=400) as scenario:
        await scenario.until_step(10)
        await asyncio.sleep(5)
        spares = scenario.spare_nodes()
        wrong = [scenario.members()[rank]["nodeName"], spares[0]]
        scenario.workers.clock_offsets = dict.fromkeys(wrong, offset)

        def is_reported() -> bool:
            message = str(scenario.condition("NodesHealthy").get("message", ""))
            return all(f"{node}: check Clock" in message for node in wrong)

        await until(is_reported, 30, "the clocks are reported")
        await asyncio.sleep(60)
        assert not scenario.history(), "a wrong clock interrupted training"
        scenario.workers.crash_process(NAME, rank)
        await asyncio.sleep(20)
        scenario.workers.kill_pod(scenario.members()[1 - rank]["podName"])
        await until(lambda: scenario.membership()["generation"] == 2, 60, "a spare has the rank")
        assert spares[0] not in {member["nodeName"] for member in scenario.members()}
        await scenario.until_completed()
        assert [entry["rung"] for entry in scenario.history()] == ["InPlace", "Spare"]
        assert all(entry["recoveredSeconds"] < 60 for entry in scenario.history())
        assert sum((scenario.status().get("goodput", {}).get("lostSeconds") or {}).values()) < 120


def step_timing(own: float, *, wait: float) -> StepTiming:
    return StepTiming(steps=15, step_seconds=1.0, own_seconds=own, cpu_wait=wait)


@pytest.mark.parametrize("seed", SEEDS)
@in_virtual_time
async def test_only_a_straggler_that_does_not_wait_for_its_host_is_replaced(seed: int) -> None:
    victims = random.Random(seed).sample(range(4), 2)

    change = {"recovery": {"stragglers": {"slowdown": 1.5, "persistSteps": 20, "evict": True}}}
    async with OneJobCluster(nodes=6, replicas=4, spares=1, steps=1400, change=change) as scenario:
        await scenario.until_step(10)
        nodes = [member["nodeName"] for member in scenario.members()]
        spare = scenario.spare_nodes()[0]
        # Each rank works 0.2 s in a step; the rest is the wait for a processor of the host that all share.
        loaded = {node: step_timing(0.4, wait=0.5) for node in nodes}
        scenario.workers.timings = loaded | {nodes[rank]: step_timing(1.0, wait=0.8) for rank in victims}
        await until(lambda: scenario.waiting_events() == 2, 120, "both are reported as waiting for a processor")
        before = scenario.pods()
        await asyncio.sleep(300)
        assert scenario.pods() == before
        assert not scenario.history()
        # The host is idle now and one node is slow by itself: a spare was available before, too.
        idle = dict.fromkeys((*nodes, spare), step_timing(0.2, wait=0.0))
        scenario.workers.timings = idle | {nodes[victims[0]]: step_timing(1.0, wait=0.0)}
        await until(lambda: scenario.membership()["generation"] == 2, 120, "the slow node is replaced")
        await scenario.until_completed()
        assert [(entry["cause"], entry["rung"]) for entry in scenario.history()] == [("Straggler", "Spare")]


def set_machine(raw: Json, machine: str) -> None:
    raw["spec"]["providerID"] = machine
    raw["status"]["capacity"] = raw["status"]["allocatable"] = {"aws.amazon.com/neuron": "16"}


@in_virtual_time
async def test_a_machine_with_three_faults_in_a_day_is_quarantined_permanently() -> None:
    rng = random.Random(1)

    async with OneJobCluster(nodes=8, steps=100_000) as scenario:
        machines = {
            name: f"aws:///us-east-1a/i-{number:017x}" for number, name in enumerate(scenario.cluster.names(NODES, ""))
        }
        for name, machine in machines.items():
            scenario.cluster.change(NODES, "", name, functools.partial(set_machine, machine=machine))
        await scenario.until_step(10)
        node = scenario.members()[rng.randrange(2)]["nodeName"]
        machine = machines[node]
        for fault in range(3):
            condition = {"type": "NeuronHealth", "status": "True", "reason": rng.choice(REASONS)}
            condition["lastTransitionTime"] = scenario.cluster.now
            scenario.cluster.change(NODES, "", node, lambda raw, bad=condition: raw["status"]["conditions"].append(bad))
            await asyncio.sleep(30)
            assert node not in [member["nodeName"] for member in scenario.members()], f"after fault {fault + 1}"
            lose_node(scenario.workers, node)
            scenario.cluster.remove(NODES, "", node)
            scenario.workers.lost_nodes.discard(node)
            node = f"node-{50 + fault}"
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": scenario.cluster.now}
            raw: Json = {"metadata": {"name": node}, "spec": {}, "status": {"conditions": [ready]}}
            set_machine(raw, machine)
            scenario.cluster.add(NODES, raw)
            await asyncio.sleep(rng.uniform(610, 900))
        await asyncio.sleep(300)
        (memory,) = (
            text
            for name in scenario.cluster.names(CONFIG_MAPS, "system")
            for text in (scenario.cluster.get(CONFIG_MAPS, "system", name).get("data") or {}).values()
            if machine in text and "state:" in text
        )
        assert "Permanent" in memory
        pods_before = set(scenario.cluster.names(PODS))
        scenario.workers.kill_pod(scenario.members()[0]["podName"])
        await until(lambda: bool(set(scenario.cluster.names(PODS)) - pods_before), 60, "a new pod")
        (new,) = set(scenario.cluster.names(PODS)) - pods_before
        affinity = scenario.cluster.get(PODS, "default", new)["spec"].get("affinity") or {}
        assert node in json.dumps(affinity.get("nodeAffinity") or {})
