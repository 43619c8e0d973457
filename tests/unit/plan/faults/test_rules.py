"""`spec.recovery.rules` wherever a decision is made."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import CA
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.wire.messages import WorkerPhase
from trainium_contract.wire.worker_env import RULES_NAME
from trainium_operator.plan.manifests.config_maps import build_config_map
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, PodPhase


def spec_with_rules(*rules: dict[str, Any]) -> Any:
    return build.spec(workers={"replicas": 4, "spares": 1}, recovery={"rules": list(rules)})


def crashed_agents(**failure_fields: Any) -> dict[int, Any]:
    agents = build.training_agents(range(4), attempt=1)
    fields = {"rank": 1, "message": "no licence left", **failure_fields}
    agents[1] = build.training_agent(
        1, attempt=1, failures=(build.failure(3, **fields),), restarts=(build.restart_record(1),)
    )
    return agents


def test_the_config_map_has_the_rules_of_the_job() -> None:
    assert RULES_NAME not in build_config_map(build.job(build.spec()), CA)["data"]
    text = build_config_map(build.job(spec_with_rules({"exitCodes": [3], "cause": "Host", "action": "AvoidNode"})), CA)[
        "data"
    ][RULES_NAME]
    assert json.loads(text)[0]["exitCodes"] == [3]


def test_a_rule_stops_the_job_for_a_matching_crash() -> None:
    rule = {"exitCodes": [3], "message": "licence", "cause": "UserError", "action": "Stop"}
    result = make_plan(build.running_job(4, spares=1, job_spec=spec_with_rules(rule), agents=crashed_agents()))
    assert result.status.phase is Phase.FAILED
    assert "spec.recovery.rules[0]" in result.status.verdict
    assert result.status.avoided_nodes == ()
    assert make_plan(
        build.running_job(4, spares=1, job_spec=spec_with_rules(rule), agents=crashed_agents(message="x"))
    ).status.phase is not (Phase.FAILED)


@pytest.mark.parametrize(("action", "suspect"), [("AvoidNode", "node-1"), ("ReplaceWorker", "")])
def test_a_rule_replaces_the_worker_and_decides_whether_its_node_is_to_blame(action: str, suspect: str) -> None:
    rule = {"exitCodes": [3], "cause": "AcceleratorRuntimeError", "action": action}
    result = make_plan(build.running_job(4, spares=1, job_spec=spec_with_rules(rule), agents=crashed_agents()))
    assert result.published_members == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert result.newest_entry.cause is Cause.ACCELERATOR_RUNTIME
    assert result.status.failures[-1].node == suspect


def test_a_rule_keeps_a_device_fault_in_place() -> None:
    rule = {"reason": "NRT_EXEC_HW_ERR_NC_UE", "cause": "AcceleratorRuntimeError", "action": "RestartInPlace"}
    result = make_plan(
        build.running_job(4, spares=1, job_spec=spec_with_rules(rule), agents=crashed_agents(runtime_status=1202))
    )
    assert result.published_membership is None
    assert result.newest_entry.cause is Cause.ACCELERATOR_RUNTIME


def test_a_rule_overrides_the_reason_of_a_pod() -> None:
    rule = {"reason": "OOMKilled", "cause": "OutOfMemory", "action": "Stop"}
    killed = build.pod(1, phase=PodPhase.FAILED, reason="OOMKilled", exit_code=137)
    result = make_plan(build.with_pod(build.running_job(4, spares=1, job_spec=spec_with_rules(rule)), killed))
    assert result.status.phase is Phase.FAILED
    assert find_condition(result.status, ConditionType.FAILED).reason == "OutOfMemory"


@pytest.mark.parametrize(("action", "suspect"), [("AvoidNode", "node-1"), ("ReplaceWorker", "")])
def test_a_rule_decides_whether_the_node_of_a_pod_that_ended_is_to_blame(action: str, suspect: str) -> None:
    rule = {"exitCodes": [3], "cause": "AcceleratorRuntimeError", "action": action}
    ended = build.pod(1, phase=PodPhase.FAILED, reason="Error", exit_code=3)
    result = make_plan(build.with_pod(build.running_job(4, spares=1, job_spec=spec_with_rules(rule)), ended))
    assert result.newest_entry.cause is Cause.ACCELERATOR_RUNTIME
    assert result.status.failures[-1].node == suspect


def on_node(ordinal: int, **changes: Any) -> dict[str, Any]:
    nodes = {f"node-{number}": build.node(f"node-{number}") for number in range(5)}
    return {"nodes": {**nodes, f"node-{ordinal}": replace(nodes[f"node-{ordinal}"], **changes)}}


ODD = NodeCondition("CoolingFailed", NodeReadiness.TRUE, "FanStuck", "fan 3 does not turn")


def test_a_rule_gives_an_unknown_condition_a_cause() -> None:
    assert make_plan(build.running_job(4, spares=1, **on_node(1, conditions=(ODD,)))).published_membership is None
    rule = {"reason": "FanStuck", "cause": "Host", "action": "AvoidNode"}
    result = make_plan(build.running_job(4, spares=1, job_spec=spec_with_rules(rule), **on_node(1, conditions=(ODD,))))
    assert result.published_members == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert result.newest_entry.cause is Cause.HOST


def test_a_condition_can_stop_the_job_by_a_rule() -> None:
    rule = {"reason": "FanStuck", "message": "fan 3", "cause": "Host", "action": "Stop"}
    result = make_plan(build.running_job(4, spares=1, job_spec=spec_with_rules(rule), **on_node(1, conditions=(ODD,))))
    assert result.status.phase is Phase.FAILED
    assert find_condition(result.status, ConditionType.FAILED).reason == "StoppedByRule"
    assert "CoolingFailed" in result.status.verdict


def test_rules_apply_to_spares_that_fail_preflight() -> None:
    verdict = build.failure(80, rank=0, generation=0, message="2 Neuron devices are visible")
    unfit = build.agent(4, WorkerPhase.FAILED, verdict=verdict, failures=(verdict,))
    rule = {"exitCodes": [80], "cause": "Capacity", "action": "ReplaceWorker"}
    result = make_plan(build.running_job(4, spares=1, job_spec=spec_with_rules(rule), agents={4: unfit}))
    assert "demo-w-4" in result.deleted_pods
    assert all(record.node == "" for record in result.status.failures)
