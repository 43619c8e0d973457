"""The coordinator believes only a pod about itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.patience import patient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CALL = """
import json, os, random, socket, ssl, sys, time, urllib.error, urllib.request
addresses_of = socket.getaddrinfo
def in_any_order(*arguments, **options):
    found = addresses_of(*arguments, **options)
    return random.sample(found, len(found))
socket.getaddrinfo = in_any_order  # the name may have the addresses of all replicas, of which urllib takes the first
LIMIT, path, change = float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
own = os.environ.get("TRAINIUM_TOKEN_PATH", "/var/run/secrets/trainium.dev/token")
token = sys.argv[4] if len(sys.argv) > 4 else open(own).read()
body = {"protocol": 2, "namespace": os.environ["TRAINIUM_NAMESPACE"], "job": os.environ["TRAINIUM_JOB"],
        "podName": os.environ["TRAINIUM_POD_NAME"], "podUid": os.environ["TRAINIUM_POD_UID"], **change}
context = ssl.create_default_context(cafile=os.environ.get("TRAINIUM_CA_PATH", "/etc/trainium/ca.crt"))
request = urllib.request.Request("https://" + os.environ["TRAINIUM_COORDINATOR"] + path, json.dumps(body).encode(),
                                 {"Authorization": "Bearer " + token, "Content-Type": "application/json"})
def call():
    try:
        with urllib.request.urlopen(request, context=context, timeout=LIMIT) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
deadline = time.monotonic() + LIMIT * 3
# The name leads to any replica, and one that does not lead says so: try again with a new connection, as agents do.
while (answer := call())[0] == 503 and time.monotonic() < deadline:
    time.sleep(0.05)
print(json.dumps(answer))
"""


def call(job: Job, path: str, change: dict[str, Any], *token: str) -> tuple[int, dict[str, Any]]:
    """One request to the coordinator from inside a worker pod, with its own token or another."""
    pod = job.members()[0]["podName"]
    status, body = json.loads(job.inside(pod, "python", "-c", CALL, str(patient(10)), path, json.dumps(change), *token))
    return status, body


@pytest.mark.long
def test_a_token_of_another_job_or_for_another_audience_is_refused(new_job: Callable[..., Job]) -> None:
    change = "workers: {replicas: 1}\ntrainer: {steps: 5000}"
    mine, other = new_job("mine", change), new_job("other", change)
    mine.until_step(1)
    other.until_step(1)
    member = other.members()[0]
    theirs = {"job": "other", "podName": member["podName"], "podUid": member["podUid"]}
    beat = {"generation": 1, "phase": "Training", **theirs}

    status, body = call(mine, "/v1/heartbeat", beat)

    assert status == 403, body
    assert body["error"]

    token = mine.site.kubectl("create", "token", "default", "-n", mine.namespace).strip()
    status, _ = call(mine, "/v1/heartbeat", {"generation": 1, "phase": "Training"}, token)

    assert status == 401


@pytest.mark.long
def test_a_heartbeat_of_an_old_generation_is_refused_and_told_the_current_one(new_job: Callable[..., Job]) -> None:
    # The job must begin with both nodes, however slowly the second one starts.
    change = "workers: {replicas: 2, minReplicas: 1}\ntrainer: {steps: 5000}\nrecovery: {rescaleAfterSeconds: 60}"
    job = new_job(change=change)
    job.until_step(1)
    job.scale(1)
    job.until_recovered()
    current = job.status()["membership"]["generation"]

    status, body = call(job, "/v1/heartbeat", {"generation": current - 1, "phase": "Training"})

    assert status == 409, body
    assert body["generation"] == current
