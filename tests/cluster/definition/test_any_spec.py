"""A real API server accepts any spec or returns a reason, and the operator can parse all accepted ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.cluster.definition.conftest import Api
from tests.testing.suite.any_json import SLOW_ALLOWED, as_json, mutated_values
from trainium_contract.api_server.connection import Connection
from trainium_contract.stored_json import read_json
from trainium_operator.cluster.cache.views import parse_job
from trainium_operator.plan.view.size import decide_size

pytestmark = pytest.mark.cluster

RECORDED = Path(__file__).parents[2] / "testing/api/recorded"
SPEC = json.loads((RECORDED / "job.json").read_text())["spec"]
LONGEST_ANSWER = 64 << 10
"""Characters of a refusal: the server quotes the value that it refuses."""


@pytest.fixture
def server(crd_api: Api) -> tuple[Connection, str]:
    """Return a persistent connection and the path of a dry run."""
    if crd_api.connection is None:
        pytest.skip("thousands of requests are sent only to the development cluster")
    return crd_api.connection, f"/apis/trainium.dev/v1alpha1/namespaces/{crd_api.namespace}/trainingjobs?dryRun=All"


@pytest.mark.parametrize("examples", [20, pytest.param(400, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_any_spec_is_accepted_and_parsed_or_refused(server: tuple[Connection, str], examples: int) -> None:
    connection, path = server
    accepted = 0

    @settings(SLOW_ALLOWED, max_examples=examples)
    @given(mutated_values(SPEC, most=3))
    def offer(spec: Any) -> None:
        nonlocal accepted
        job = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "any"}, "spec": spec}
        answer = connection.request("POST", path, body=as_json(job))
        assert answer.status in (201, 400, 413, 422), answer.body[:500]
        if answer.status != 201:
            assert len(answer.body) <= LONGEST_ANSWER
            return
        accepted += 1
        stored = json.loads(answer.body)
        stored["metadata"]["resourceVersion"] = "1"  # which a dry run does not give
        record = parse_job(stored)
        assert record.view is not None, record.error
        decide_size(record.view.spec)

    offer()
    assert accepted, "a rule that refuses everything would pass"


def test_a_job_that_usual_parsers_reject_is_accepted_and_parsed(
    server: tuple[Connection, str],
) -> None:
    connection, path = server
    template = '{"a":' * 9_000 + "1" + "}" * 9_000
    spec = json.dumps(SPEC).replace('"workers": {', f'"workers": {{"template": {template}, ', 1)
    job = f'{{"apiVersion":"trainium.dev/v1alpha1","kind":"TrainingJob","metadata":{{"name":"deep"}},"spec":{spec}}}'
    answer = connection.request("POST", path, body=job.encode(), content_type="application/yaml")

    assert answer.status == 201, answer.body[:500]
    with pytest.raises(RecursionError):
        json.loads(answer.body)
    stored = read_json(answer.body)
    stored["metadata"]["resourceVersion"] = "1"  # which a dry run does not give
    record = parse_job(stored)
    assert record.view is not None, record.error
    json.dumps(record.view.spec.to_wire())
