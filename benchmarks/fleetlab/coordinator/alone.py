"""The coordinator without a cluster: its server, state, authenticator and TLS, where the API server's part is played.

A process of its own, as the operator is. It takes its options as JSON (`host`, `port`, `certificate`, `key`: paths;
`jobs`, `agents`: how many of each job), says `ready` on standard output when it listens, and ends with its standard
input. Every token is good, and reviewed again as often as the operator would; memberships are those of the jobs.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from typing import Any

from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import Member, Membership, Transition
from trainium_contract.wire.worker_env import TOKEN_AUDIENCE
from trainium_operator.coordinator.authentication import Authenticator
from trainium_operator.coordinator.probe import Prober
from trainium_operator.coordinator.server import CoordinatorServer
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.memory import settle, tidy, use_little_memory_per_connection, use_one_heap
from trainium_operator.plan.model.job_id import JobId

NAMESPACE = "default"


def job_name(number: int) -> str:
    """Of one of the jobs."""
    return f"fleet-{number}"


def pod_name(job: int, number: int) -> str:
    """Of one worker; it is its uid and, with an x for each character that a token has more, its token too."""
    return f"{job_name(job)}-w-{number}"


class World:
    """What the API server would say."""

    def __init__(self, jobs: int) -> None:
        self._jobs = [JobId(NAMESPACE, job_name(number), f"uid-{number}") for number in range(jobs)]

    def job_of(self, _namespace: str, pod_name: str, _pod_uid: str) -> JobId | None:
        """See PodDirectory."""
        return self._jobs[int(pod_name.split("-")[1])]

    async def review(self, spec: dict[str, Any]) -> dict[str, Any]:
        """A TokenReview's status."""
        pod = spec["token"].rstrip("x")
        extra = {"authentication.kubernetes.io/pod-name": [pod], "authentication.kubernetes.io/pod-uid": [pod]}
        user = {"username": f"system:serviceaccount:{NAMESPACE}:default", "extra": extra}
        return {"authenticated": True, "audiences": [TOKEN_AUDIENCE], "user": user}

    def memberships(self, agents: int) -> list[tuple[JobId, Membership]]:
        """Of all jobs: each has all of its pods."""
        return [(job, _membership(number, agents)) for number, job in enumerate(self._jobs)]


def _membership(job: int, agents: int) -> Membership:
    members = tuple(
        Member(
            pod_uid=pod_name(job, rank),
            pod_name=pod_name(job, rank),
            pod_ip=f"10.{job}.{rank >> 8}.{rank & 255}",
            node_name=f"node-{job}-{rank}",
            node_rank=rank,
            rendezvous_port=29500,
        )
        for rank in range(agents)
    )
    return Membership(
        generation=1, transition=Transition.IMMEDIATE, cause=Cause.RESIZE, members=members, processes_per_node=32
    )


async def _serve(options: dict[str, Any]) -> None:
    use_one_heap()
    use_little_memory_per_connection()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    context.load_cert_chain(options["certificate"], options["key"])
    world = World(options["jobs"])
    state = CoordinatorState(time.time)
    server = CoordinatorServer(
        state,
        Authenticator(world.review, world, wall_clock=time.time),
        is_serving=lambda: True,
        notify=lambda *_: None,
    )
    for job, membership in world.memberships(options["agents"]):
        state.publish(job, membership)
    await server.start(options["host"], int(options["port"]), context)
    # The ports of these agents are nobody's, so they are not asked; who falls silent is looked for all the same.
    prober = Prober(state, is_serving=lambda: True, notify=lambda *_: None, address_of=lambda _doubt: "")
    running = (asyncio.create_task(prober.run()), asyncio.create_task(tidy()))
    settle()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in running:
        task.cancel()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
