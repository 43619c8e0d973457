"""Definitions and operators of two versions on a real API server: what an operator tells can always be written."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.testing.cluster.installed import await_definition
from tests.testing.cluster.marks import LABELS
from tests.testing.versions.previous import previous_version, speak
from trainium_operator.cluster.api.errors import UndeclaredFieldError
from trainium_operator.cluster.execute.undeclared_fields import UndeclaredFields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Api

    from tests.testing.versions.previous import Previous

pytestmark = pytest.mark.cluster

GROUP = "previous.trainium.dev"
"""Where the older definition stands beside the present one."""
PLURAL = "formerjobs"
"""Its own there: kubectl would take `trainingjobs` of other tests for it, also for a while after it is deleted."""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    return previous_version(tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="module")
def older(defined: Api, previous: Previous) -> Iterator[Api]:
    """The API server with the definition of the version before too, in a group of its own."""
    definition = yaml.safe_load((previous.folder / "manifests/crd.yaml").read_text())
    definition["metadata"] = {"name": f"{PLURAL}.{GROUP}", "labels": LABELS}
    definition["spec"]["group"] = GROUP
    definition["spec"]["names"].update(plural=PLURAL, singular="formerjob", shortNames=[], categories=[])
    defined.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(definition))
    await_definition(defined.access, f"{PLURAL}.{GROUP}")
    yield defined
    defined.kubectl("delete", "crd", f"{PLURAL}.{GROUP}")


@pytest.fixture
def tell(older: Api, request: pytest.FixtureRequest) -> Iterator[Callable[[str, dict[str, Any]], str]]:
    """Write a status by server-side apply, as the operator does; what the API server says against it."""
    made: list[str] = []

    def write(group: str, status: dict[str, Any]) -> str:
        job: dict[str, Any] = {
            "apiVersion": f"{group}/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "told"},
            "spec": {"workers": {"replicas": 1, "accelerator": {"device": "cpu"}}},
        }
        if group not in made:
            older.kubectl("create", "-f", "-", stdin=json.dumps(job))
            made.append(group)
        job.pop("spec")
        flags = ("--server-side", "--subresource=status", "--field-manager=operator", "--validate=false")
        written = json.dumps({**job, "status": status})
        done = older.run("kubectl", "-n", older.namespace, "apply", *flags, "-f", "-", stdin=written)
        return done.stderr if done.returncode else ""

    yield write
    for group in made:
        older.kubectl("delete", _resource(group), "told")


def _resource(group: str) -> str:
    return f"{PLURAL if group == GROUP else 'trainingjobs'}.{group}"


def stored(api: Api, group: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(api.kubectl("get", _resource(group), "told", "-o", "json"))["status"]
    return status


def test_the_present_definition_takes_what_an_operator_of_the_version_before_tells(
    older: Api, previous: Previous, tell: Callable[[str, dict[str, Any]], str]
) -> None:
    status = speak(previous, "previous", "write")["TrainingJobStatus"]
    assert tell("trainium.dev", status) == ""
    assert stored(older, "trainium.dev") == status


def test_the_present_definition_takes_what_an_operator_of_a_later_version_tells(
    older: Api, previous: Previous, tell: Callable[[str, dict[str, Any]], str]
) -> None:
    status = copy.deepcopy(speak(previous, "present", "write")["TrainingJobStatus"])
    status["shardsV9"] = [{"zone": "a"}]
    status["membership"]["quorumV9"] = 3
    status["history"][0]["blameV9"] = {"rank": 4}
    status["conditions"][0]["sinceV9"] = "then"
    assert tell("trainium.dev", status) == ""
    assert stored(older, "trainium.dev") == status


def test_a_definition_of_the_version_before_refuses_a_status_by_names_and_takes_it_without_them(
    older: Api, previous: Previous, tell: Callable[[str, dict[str, Any]], str]
) -> None:
    status = speak(previous, "present", "write")["TrainingJobStatus"]
    status["membership"]["quorumV9"] = 3
    undeclared, refusals = UndeclaredFields(lambda: 0.0), 0
    while refusal := tell(GROUP, undeclared.without(status)):
        assert undeclared.learn(UndeclaredFieldError(refusal)), refusal
        refusals += 1
    assert refusals > 0
    assert stored(older, GROUP) == undeclared.without(status)
    assert {"phase", "membership", "history"} <= stored(older, GROUP).keys()
