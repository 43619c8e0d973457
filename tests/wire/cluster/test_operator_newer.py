"""An older operator meets what a newer one, its definition and its agents have written, and goes on."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import Workers, lose_node
from tests.testing.virtual.operator_process import OperatorProcess, training_job, until
from tests.testing.virtual.replicas import Scenario
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import HeartbeatRequest, Membership
from trainium_operator.cluster.api.errors import UndeclaredFieldError
from trainium_operator.cluster.api.resources import CONFIG_MAPS, EVENTS, JOBS, PODS
from trainium_operator.cluster.cache.lenient import readable_spec
from trainium_operator.cluster.execute.undeclared_fields import FOR_SECONDS, UndeclaredFields, places_in
from trainium_operator.coordinator.messages import read_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.testing.api.fake_kubernetes import FakeCluster

NEWER: dict[str, dict[str, Any]] = {
    "workers": {"placementV9": {"zones": ["a"]}},
    "trainer": {"optimizerV9": {"kind": "Muon"}},
    "recovery": {"rules": [{"action": "TeleportNode", "exitCodes": [99], "cause": "Crash"}]},
}


def newer(raw: dict[str, Any]) -> None:
    """Add fields that a newer definition allows and a newer operator has stored."""
    for part, fields in NEWER.items():
        raw["spec"].setdefault(part, {}).update(fields)
    raw["spec"]["telemetryV9"] = {"enabled": True}
    status = raw.setdefault("status", {})
    status["shardsV9"] = [{"zone": "a"}]
    if "membership" in status:
        status["membership"]["quorumV9"] = 3


@asynccontextmanager
async def while_training() -> AsyncIterator[tuple[FakeCluster, OperatorProcess, Workers]]:
    async with Scenario(training_job("llama", spares=1), nodes=5) as scenario:
        await scenario.trains(seconds=60)
        yield scenario.cluster, scenario.process, scenario.workers


def notes(cluster: FakeCluster) -> list[str]:
    return [raw["note"] for key, raw in cluster.objects.items() if key[0] == EVENTS.plural]


@in_virtual_time
async def test_a_running_job_with_fields_of_a_newer_version_is_recovered() -> None:
    async with while_training() as (cluster, _process, workers):
        pods = cluster.names(PODS)
        config = cluster.get(CONFIG_MAPS, "default", "llama-config")
        cluster.change(JOBS, "default", "llama", newer)
        await asyncio.sleep(10)
        assert any("does not know" in note and "spec." not in note for note in notes(cluster))
        assert cluster.names(PODS) == pods, "what runs is left as it is"
        lose_node(workers, cluster.get(PODS, "default", "llama-w-1")["spec"]["nodeName"])
        step = workers.step
        await until(lambda: workers.step > step + 5, 120, "it trains again")
        status = cluster.get(JOBS, "default", "llama")["status"]
        assert status["membership"]["generation"] == 2
        assert cluster.get(CONFIG_MAPS, "default", "llama-config") == config, "nor is its configuration made poorer"
        assert cluster.get(JOBS, "default", "llama")["spec"]["trainer"]["optimizerV9"] == {"kind": "Muon"}


@in_virtual_time
async def test_an_operator_that_starts_among_newer_jobs_recovers_them_too() -> None:
    async with while_training() as (cluster, process, workers):
        await process.kill()
        cluster.change(JOBS, "default", "llama", newer)
        older = OperatorProcess(cluster, identity="operator-1")
        workers.operator = older
        await older.start()
        await until(older.runtime.leading.is_set, 120, "it leads")
        workers.kill_pod("llama-w-0")
        step = workers.step
        await until(lambda: workers.step > step + 5, 120, "it trains again")
        await older.kill()


@in_virtual_time
async def test_a_job_is_recovered_while_the_definition_lacks_fields_that_this_operator_reports() -> None:
    """The API server refuses the whole of a status with one field too many; found by an upgrade on a real one."""

    async with while_training() as (cluster, _process, workers):
        cluster.undeclared = {"status.activity", "status.membership.batch", "status.goodput.sizes"}
        workers.kill_pod("llama-w-0")
        step = workers.step
        await until(lambda: workers.step > step + 5, 120, "it trains again")
        await until(lambda: "recoveredSeconds" in status_of(cluster)["history"][-1], 120, "the recovery is reported")
        assert status_of(cluster)["membership"]["generation"] == 2
        cluster.undeclared = set()
        cluster.change(JOBS, "default", "llama", lambda raw: raw["status"].pop("activity"))
        await until(lambda: "activity" in status_of(cluster), 120, "what was left out is written once it may be")


def status_of(cluster: FakeCluster) -> dict[str, Any]:
    status: dict[str, Any] = cluster.get(JOBS, "default", "llama")["status"]
    return status


def test_a_refusal_names_the_fields_to_leave_out_and_no_other_is() -> None:
    one = "failed to create typed patch object (a/b; trainium.dev/v1alpha1, Kind=TrainingJob): "
    many = (
        f"{one}errors:\n  .status.history[0].rungV9: field not declared in schema\n"
        '  .status.conditions[type="Ready"].since: field not declared in schema\n'
        "  .status.zzz: field not declared in schema"
    )
    assert places_in(f"{one}.status.gang.group: field not declared in schema") == {("gang", "group")}
    assert places_in(many) == {("history", "rungV9"), ("conditions", "since"), ("zzz",)}
    assert places_in(f"{one}.spec.x: field not declared in schema") == frozenset()
    now = [0.0]
    undeclared = UndeclaredFields(lambda: now[0])
    status = {"history": [{"rungV9": 1, "at": 2}, {"at": 3}], "zzz": {"a": 1}, "gang": {}, "phase": "Running"}
    assert undeclared.without(status) == status
    assert undeclared.learn(UndeclaredFieldError(many))
    left = {"history": [{"at": 2}, {"at": 3}], "gang": {}, "phase": "Running"}
    assert undeclared.without(status) == left
    assert not undeclared.learn(UndeclaredFieldError(many)), "nothing new: a retry would fail"
    now[0] = FOR_SECONDS
    assert undeclared.without(status) == status, "a newer definition may have come"
    assert undeclared.learn(UndeclaredFieldError(many))


@in_virtual_time
async def test_a_job_that_has_not_started_waits_for_an_operator_that_knows_its_fields() -> None:
    async with while_training() as (cluster, _process, _workers):
        job = training_job("next")
        job["spec"]["trainer"].update(NEWER["trainer"])
        cluster.add(JOBS, job)
        await asyncio.sleep(30)
        assert [name for name in cluster.names(PODS) if name.startswith("next")] == []
        assert any("trainer.optimizerV9: not known to this version" in note for note in notes(cluster))
        assert cluster.get(JOBS, "default", "llama")["status"]["phase"] == "Running"


def test_of_a_spec_only_what_a_newer_version_may_have_added_is_left_out() -> None:
    spec = training_job()["spec"]
    found, unknown = readable_spec({**spec, "cleanPodPolicy": "Archive", "x": 1})
    assert found == readable_spec(spec)[0]
    assert unknown == ("cleanPodPolicy", "x")
    with pytest.raises(ValidationError):
        readable_spec({**spec, "x": 1, "workers": {"replicas": -1}})


HEARTBEAT: dict[str, Any] = {
    "protocol": 2,
    "namespace": "default",
    "job": "llama",
    "podName": "llama-w-0",
    "podUid": "uid",
    "generation": 1,
    "phase": "Training",
    "progress": {"step": 7},
}
FAILURE = {"sequence": 1, "generation": 1, "attempt": 0, "rank": 0, "exitCode": 139, "message": "boom", "at": 1.0}


def restart(cause: str) -> dict[str, Any]:
    times = {"failedAt": 1.0, "detectedAt": 1.0}
    return {"sequence": 0, "generation": 1, "attempt": 1, "cause": cause, **times}


def read(**changes: Any) -> HeartbeatRequest:
    import json

    return read_message(HeartbeatRequest, json.dumps({**HEARTBEAT, **changes}).encode())


def test_a_newer_agents_fields_and_values_never_cost_its_sign_of_life() -> None:
    assert read(energyV9={"joules": 1}, progress={"step": 7, "tokensV9": 3}) == read()
    mixed = read(restarts=[restart("SolarFlare"), restart("Crash")], failures=[FAILURE])
    assert [each.cause for each in mixed.restarts] == [Cause.CRASH]
    assert len(mixed.failures) == 1
    assert read(checks=[{"check": "Weather", "passed": True, "seconds": 1.0}]).checks == ()


@pytest.mark.parametrize(
    "changes", [{"phase": "Dreaming"}, {"generation": -1}, {"generation": -1, "checks": [{"check": "x"}]}]
)
def test_what_a_message_cannot_do_without_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read(**changes)


def test_an_older_agent_follows_a_newer_operators_membership() -> None:
    member = {
        "podUid": "u",
        "podName": "w",
        "podIp": "10.0.0.1",
        "nodeName": "n",
        "nodeRank": 0,
        "rendezvousPort": 29500,
    }
    received = {
        "protocol": 2,
        "generation": 4,
        "transition": "Graceful",
        "cause": "SolarFlare",
        "members": [{**member, "zoneV9": "a"}],
        "processesPerNode": 1,
        "epochV9": 2,
    }
    assert Membership.model_validate(received).rank_of("u") == 0
