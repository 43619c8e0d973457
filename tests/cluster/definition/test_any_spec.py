"""A real API server takes any spec or gives a reason, and what it takes the operator can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings

from tests.testing.suite.any_json import SLOW_ALLOWED, as_sent, changed
from tests.testing.suite.timeouts import scaled
from tests.testing.suite.trials import trials
from trainium_contract.api_server.connection import Connection
from trainium_contract.api_server.kubeconfig import find_access
from trainium_contract.stored_json import read_json
from trainium_operator.cluster.cache.views import job_record
from trainium_operator.plan.view.size import decide_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Api

pytestmark = pytest.mark.cluster

RECORDED = Path(__file__).parents[2] / "testing/api/recorded"
SPEC = json.loads((RECORDED / "job.json").read_text())["spec"]
LONGEST_ANSWER = 64 << 10
"""Characters of a refusal: the server quotes the value that it refuses."""


@pytest.fixture(scope="module")
def server(defined: Api) -> Iterator[tuple[Connection, str]]:
    """A connection that is kept, and where a job is offered without being kept."""
    if defined.existing:
        pytest.skip("thousands of requests are for a cluster of one's own")
    connection = Connection(find_access(defined.variables["KUBECONFIG"], None, {}), seconds=scaled(60))
    yield connection, f"/apis/trainium.dev/v1alpha1/namespaces/{defined.namespace}/trainingjobs?dryRun=All"
    connection.close()


def test_any_spec_is_taken_and_can_be_read_or_is_refused_with_a_bounded_answer(
    server: tuple[Connection, str],
) -> None:
    connection, path = server
    taken = 0

    @settings(SLOW_ALLOWED, max_examples=trials(40))
    @given(changed(SPEC, most=3))
    def offer(spec: Any) -> None:
        nonlocal taken
        job = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "any"}, "spec": spec}
        answer = connection.request("POST", path, body=as_sent(job))
        assert answer.status in (201, 400, 413, 422), answer.body[:500]
        if answer.status != 201:
            assert len(answer.body) <= LONGEST_ANSWER
            return
        taken += 1
        kept = json.loads(answer.body)
        kept["metadata"]["resourceVersion"] = "1"  # which a dry run does not give
        record = job_record(kept)
        assert record.view is not None, record.error
        decide_size(record.view.spec)

    offer()
    assert taken, "a rule that refuses everything would pass"


def test_a_job_that_no_usual_parser_reads_is_taken_and_is_read_all_the_same(
    server: tuple[Connection, str],
) -> None:
    connection, path = server
    template = '{"a":' * 9_000 + "1" + "}" * 9_000
    spec = json.dumps(SPEC).replace('"workers": {', f'"workers": {{"template": {template}, ', 1)
    job = f'{{"apiVersion":"trainium.dev/v1alpha1","kind":"TrainingJob","metadata":{{"name":"deep"}},"spec":{spec}}}'
    answer = connection.request("POST", path, body=job.encode())

    assert answer.status == 201, answer.body[:500]
    with pytest.raises(RecursionError):
        json.loads(answer.body)
    kept = read_json(answer.body)
    kept["metadata"]["resourceVersion"] = "1"  # which a dry run does not give
    record = job_record(kept)
    assert record.view is not None, record.error
    json.dumps(record.view.spec.to_wire())
