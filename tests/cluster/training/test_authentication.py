"""The coordinator accepts messages of a pod only with its own token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.timeouts import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CALL = """
import json, os, random, socket, ssl, struct, sys, time
LIMIT, change = float(sys.argv[1]), json.loads(sys.argv[2])
own = os.environ.get("TRAINIUM_TOKEN_PATH", "/var/run/secrets/trainium.dev/token")
token = sys.argv[3] if len(sys.argv) > 3 else open(own).read()
us = {"protocol": 2, "namespace": os.environ["TRAINIUM_NAMESPACE"], "job": os.environ["TRAINIUM_JOB"],
      "podName": os.environ["TRAINIUM_POD_NAME"], "podUid": os.environ["TRAINIUM_POD_UID"], **change}
about = {"podIp": os.environ["POD_IP"], "nodeName": os.environ["TRAINIUM_NODE_NAME"], "rendezvousPort": 1,
         "agentVersion": "1"}
context = ssl.create_default_context(cafile=os.environ.get("TRAINIUM_CA_PATH", "/etc/trainium/ca.crt"))
host, _, port = os.environ["TRAINIUM_COORDINATOR"].partition(",")[0].rpartition(":")
REGISTER, REGISTERED, HEARTBEAT, HEARTBEAT_ACK, ERROR = 1, 2, 3, 4, 8
def exchange(stream, kind, body):
    data = json.dumps(body).encode()
    stream.write(struct.pack("!BI", kind, len(data)) + data)
    stream.flush()
    while True:
        kind, length = struct.unpack("!BI", stream.read(5))
        answer = stream.read(length)
        if kind in (REGISTERED, HEARTBEAT_ACK, ERROR):
            answer = json.loads(answer)
            return answer.get("status", 200), answer
def call(address):
    with context.wrap_socket(socket.create_connection(address[:2], LIMIT), server_hostname=host) as connection:
        stream = connection.makefile("rwb")
        head = f"GET /v1/stream?after=0&podUid={os.environ['TRAINIUM_POD_UID']} HTTP/1.1\\r\\nHost: {host}\\r\\n"
        head += f"Authorization: Bearer {token}\\r\\nConnection: Upgrade\\r\\nUpgrade: trainium-agent\\r\\n\\r\\n"
        stream.write(head.encode())
        stream.flush()
        status, length = int(stream.readline().split()[1]), 0
        while line := stream.readline().strip():
            key, _, value = line.lower().partition(b": ")
            length = int(value) if key == b"content-length" else length
        if status != 101:
            return status, json.loads(stream.read(length))
        status, answer = exchange(stream, REGISTER, {**us, **about})
        return (status, answer) if status != 200 else exchange(stream, HEARTBEAT, {"phase": "Training", **us})
deadline = time.monotonic() + LIMIT * 3
# The name has the addresses of all replicas, and one that does not lead answers 503.
while time.monotonic() < deadline:
    answer = call(random.choice(socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM))[4])
    if answer[0] != 503:
        break
    time.sleep(0.05)
print(json.dumps(answer))
"""


def call(job: Job, change: dict[str, Any], *token: str) -> tuple[int, dict[str, Any]]:
    """Register and send a heartbeat from a worker pod with its token or another; return the first refusal."""
    pod = job.list_members()[0]["podName"]
    status, body = json.loads(job.exec_in_pod(pod, "python", "-c", CALL, str(scaled(10)), json.dumps(change), *token))
    return status, body


@pytest.mark.long
def test_a_token_of_another_job_or_audience_is_refused(new_job: Callable[..., Job]) -> None:
    change = "workers: {replicas: 1}\ntrainer: {steps: 5000}"
    mine, other = new_job("mine", change), new_job("other", change)
    mine.wait_for_step(1)
    other.wait_for_step(1)
    member = other.list_members()[0]
    theirs = {"job": "other", "podName": member["podName"], "podUid": member["podUid"]}
    beat = {"generation": 1, **theirs}

    status, body = call(mine, beat)

    assert status == 403, body
    assert body["error"]

    token = mine.cluster.kubectl("create", "token", "default", "-n", mine.namespace).strip()
    status, _ = call(mine, {"generation": 1}, token)

    assert status == 401
