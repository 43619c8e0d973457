"""Build memberships, and a fake of the store that the agents of a generation share."""

from collections.abc import Callable
from typing import Any

from tests.testing.operator.wire_messages import member, membership
from trainium_agent.exits.restart_policy import GenerationState
from trainium_contract.wire.messages import Membership


def build_membership(port: int = 1, *, nodes: int = 2, generation: int = 1, uid: str = "uid") -> Membership:
    address = {"pod_ip": "127.0.0.1", "rendezvous_port": port}
    members = (
        member(f"job-w-{rank}", pod_uid=f"{uid}-{rank}", node_name=f"node-{rank}", **address) for rank in range(nodes)
    )
    return membership(generation, *members)


class FakeGenerationStore:
    """A store of a generation in memory: values, counters and the shared state."""

    def __init__(self, **state: Any) -> None:
        self._state = GenerationState(**state)
        self.values: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def update_state(self, next_state: Callable[[GenerationState], GenerationState]) -> GenerationState:
        self._state = next_state(self._state)
        return self._state

    def read_state(self) -> GenerationState:
        return self._state

    def format_key(self, attempt: int, *parts: object) -> str:
        return "/".join(map(str, (attempt, *parts)))

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def has(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def count(self, key: str, increment: int = 0) -> int:
        self.counts[key] = self.counts.get(key, 0) + increment
        return self.counts[key]
