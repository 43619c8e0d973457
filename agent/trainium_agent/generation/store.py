"""Hold the state that the agents of one generation share: a TCPStore in the agent of node rank 0.

Every agent hosts one such server for the life of its pod, on the port that it reserved at its start; a generation uses
the server of its node rank 0, with its number in front of every key. The ranks have a separate store, fresh for
each attempt, so that nothing of an earlier attempt can be read by accident.

Guarantees:
- A value that is read was signed by an agent of the generation. The key follows from the membership: the uids of its
  pods are random and known only to those who may read pods in the namespace. It is on no command line and in no log.
- The shared state changes only by compare-and-set.
- No call blocks longer than `OPERATION_SECONDS`; every failure to reach the server is StoreLostError.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # documented, not in __all__

from trainium_agent.exits.restart_policy import GenerationState
from trainium_contract.wire.messages import WorkerPhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.wire.messages import Membership

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
OPERATION_SECONDS = 5.0
_HURRIED_SECONDS = 2.0
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 1.0
_RANK_STORE_SECONDS = 300.0
_BACKLOG = 1024


class StoreLostError(ConnectionError):
    """The agent that hosts the store cannot be reached."""


class _Line:
    """Makes the blocking calls on one connection in a separate thread, which is abandoned when one never returns.

    The library's time-outs do not hold when the server's host hangs: it then waits, without any, for the server to
    confirm that it gave up waiting.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_carry_out, args=(self._calls,), name="store-calls", daemon=True).start()

    def __del__(self) -> None:
        self._calls.put(None)

    def call(self, operation: Callable[[], _T], patience: Callable[[], float]) -> _T:
        """Return the operation's result. Raises StoreLostError when it fails or takes longer than `patience`."""
        results: list[_T] = []
        failures: list[Exception] = []
        ended = threading.Event()

        def carry() -> None:
            try:
                results.append(operation())
            except Exception as error:  # noqa: BLE001 - it is raised in the thread that asked
                failures.append(error.with_traceback(None))
            ended.set()

        self._calls.put(carry)
        began = time.monotonic()
        while not ended.wait(_POLL_SECONDS):
            if time.monotonic() - began > patience():
                raise StoreLostError("the host of the generation's store does not answer")
        if not failures:
            return results[0]
        # Taken out, and dropped at the end: an error that a frame of its traceback holds keeps itself, and the
        # connection with it, until the collector comes by, which in a quiet agent is hours later.
        failure = failures.pop()
        try:
            if isinstance(failure, (RuntimeError, OSError)):
                raise StoreLostError(str(failure).partition("\n")[0]) from failure
            raise failure
        finally:
            del failure


