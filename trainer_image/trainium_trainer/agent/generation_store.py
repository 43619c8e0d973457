"""The store that the agents of one generation share: a TCPStore in the agent of node rank 0.

Every agent hosts one such server for the life of its pod, on the port that it reserved at its start; a generation uses
the server of its node rank 0, with its number in front of every key. The ranks have a store of their own, fresh for
each attempt, so that nothing of an earlier attempt can be read by accident.

Invariants: the shared state changes only by compare-and-set; no call blocks longer than `OPERATION_SECONDS`; every
failure to reach the server is StoreLostError.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # documented, not in __all__

from trainium_trainer.agent.policy import GenerationState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainium_contract.messages import Membership

OPERATION_SECONDS = 5.0
_CONNECT_SECONDS = 1.0
_RANK_STORE_SECONDS = 300.0
_BACKLOG = 1024


class StoreLostError(ConnectionError):
    """The agent that hosts the store cannot be reached."""


@contextmanager
def _lost_on_error() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise StoreLostError(str(error).partition("\n")[0]) from error


def serve_store(address: str, port: int = 0, *, seconds: float = OPERATION_SECONDS) -> TCPStore:
    """Host a store on one address only; port 0 takes a free one (see its `port`).

    Raises OSError when the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        chosen = listener.getsockname()[1]
        return TCPStore(
            address,
            chosen,
            None,
            True,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def serve_rank_store(address: str) -> TCPStore:
    """A store for the ranks of one attempt."""
    return serve_store(address, seconds=_RANK_STORE_SECONDS)


class GenerationStore:
    """One agent's connection to its generation's store; each thread that uses it wants its own."""

    def __init__(self, membership: Membership) -> None:
        host = membership.members[0]
        self._address = (host.pod_ip, host.rendezvous_port)
        self._prefix = f"generation/{membership.generation}"
        self._client: TCPStore | None = None

    @property
    def connected(self) -> bool:
        """Whether a connection was made and not found broken since."""
        return self._client is not None

    @property
    def client(self) -> Store:
        """The store itself. Raises StoreLostError when not connected."""
        if self._client is None:
            raise StoreLostError("not connected to the generation's store")
        return self._client

    def connect(self) -> None:
        """Connect, once and quickly. Raises StoreLostError."""
        with _lost_on_error():
            # The library's own client retries with long back-offs and prints a stack trace each time.
            socket.create_connection(self._address, timeout=_CONNECT_SECONDS).close()
            self._client = TCPStore(
                self._address[0],
                self._address[1],
                None,
                False,
                timedelta(seconds=OPERATION_SECONDS),
                wait_for_workers=False,
            )

    def key(self, *parts: object) -> str:
        """A key of this generation."""
        return "/".join([self._prefix, *(str(part) for part in parts)])

    def has(self, *keys: str) -> bool:
        """Whether all keys exist."""
        with self._operation() as client:
            return bool(client.check([*keys]))

    def set(self, key: str, value: str = "1") -> None:
        """Write a key."""
        with self._operation() as client:
            client.set(key, value)

    def get(self, key: str) -> str:
        """Read a key that exists (waits for it otherwise)."""
        with self._operation() as client:
            return client.get(key).decode()

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter; its value afterwards."""
        with self._operation() as client:
            return int(client.add(key, amount))

    def begin(self, state: GenerationState) -> None:
        """Create the shared state unless it exists."""
        with self._operation() as client:
            client.compare_set(self.key("state"), "", state.encode())

    def begun(self) -> bool:
        """Whether the shared state exists."""
        return self.has(self.key("state"))

    def state(self) -> GenerationState:
        """The shared state."""
        return GenerationState.decode(self.get(self.key("state")))

    def change(self, step: Callable[[GenerationState], GenerationState]) -> GenerationState:
        """Change the shared state by a pure function, which is called again when another agent was faster."""
        key = self.key("state")
        seen = self.get(key)
        while True:
            wanted = step(GenerationState.decode(seen)).encode()
            if wanted == seen:
                return GenerationState.decode(seen)
            with self._operation() as client:
                found = client.compare_set(key, seen, wanted).decode()
            if found == wanted:
                return GenerationState.decode(found)
            seen = found

    @contextmanager
    def _operation(self) -> Iterator[Store]:
        client = self.client
        try:
            with _lost_on_error():
                yield client
        except StoreLostError:
            self._client = None
            raise


class StateWatcher:
    """Follows the shared state from a thread of its own and reports each change, and the loss of the store."""

    def __init__(
        self,
        membership: Membership,
        on_change: Callable[[GenerationState], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._store = GenerationStore(membership)
        self._on_change = on_change
        self._on_loss = on_loss
        self._stop = threading.Event()
        # All agents ask one server: at a thousand members each of them asks every 0.8 s, at sixty every 0.05 s.
        self._interval = max(0.05, len(membership.members) * 0.0008)
        self._thread = threading.Thread(target=self._run, name="state-watcher", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """End soon; does not wait for an operation that is under way."""
        self._stop.set()

    def _run(self) -> None:
        last: GenerationState | None = None
        lost = False
        while not self._stop.is_set():
            try:
                if not self._store.connected:
                    self._store.connect()
                    lost = False
                state = self._store.state()
            except StoreLostError:
                if not lost and not self._stop.is_set():
                    self._on_loss()
                lost = True
                self._stop.wait(1.0)
                continue
            if state != last and not self._stop.is_set():
                self._on_change(state)
                last = state
            self._stop.wait(self._interval)


def wait_seconds(deadline: float) -> float:
    """Seconds left until a monotonic deadline, not below zero."""
    return max(0.0, deadline - time.monotonic())
