"""An operator reads jobs, statuses and messages with fields of a newer version."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import lose_node
from tests.testing.virtual.operator_process import OperatorProcess, until
from tests.testing.virtual.replicas import Scenario
from trainium_contract.api_server.errors import UndeclaredFieldError
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import HeartbeatRequest, Membership
from trainium_operator.cluster.api.resources import CONFIG_MAPS, JOBS, PODS
from trainium_operator.cluster.cache.lenient import read_spec
from trainium_operator.cluster.execute.undeclared_fields import FOR_SECONDS, UndeclaredFields, find_places
from trainium_operator.coordinator.messages import BadMessageError, read_message

NEWER: dict[str, dict[str, Any]] = {
    "workers": {"placementV9": {"zones": ["a"]}},
    "trainer": {"optimizerV9": {"kind": "Muon"}},
    "recovery": {"rules": [{"action": "TeleportNode", "exitCodes": [99], "cause": "Crash"}]},
}


def add_newer_fields(raw: dict[str, Any]) -> None:
    """Add fields that a newer definition allows and a newer operator has stored."""
    for part, fields in NEWER.items():
        raw["spec"].setdefault(part, {}).update(fields)
    raw["spec"]["telemetryV9"] = {"enabled": True}
    status = raw.setdefault("status", {})
    status["shardsV9"] = [{"zone": "a"}]
    if "membership" in status:
        status["membership"]["quorumV9"] = 3


@asynccontextmanager
async def training_scenario() -> AsyncIterator[tuple[Scenario, FakeApiServer]]:
    async with Scenario(training_job("llama", spares=1), nodes=5) as scenario:
        await scenario.wait_for_steps(seconds=60)
        yield scenario, scenario.cluster


@in_virtual_time
async def test_a_running_job_with_fields_of_a_newer_version_is_recovered() -> None:
    async with training_scenario() as (scenario, cluster):
        pods = cluster.names(PODS)
        config = cluster.get(CONFIG_MAPS, "default", "llama-config")
        cluster.change(JOBS, "default", "llama", add_newer_fields)
        await asyncio.sleep(10)
        assert any("does not know" in note and "spec." not in note for note in scenario.event_messages())
        assert cluster.names(PODS) == pods, "running pods stay"
        lose_node(scenario.workers, cluster.get(PODS, "default", "llama-w-1")["spec"]["nodeName"])
        await scenario.wait_for_steps()
        assert scenario.status()["membership"]["generation"] == 2
        assert cluster.get(CONFIG_MAPS, "default", "llama-config") == config, "its configuration keeps unknown fields"
        assert cluster.get(JOBS, "default", "llama")["spec"]["trainer"]["optimizerV9"] == {"kind": "Muon"}


@in_virtual_time
async def test_an_operator_that_starts_recovers_jobs_with_newer_fields() -> None:
    async with training_scenario() as (scenario, cluster):
        await scenario.process.kill()
        cluster.change(JOBS, "default", "llama", add_newer_fields)
        older = OperatorProcess(cluster, identity="operator-1")
        scenario.workers.operator = older
        await older.start()
        await until(older.runtime.leading.is_set, "it leads", 120)
        scenario.workers.kill_pod("llama-w-0")
        await scenario.wait_for_steps()
        await older.kill()


@in_virtual_time
async def test_a_job_is_recovered_while_the_definition_lacks_status_fields() -> None:
    """A real API server refuses the whole status for one unknown field."""

    async with training_scenario() as (scenario, cluster):
        cluster.undeclared = {"status.selector", "status.membership.batch", "status.goodput.sizes"}
        scenario.workers.kill_pod("llama-w-0")
        await scenario.wait_for_steps()
        await until(lambda: "recoveredSeconds" in scenario.status()["history"][-1], "the recovery is reported", 120)
        assert scenario.status()["membership"]["generation"] == 2
        cluster.undeclared = set()
        cluster.change(JOBS, "default", "llama", lambda raw: raw["status"].pop("selector", None))
        await until(lambda: "selector" in scenario.status(), "the omitted field is written again", 120)


def test_only_undeclared_fields_are_left_out_of_a_status() -> None:
    prefix = "failed to create typed patch object (a/b; trainium.dev/v1alpha1, Kind=TrainingJob): "
    message = (
        f"{prefix}errors:\n  .status.history[0].responseV9: field not declared in schema\n"
        '  .status.conditions[type="Ready"].since: field not declared in schema\n'
        "  .status.zzz: field not declared in schema"
    )
    assert find_places(f"{prefix}.status.gang.group: field not declared in schema") == {("gang", "group")}
    assert find_places(message) == {("history", "responseV9"), ("conditions", "since"), ("zzz",)}
    assert find_places(f"{prefix}.spec.x: field not declared in schema") == frozenset()
    now = [0.0]
    undeclared = UndeclaredFields(lambda: now[0])
    status = {"history": [{"responseV9": 1, "at": 2}, {"at": 3}], "zzz": {"a": 1}, "gang": {}, "phase": "Running"}
    assert undeclared.drop_from(status) == status
    assert undeclared.learn(UndeclaredFieldError(message))
    known = {"history": [{"at": 2}, {"at": 3}], "gang": {}, "phase": "Running"}
    assert undeclared.drop_from(status) == known
    assert not undeclared.learn(UndeclaredFieldError(message)), "a retry would fail again"
    now[0] = FOR_SECONDS
    assert undeclared.drop_from(status) == status, "the definition may be newer now"
    assert undeclared.learn(UndeclaredFieldError(message))


@in_virtual_time
async def test_a_new_job_with_unknown_fields_is_not_started() -> None:
    async with training_scenario() as (scenario, cluster):
        job = training_job("next")
        job["spec"]["trainer"].update(NEWER["trainer"])
        cluster.add(JOBS, job)
        await asyncio.sleep(30)
        assert [name for name in cluster.names(PODS) if name.startswith("next")] == []
        assert any("trainer.optimizerV9: not known to this version" in note for note in scenario.event_messages())
        assert scenario.status()["phase"] == "Running"


def test_only_unknown_fields_of_a_spec_are_left_out() -> None:
    spec = training_job()["spec"]
    known, unknown = read_spec({**spec, "cleanPodPolicy": "Archive", "x": 1})
    assert known == read_spec(spec)[0]
    assert unknown == ("cleanPodPolicy", "x")
    with pytest.raises(ValidationError):
        read_spec({**spec, "x": 1, "workers": {"replicas": -1}})


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


def parse_heartbeat(**changes: Any) -> HeartbeatRequest:
    return read_message(HeartbeatRequest, json.dumps({**HEARTBEAT, **changes}).encode())


def test_unknown_fields_of_a_heartbeat_are_ignored() -> None:
    assert parse_heartbeat(energyV9={"joules": 1}, progress={"step": 7, "tokensV9": 3}) == parse_heartbeat()
    mixed = parse_heartbeat(restarts=[restart("SolarFlare"), restart("Crash")], failures=[FAILURE])
    assert [restart.cause for restart in mixed.restarts] == [Cause.CRASH]
    assert len(mixed.failures) == 1
    assert parse_heartbeat(checks=[{"check": "Weather", "passed": True, "seconds": 1.0}]).checks == ()


@pytest.mark.parametrize(
    "changes", [{"phase": "Dreaming"}, {"generation": -1}, {"generation": -1, "checks": [{"check": "x"}]}]
)
def test_an_invalid_required_field_of_a_message_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadMessageError):
        parse_heartbeat(**changes)


def test_unknown_fields_of_a_membership_are_ignored() -> None:
    member = {"podUid": "u", "podName": "w", "podIp": "10.0.0.1", "nodeName": "n", "nodeRank": 0}
    received = {
        "protocol": 2,
        "generation": 4,
        "transition": "Graceful",
        "cause": "SolarFlare",
        "members": [{**member, "rendezvousPort": 29500, "zoneV9": "a"}],
        "processesPerNode": 1,
        "epochV9": 2,
    }
    assert Membership.model_validate(received).find_node_rank("u") == 0
