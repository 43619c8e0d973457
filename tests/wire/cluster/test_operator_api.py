"""The client of the Kubernetes API: retries, errors by kind, paths and bodies."""

import asyncio
import json

import pytest

from tests.testing.api.fake_api_server import FakeApiServer, Fault, http_error
from tests.testing.suite.virtual_time import in_virtual_time
from trainium_contract.api_server import errors
from trainium_contract.api_server.errors import ConnectionFailedError
from trainium_operator.cluster.api.client import ATTEMPTS, Api
from trainium_operator.cluster.api.resources import CONFIG_MAPS, JOBS, LEASES, PODS
from trainium_operator.cluster.api.transport import HttpResponse

BODY = {"metadata": {"name": "a"}}


def fail_first(times: int, outcome: HttpResponse | Exception) -> Fault:
    remaining = [times]

    def fault(_method: str, _path: str) -> HttpResponse | Exception | None:
        remaining[0] -= 1
        return outcome if remaining[0] >= 0 else None

    return fault


@pytest.mark.parametrize(
    "outcome",
    [
        http_error(429, "TooManyRequests"),
        http_error(503, "ServiceUnavailable"),
        http_error(500, "InternalError"),
        http_error(504, "Timeout"),
        ConnectionFailedError("reset"),
    ],
)
@in_virtual_time
async def test_a_request_is_retried_on_overload_and_outage(outcome: HttpResponse | Exception) -> None:
    cluster = FakeApiServer()
    cluster.faults.append(fail_first(3, outcome))
    await Api(cluster).create(CONFIG_MAPS, "default", BODY)
    assert len(cluster.requests) == 4
    assert cluster.names(CONFIG_MAPS) == ["a"]


@in_virtual_time
async def test_retry_after_is_honoured() -> None:
    cluster = FakeApiServer()
    cluster.add(CONFIG_MAPS, BODY)
    cluster.faults.append(fail_first(1, http_error(429, "TooManyRequests", retry_after="7")))
    started = asyncio.get_running_loop().time()
    await Api(cluster).get(CONFIG_MAPS, "default", "a")
    assert (asyncio.get_running_loop().time() - started) == pytest.approx(7, abs=0.01)


@in_virtual_time
async def test_a_request_fails_after_its_attempts() -> None:
    cluster = FakeApiServer()
    cluster.down = True
    with pytest.raises(errors.UnavailableError):
        await Api(cluster).get(CONFIG_MAPS, "default", "a")
    assert len(cluster.requests) == ATTEMPTS


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "BadRequest", errors.InvalidError),
        (401, "Unauthorized", errors.UnauthorizedError),
        (403, "Forbidden", errors.ForbiddenError),
        (404, "NotFound", errors.NotFoundError),
        (409, "Conflict", errors.ConflictError),
        (409, "AlreadyExists", errors.AlreadyExistsError),
        (410, "Expired", errors.ExpiredError),
        (422, "Invalid", errors.InvalidError),
    ],
)
@in_virtual_time
async def test_other_refusals_are_raised_at_once_with_the_servers_message(
    status: int, reason: str, kind: type[errors.ApiError]
) -> None:
    cluster = FakeApiServer()
    cluster.faults.append(lambda *_: http_error(status, reason, "the server's sentence"))
    with pytest.raises(kind, match="the server's sentence"):
        await Api(cluster).get(CONFIG_MAPS, "default", "a")
    assert len(cluster.requests) == 1


@in_virtual_time
async def test_a_response_that_is_not_json_is_an_error_with_its_status() -> None:
    cluster = FakeApiServer()
    cluster.faults.append(lambda *_: HttpResponse(502, {}, b"<html>bad gateway</html>"))
    with pytest.raises(errors.UnavailableError, match=r"HTTP 502.*bad gateway"):
        await Api(cluster).get(CONFIG_MAPS, "default", "a", attempts=1)


@in_virtual_time
async def test_paths_and_bodies_are_those_of_the_kubernetes_api() -> None:
    assert JOBS.build_path() == "/apis/trainium.dev/v1alpha1/trainingjobs"
    assert JOBS.build_path("ns", "a", "status") == "/apis/trainium.dev/v1alpha1/namespaces/ns/trainingjobs/a/status"
    assert PODS.build_path("ns", "a") == "/api/v1/namespaces/ns/pods/a"
    assert LEASES.api_version == "coordination.k8s.io/v1"

    cluster = FakeApiServer()
    cluster.add(PODS, {"metadata": {"name": "a"}})
    api = Api(cluster)
    await api.apply(CONFIG_MAPS, "ns", "b", {"data": {"k": "v"}})
    await api.delete(PODS, "default", "a", uid="uid-1", grace_seconds=0)
    applied, deleted = cluster.writes
    assert applied.body == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "b", "namespace": "ns"},
        "data": {"k": "v"},
    }
    assert deleted.body == {
        "propagationPolicy": "Background",
        "preconditions": {"uid": "uid-1"},
        "gracePeriodSeconds": 0,
    }
    assert json.dumps(deleted.body)
