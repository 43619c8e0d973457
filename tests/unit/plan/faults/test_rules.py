"""`spec.recovery.rules` wherever a decision is made."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import (
    CA,
    agent,
    deleted,
    failure,
    job,
    newest,
    node,
    planned,
    pod,
    published,
    ranks,
    restart,
    running,
    spec,
    training,
    with_pod,
)
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.wire.messages import WorkerPhase
from trainium_contract.wire.worker_env import RULES_NAME
from trainium_operator.plan.manifests.config_maps import config_map
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, PodPhase


def ruled(*rules: dict[str, Any], spares: int = 1) -> Any:
    return spec(workers={"replicas": 4, "spares": spares}, recovery={"rules": list(rules)})


def crashed(**of_failure: Any) -> dict[int, Any]:
    agents = {at: training(at, attempt=1) for at in range(4)}
    fields = {"rank": 1, "message": "no licence left", **of_failure}
    agents[1] = training(1, attempt=1, failures=(failure(3, **fields),), restarts=(restart(1),))
    return agents


def test_the_config_map_has_the_rules_of_the_job() -> None:
    assert RULES_NAME not in config_map(job(spec()), CA)["data"]
    text = config_map(job(ruled({"exitCodes": [3], "cause": "Host", "action": "AvoidNode"})), CA)["data"][RULES_NAME]
    assert json.loads(text)[0]["exitCodes"] == [3]


def test_a_rule_stops_the_job_for_a_matching_crash() -> None:
    rule = {"exitCodes": [3], "message": "licence", "cause": "UserCode", "action": "Stop"}
    result = planned(running(4, spares=1, job_spec=ruled(rule), agents=crashed()))
    assert result.status.phase is Phase.FAILED
    assert "spec.recovery.rules[0]" in result.status.verdict
    assert result.status.avoided_nodes == ()
    assert planned(running(4, spares=1, job_spec=ruled(rule), agents=crashed(message="x"))).status.phase is not (
        Phase.FAILED
    )


@pytest.mark.parametrize(("action", "suspect"), [("AvoidNode", "node-1"), ("ReplaceWorker", "")])
def test_a_rule_replaces_the_worker_and_decides_whether_its_node_is_to_blame(action: str, suspect: str) -> None:
    rule = {"exitCodes": [3], "cause": "Runtime", "action": action}
    result = planned(running(4, spares=1, job_spec=ruled(rule), agents=crashed()))
    assert ranks(published(result)) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert newest(result).cause is Cause.RUNTIME
    assert result.status.failures[-1].node == suspect


def test_a_rule_keeps_a_device_fault_in_place() -> None:
    rule = {"reason": "NRT_EXEC_HW_ERR_NC_UE", "cause": "Runtime", "action": "RestartInPlace"}
    result = planned(running(4, spares=1, job_spec=ruled(rule), agents=crashed(runtime_status=1202)))
    assert published(result) is None
    assert newest(result).cause is Cause.RUNTIME


def test_a_rule_overrides_the_reason_of_a_pod() -> None:
    rule = {"reason": "OOMKilled", "cause": "Memory", "action": "Stop"}
    killed = pod(1, phase=PodPhase.FAILED, reason="OOMKilled", exit_code=137)
    result = planned(with_pod(running(4, spares=1, job_spec=ruled(rule)), killed))
    assert result.status.phase is Phase.FAILED
    assert find_condition(result.status, ConditionType.FAILED).reason == "OutOfMemory"


@pytest.mark.parametrize(("action", "suspect"), [("AvoidNode", "node-1"), ("ReplaceWorker", "")])
def test_a_rule_decides_whether_the_node_of_a_pod_that_ended_is_to_blame(action: str, suspect: str) -> None:
    rule = {"exitCodes": [3], "cause": "Runtime", "action": action}
    ended = pod(1, phase=PodPhase.FAILED, reason="Error", exit_code=3)
    result = planned(with_pod(running(4, spares=1, job_spec=ruled(rule)), ended))
    assert newest(result).cause is Cause.RUNTIME
    assert result.status.failures[-1].node == suspect


def on_node(at: int, **changes: Any) -> dict[str, Any]:
    nodes = {f"node-{each}": node(f"node-{each}") for each in range(5)}
    return {"nodes": {**nodes, f"node-{at}": replace(nodes[f"node-{at}"], **changes)}}


ODD = NodeCondition("CoolingFailed", NodeReadiness.TRUE, "FanStuck", "fan 3 does not turn")


def test_a_rule_gives_an_unknown_condition_a_cause() -> None:
    assert published(planned(running(4, spares=1, **on_node(1, conditions=(ODD,))))) is None
    rule = {"reason": "FanStuck", "cause": "Host", "action": "AvoidNode"}
    result = planned(running(4, spares=1, job_spec=ruled(rule), **on_node(1, conditions=(ODD,))))
    assert ranks(published(result)) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert newest(result).cause is Cause.HOST


def test_a_condition_can_stop_the_job_by_a_rule() -> None:
    rule = {"reason": "FanStuck", "message": "fan 3", "cause": "Host", "action": "Stop"}
    result = planned(running(4, spares=1, job_spec=ruled(rule), **on_node(1, conditions=(ODD,))))
    assert result.status.phase is Phase.FAILED
    assert find_condition(result.status, ConditionType.FAILED).reason == "StoppedByRule"
    assert "CoolingFailed" in result.status.verdict


def test_rules_apply_to_spares_that_fail_preflight() -> None:
    verdict = failure(80, rank=0, generation=0, message="2 Neuron devices are visible")
    unfit = agent(4, WorkerPhase.FAILED, verdict=verdict, failures=(verdict,))
    rule = {"exitCodes": [80], "cause": "Capacity", "action": "ReplaceWorker"}
    result = planned(running(4, spares=1, job_spec=ruled(rule), agents={4: unfit}))
    assert "demo-w-4" in deleted(result)
    assert all(record.node == "" for record in result.status.failures)
