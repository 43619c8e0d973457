"""Hold the state that the agents of one generation share: a store in the agent of node rank 0.

Every agent runs one such server for the life of its pod, on the port that it reserved at its start. A generation uses
the server of its node rank 0 and prefixes every key with its number. The ranks have a separate store, a new one for
each attempt, so that no value of an earlier attempt can be read by accident.

Guarantees:
- Every value that is read was signed by an agent of the generation. The key is derived from the membership: the uids of
  its pods are random and known only to those who may read pods in the namespace. It appears in no command line and in
  no log.
- The shared state changes only by compare-and-set.
- No call blocks longer than `OPERATION_SECONDS`; every failure to reach the server raises StoreLostError.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import socket
import time
from typing import TYPE_CHECKING

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.shared_state.server import MAX_FRAME_BYTES, Answer, StoreClient
from trainium_contract.wire.messages import WorkerPhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.wire.messages import Membership

_log = logging.getLogger(__name__)
OPERATION_SECONDS = 5.0
_HURRIED_SECONDS = 2.0
_CONNECT_SECONDS = 1.0
_WAIT_SECONDS = 4.0
"""Seconds that `get` waits for a missing key; below `OPERATION_SECONDS`, so that the answer arrives in time."""


class StoreLostError(ConnectionError):
    """The agent that hosts the store cannot be reached."""


class GenerationStore:
    """A connection to the store of a generation; each thread needs its own."""

    def __init__(self, membership: Membership, hurried: Callable[[], bool] = lambda: False) -> None:
        """`hurried()`: something else waits, so a server that does not answer is abandoned sooner."""
        host = membership.members[0]
        self._address = (host.pod_ip, host.rendezvous_port)
        self._prefix = f"generation/{membership.generation}"
        self._signer = ValueSigner(membership)
        self._hurried = hurried
        self._logged_forgery = False
        self._client: StoreClient | None = None

    def connect(self) -> None:
        """Connect with one quick try, unless connected. Raises StoreLostError."""
        if self._client is not None:
            return
        try:
            self._client = StoreClient(socket.create_connection(self._address, timeout=_CONNECT_SECONDS))
        except OSError as error:
            raise StoreLostError(str(error)) from None

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def format_key(self, *parts: object) -> str:
        """Return a key of this generation."""
        return "/".join([self._prefix, *(str(part) for part in parts)])

    def has(self, *keys: str) -> bool:
        """Return whether all keys exist."""
        return bool(self._request("has", *keys))

    def set(self, key: str, value: str = "1") -> None:
        """Write a key."""
        self._request("set", key, self._signer.sign(key, value))

    def get(self, key: str) -> str:
        """Read a key; wait for it if it does not exist."""
        return self._verify(key, self._read(key))

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter and return its new value."""
        return int(self._request("add", key, amount) or 0)

    def remove(self, key: str) -> None:
        """Delete a key, if it exists."""
        self._request("delete", key)

    def create_state(self, state: GenerationState) -> None:
        """Create the shared state unless it exists."""
        key = self.format_key("state")
        self._request("swap", key, "", self._signer.sign(key, state.encode()))

    def has_state(self) -> bool:
        """Return whether the shared state exists."""
        return self.has(self.format_key("state"))

    def read_state(self) -> GenerationState:
        """Return the shared state."""
        return GenerationState.decode(self.get(self.format_key("state")))

    def update_state(self, step: Callable[[GenerationState], GenerationState]) -> GenerationState:
        """Change the shared state by a pure function, which is called again if another agent changed it first."""
        key = self.format_key("state")
        stored = self._read(key)
        while True:
            current = self._verify(key, stored)
            next_value = step(GenerationState.decode(current)).encode()
            if next_value == current:
                return GenerationState.decode(current)
            signed = self._signer.sign(key, next_value)
            stored = str(self._request("swap", key, self._signer.sign(key, current), signed))
            if self._verify(key, stored) == next_value:
                return GenerationState.decode(next_value)

    def _read(self, key: str) -> str:
        stored = self._request("get", key, _WAIT_SECONDS)
        if not isinstance(stored, str):
            self.close()
            raise StoreLostError(f"{key} was not written to the generation's store within {_WAIT_SECONDS:.0f} s")
        return stored

    def _verify(self, key: str, stored: str) -> str:
        try:
            return self._signer.verify(key, stored)
        except ForgedValueError as error:
            if not self._logged_forgery:
                self._logged_forgery = True
                _log.error("%s: a foreign process reaches this port; its value is rejected", error)
            raise StoreLostError(str(error)) from error

    def _request(self, *request: str | float) -> Answer:
        """Send a request to the server. Raises StoreLostError and closes the connection."""
        client = self._client
        if client is None:
            raise StoreLostError("not connected to the generation's store")
        started_at = time.monotonic()

        def remaining() -> float:
            return started_at + (_HURRIED_SECONDS if self._hurried() else OPERATION_SECONDS) - time.monotonic()

        try:
            return client.send(request, remaining)
        except (OSError, ValueError) as error:
            self.close()
            raise StoreLostError(str(error)) from None


