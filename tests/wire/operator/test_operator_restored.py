"""The cluster's state goes back, as after a restore of etcd from a backup, and agents know a newer generation."""

import base64
import copy
import gzip
import json
from typing import Any

import pytest

from tests.testing.suite.virtual_time import run_virtual
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import OperatorDeployment, run_deployment
from trainium_contract.wire.recorded_membership import MEMBERSHIP_KEY, parse_membership
from trainium_operator.cluster.api.resources import CONFIG_MAPS, JOBS


async def lose_member(deployment: OperatorDeployment) -> None:
    generation = deployment.membership()["generation"]
    deployment.workers.kill_pod(deployment.membership()["members"][0]["podName"])
    await until(lambda: deployment.membership()["generation"] > generation, "the next generation", 60)
    await deployment.wait_until_running()


def read_records(deployment: OperatorDeployment) -> tuple[Any, Any]:
    record = deployment.cluster.get(CONFIG_MAPS, "default", "llama-membership")
    return copy.deepcopy((deployment.status(), record.get("binaryData")))


def with_generation(record: dict[str, Any], generation: int) -> dict[str, str]:
    """Return the record of the same members under another number."""
    text = json.dumps({**parse_membership({"binaryData": record}), "generation": generation})
    return {MEMBERSHIP_KEY: base64.b64encode(gzip.compress(text.encode())).decode()}


def test_members_that_all_exist_start_again_above_the_generation_that_they_are_in() -> None:
    """The members of the backup are those of now: nothing is lost, and nobody would ever join the older record."""

    async def scenario() -> tuple[int, list[str]]:
        async with run_deployment(replicas=1) as deployment:
            for _ in range(2):
                await lose_member(deployment)
            status, record = read_records(deployment)
            known, pods = deployment.membership()["generation"], deployment.pods()
            await deployment.kill_operator("operator-0")
            status["membership"]["generation"] = 1
            older = with_generation(record, 1)
            deployment.cluster.change(JOBS, "default", "llama", lambda raw: raw.update(status=status))
            deployment.cluster.change(
                CONFIG_MAPS, "default", "llama-membership", lambda raw: raw.update(binaryData=older)
            )
            await deployment.start_operator("operator-1")
            await until(lambda: deployment.membership()["generation"] > known, "a generation above the agents'", 60)
            await deployment.wait_for_steps()
            await deployment.wait_until_running()
            assert deployment.pods() == pods
            return known, [entry["message"] for entry in deployment.status()["history"]]

    known, messages = run_virtual(scenario())

    assert any(f"of generation {known}, and" in message for message in messages)


@pytest.mark.parametrize("losses", [1, 3])
def test_a_restored_record_is_followed_by_a_generation_above_that_of_every_agent(losses: int) -> None:
    async def scenario() -> tuple[int, dict[str, Any], dict[str, Any]]:
        async with run_deployment(replicas=1) as deployment:
            status, record = read_records(deployment)
            for _ in range(losses):
                await lose_member(deployment)
            known = deployment.membership()["generation"]
            await deployment.kill_operator("operator-0")
            deployment.cluster.change(JOBS, "default", "llama", lambda raw: raw.update(status=status))
            deployment.cluster.change(
                CONFIG_MAPS, "default", "llama-membership", lambda raw: raw.update(binaryData=record)
            )
            await deployment.start_operator("operator-1")
            await until(lambda: deployment.membership()["generation"] > known, "a generation above the agents'", 60)
            await deployment.wait_for_steps()
            await deployment.wait_until_running()
            return known, deployment.membership(), deployment.status()

    known, membership, status = run_virtual(scenario())

    assert membership["generation"] > known
    assert status["membership"]["generation"] == membership["generation"]