def _carry_out(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Knows the queue alone, so that a line that nobody holds any more ends its thread."""
    while (call := calls.get()) is not None:
        call()
        del call


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
    """Start a store for the ranks of one attempt."""
    return serve_store(address, seconds=_RANK_STORE_SECONDS)


class GenerationStore:
    """One agent's connection to its generation's store; each thread that uses it wants its own."""

    def __init__(self, membership: Membership, hurried: Callable[[], bool] = lambda: False) -> None:
        """`hurried()`: something else waits, so a server that does not answer is given up sooner."""
        host = membership.members[0]
        self._address = (host.pod_ip, host.rendezvous_port)
        self._prefix = f"generation/{membership.generation}"
        self._signer = ValueSigner(membership)
        self._hurried = hurried
        self._complained = False
        self._client: TCPStore | None = None
        self._line: _Line | None = None

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
        self._client = self._on_line(self._open)

    def close(self) -> None:
        """Close the connection at once, even while this object is referenced: the server counts it until then."""
        self._client = None
        self._line = None

    def _open(self) -> TCPStore:
        # The library's own client retries with long back-offs and prints a stack trace each time.
        socket.create_connection(self._address, timeout=_CONNECT_SECONDS).close()
        host, port = self._address
        return TCPStore(host, port, None, False, timedelta(seconds=OPERATION_SECONDS), wait_for_workers=False)

    def key(self, *parts: object) -> str:
        """Return a key of this generation."""
        return "/".join([self._prefix, *(str(part) for part in parts)])

    def has(self, *keys: str) -> bool:
        """Return whether all keys exist."""
        return self._ask(lambda client: bool(client.check([*keys])))

    def set(self, key: str, value: str = "1") -> None:
        """Write a key."""
        signed = self._signer.sign(key, value)
        self._ask(lambda client: client.set(key, signed))

    def get(self, key: str) -> str:
        """Read a key that exists (waits for it otherwise)."""
        return self._opened(key, self._stored(key))

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter; its value afterwards."""
        return self._ask(lambda client: int(client.add(key, amount)))

    def remove(self, key: str) -> None:
        """Forget a key, if it is there."""
        self._ask(lambda client: client.delete_key(key))

    def begin(self, state: GenerationState) -> None:
        """Create the shared state unless it exists."""
        key = self.key("state")
        signed = self._signer.sign(key, state.encode())
        self._ask(lambda client: client.compare_set(key, "", signed))

    def has_started(self) -> bool:
        """Return whether the shared state exists."""
        return self.has(self.key("state"))

    def state(self) -> GenerationState:
        """Return the shared state."""
        return GenerationState.decode(self.get(self.key("state")))

    def change(self, step: Callable[[GenerationState], GenerationState]) -> GenerationState:
        """Change the shared state by a pure function, which is called again when another agent was faster."""
        key = self.key("state")
        stored = self._stored(key)
        while True:
            seen = self._opened(key, stored)
            wanted = step(GenerationState.decode(seen)).encode()
            if wanted == seen:
                return GenerationState.decode(seen)
            found = self._swap(key, self._signer.sign(key, seen), self._signer.sign(key, wanted))
            if self._opened(key, found) == wanted:
                return GenerationState.decode(wanted)
            stored = found

    def _swap(self, key: str, seen: str, wanted: str) -> bytes:
        return self._ask(lambda client: client.compare_set(key, seen, wanted))

    def _stored(self, key: str) -> bytes:
        return self._ask(lambda client: client.get(key))

    def _opened(self, key: str, stored: bytes) -> str:
        try:
            return self._signer.verify(key, stored)
        except ForgedValueError as error:
            if not self._complained:
                self._complained = True
                _log.error("%s: somebody else reaches this port; it is not believed", error)
            raise StoreLostError(str(error)) from error

    def _ask(self, operation: Callable[[Store], _T]) -> _T:
        client = self.client
        try:
            return self._on_line(lambda: operation(client))
        except StoreLostError:
            self._client = None
            raise

    def _on_line(self, operation: Callable[[], _T]) -> _T:
        """Replace the line on which a call failed, because it may be stuck."""
        line = self._line or _Line()
        self._line = None
        result = line.call(operation, lambda: _HURRIED_SECONDS if self._hurried() else OPERATION_SECONDS)
        self._line = line
        return result


LONGEST_VALUE = 4 << 20
_SIGNATURE_CHARACTERS = 32


class ForgedValueError(Exception):
    """A value that no agent of this generation wrote."""


class ValueSigner:
    """Signs and verifies the values of one generation."""

    def __init__(self, membership: Membership) -> None:
        words = (str(membership.generation), *(member.pod_uid for member in membership.members))
        self._key = hashlib.sha256("\0".join(("trainium store", *words)).encode()).digest()

    def sign(self, name: str, value: str) -> str:
        """Return the value as it is stored under this name."""
        return self._sign(name, value) + value

    def verify(self, name: str, stored: bytes | str) -> str:
        """Return the value that is stored under this name. Raises ForgedValueError."""
        if len(stored) > LONGEST_VALUE:
            raise ForgedValueError(f"{name} in the generation's store is longer than anything that agents write")
        text = stored.decode("utf-8", "replace") if isinstance(stored, bytes) else stored
        signature, value = text[:_SIGNATURE_CHARACTERS], text[_SIGNATURE_CHARACTERS:]
        if not hmac.compare_digest(signature.encode(), self._sign(name, value).encode()):
            raise ForgedValueError(f"{name} in the generation's store was not written by an agent of this generation")
        return value

    def _sign(self, name: str, value: str) -> str:
        return hmac.new(self._key, f"{name}\0{value}".encode(), hashlib.sha256).hexdigest()[:_SIGNATURE_CHARACTERS]


_POLL_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0
_ORPHANED_SECONDS = 30.0


class ExitBarrier:
    """One agent's view of the roll; used by the generation's worker only."""

    def __init__(self, store: GenerationStore, node_rank: int, members: int) -> None:
        self._store = store
        self._node_rank = node_rank
        self._members = members
        self._seen_at = 0.0

    def sign(self, attempt: int, phase: WorkerPhase) -> None:
        """Record how the ranks of this pod ended."""
        self._seen_at = time.monotonic()
        store = self._store
        self._add(store.key(attempt, phase), 1)

    def all_signed(self, attempt: int) -> bool:
        """Return whether the ranks of all members have ended in peace."""
        return (
            sum(self._count(attempt, phase) for phase in (WorkerPhase.YIELDED, WorkerPhase.FINISHED)) >= self._members
        )

    def all_finished(self, attempt: int) -> bool:
        """Return whether every member has finished."""
        store = self._store
        if not store.connected:
            try:
                store.connect()
            except StoreLostError:
                # Node 0 leaves once all are finished; had it been lost, a newer generation would have come by now.
                return time.monotonic() > self._seen_at + _ORPHANED_SECONDS
        self._seen_at = time.monotonic()
        return self._count(attempt, WorkerPhase.FINISHED) == self._members

    def part(self) -> None:
        """Leave after all have finished."""
        key, others = self._store.key("left"), self._members - 1
        if self._node_rank != 0:
            self._add(key, 1)
            return
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < deadline and self._add(key, 0) < others:
            time.sleep(_POLL_SECONDS)

    def _count(self, attempt: int, phase: WorkerPhase) -> int:
        return self._add(self._store.key(attempt, phase), 0)

    def _add(self, key: str, amount: int) -> int:
        try:
            return self._store.count(key, amount)
        except StoreLostError:
            return 0