MAX_VALUE_CHARACTERS = MAX_FRAME_BYTES - (1 << 20)
_SIGNATURE_CHARACTERS = 32


class ForgedValueError(Exception):
    """A value was not written by an agent of this generation."""


class ValueSigner:
    """Signs and verifies the values of one generation."""

    def __init__(self, membership: Membership) -> None:
        words = (str(membership.generation), *(member.pod_uid for member in membership.members))
        self._key = hashlib.sha256("\0".join(("trainium store", *words)).encode()).digest()

    def sign(self, name: str, value: str) -> str:
        """Return a value with its signature, as stored under this name."""
        return self._sign(name, value) + value

    def verify(self, name: str, stored: str) -> str:
        """Return the value of a text stored under this name. Raises ForgedValueError."""
        if len(stored) > MAX_VALUE_CHARACTERS:
            raise ForgedValueError(f"{name} in the generation's store is longer than anything that agents write")
        signature, value = stored[:_SIGNATURE_CHARACTERS], stored[_SIGNATURE_CHARACTERS:]
        if not hmac.compare_digest(signature.encode(), self._sign(name, value).encode()):
            raise ForgedValueError(f"{name} in the generation's store was not written by an agent of this generation")
        return value

    def _sign(self, name: str, value: str) -> str:
        return hmac.new(self._key, f"{name}\0{value}".encode(), hashlib.sha256).hexdigest()[:_SIGNATURE_CHARACTERS]


_POLL_SECONDS = 0.1
_LEAVE_SECONDS = 5.0
_ORPHANED_SECONDS = 30.0


class ExitBarrier:
    """Takes part in the exit barrier of a generation; used in the worker thread only."""

    def __init__(self, store: GenerationStore, node_rank: int, members: int) -> None:
        self._store = store
        self._node_rank = node_rank
        self._members = members
        self._seen_at = 0.0

    def enter(self, attempt: int, phase: WorkerPhase) -> None:
        """Record how the ranks of this pod ended."""
        self._seen_at = time.monotonic()
        self._add(self._store.format_key(attempt, phase), 1)

    def have_all_entered(self, attempt: int) -> bool:
        """Return whether the ranks of all members have ended without a failure."""
        return (
            sum(self._count(attempt, phase) for phase in (WorkerPhase.YIELDED, WorkerPhase.FINISHED)) >= self._members
        )

    def have_all_finished(self, attempt: int) -> bool:
        """Return whether every member has finished."""
        try:
            self._store.connect()
        except StoreLostError:
            # Node 0 leaves once all have finished; after a failure a newer generation would have started by now.
            return time.monotonic() > self._seen_at + _ORPHANED_SECONDS
        self._seen_at = time.monotonic()
        return self._count(attempt, WorkerPhase.FINISHED) == self._members

    def leave(self) -> None:
        """Leave after all have finished."""
        key, others = self._store.format_key("left"), self._members - 1
        if self._node_rank != 0:
            self._add(key, 1)
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < deadline and self._add(key, 0) < others:
            time.sleep(_POLL_SECONDS)

    def _count(self, attempt: int, phase: WorkerPhase) -> int:
        return self._add(self._store.format_key(attempt, phase), 0)

    def _add(self, key: str, amount: int) -> int:
        try:
            return self._store.count(key, amount)
        except StoreLostError:
            return 0
