"""Messages between the coordinator and agents, with defaults for what a test does not care about."""

from typing import Any

from trainium_contract.faults.causes import Cause
from trainium_contract.wire import messages


def member(pod: str = "w-0", **changes: Any) -> messages.Member:
    defaults = {"pod_uid": f"uid-{pod}", "pod_ip": "127.0.0.2", "node_name": "n", "rendezvous_port": 29500}
    return messages.Member(**{"pod_name": pod, "node_rank": 0, **defaults, **changes})


def membership(generation: int, *members: messages.Member, **changes: Any) -> messages.Membership:
    """Return a membership of these members, whose ranks follow their order."""
    ranked = tuple(member.model_copy(update={"node_rank": rank}) for rank, member in enumerate(members))
    defaults = {"transition": messages.Transition.IMMEDIATE, "cause": Cause.RESIZE, "processes_per_node": 1}
    return messages.Membership(generation=generation, members=ranked, **{**defaults, **changes})


def registration(member: messages.Member, namespace: str = "ns", job: str = "j") -> messages.RegisterRequest:
    identity = member.model_dump(include={"pod_name", "pod_uid", "pod_ip", "node_name", "rendezvous_port"})
    return messages.RegisterRequest(namespace=namespace, job=job, agent_version="1", **identity)


def process_failure(exit_code: int = 139, **changes: Any) -> messages.ProcessFailure:
    """Return the first failure of rank 0 in the first attempt of generation 1."""
    defaults = {"sequence": 0, "generation": 1, "attempt": 0, "rank": 0, "message": "boom", "at": 0.0}
    return messages.ProcessFailure(exit_code=exit_code, **{**defaults, **changes})


def heartbeat(pod: str = "w-0", **changes: Any) -> messages.HeartbeatRequest:
    defaults = {"namespace": "ns", "job": "j", "pod_name": pod, "pod_uid": f"uid-{pod}", "generation": 1}
    return messages.HeartbeatRequest(**{"phase": messages.WorkerPhase.TRAINING, **defaults, **changes})
