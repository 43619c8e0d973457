"""What agents say is taken, and answered.

Invariants: a message counts for the pod whose token was shown and for no other; whatever is refused is refused in one
sentence.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_contract.wire.messages import HeartbeatRequest, HeartbeatResponse, RegisterRequest, RegisterResponse
from trainium_operator.coordinator.reading import read_message
from trainium_operator.coordinator.state import FutureGenerationError, NotRegisteredError, OldGenerationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.coordinator.authentication import Authenticator, Caller
    from trainium_operator.coordinator.state import CoordinatorState
    from trainium_operator.plan.model.names import JobId

logger = logging.getLogger(__name__)
LARGEST_WELCOME = 64
"""Members of a membership that the answer to a registration carries; a larger one comes by itself, packed."""


class BadMessageError(Exception):
    """The request cannot be read."""


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a message was not taken."""

    status: int
    sentence: str
    generation: int | None = None


class Hearing:
    """Messages into the state; tells the plan what is worth a look."""

    def __init__(
        self,
        state: CoordinatorState,
        authenticator: Authenticator,
        *,
        notify: Callable[[str, str, bool], None],
        on_news: Callable[[HeartbeatRequest, HeartbeatRequest], None],
        heartbeat_seconds: float,
    ) -> None:
        """See CoordinatorServer."""
        self.state = state
        self._authenticator = authenticator
        self._notify = notify
        self._on_news = on_news
        self._heartbeat_seconds = heartbeat_seconds

    def register(self, caller: Caller, body: bytes) -> tuple[JobId, RegisterResponse]:
        """An agent introduces itself. Raises what `objection` knows."""
        message = read_message(RegisterRequest, body)
        job_id = self._job_of(caller, message)
        if self.state.register(job_id, message):
            about = {"namespace": message.namespace, "job": message.job, "node": message.node_name}
            logger.info("%s registered", message.pod_name, extra={**about, "pod": message.pod_name})
            self._notify(message.namespace, message.job, True)
        membership = self.state.membership(job_id)
        answer = RegisterResponse(
            heartbeat_seconds=self._heartbeat_seconds,
            membership=membership if membership and len(membership.members) <= LARGEST_WELCOME else None,
            time=time.time(),
        )
        return job_id, answer

    def heartbeat(self, caller: Caller, body: bytes) -> HeartbeatResponse:
        """What an agent does. Raises what `objection` knows."""
        message = read_message(HeartbeatRequest, body)
        job_id = self._job_of(caller, message)
        taken = self.state.heartbeat(job_id, message)
        if taken.matters and taken.before is not None:
            self._on_news(taken.before, message)
        if taken.matters or taken.progressed:
            self._notify(message.namespace, message.job, taken.matters)
        return HeartbeatResponse(
            generation=self.state.published(job_id),
            full_heartbeat_seconds=self.state.full_heartbeat_seconds(job_id),
            time=time.time(),
        )

    def _job_of(self, caller: Caller, message: RegisterRequest | HeartbeatRequest) -> JobId:
        return self._authenticator.check(
            caller,
            namespace=message.namespace,
            job=message.job,
            pod_name=message.pod_name,
            pod_uid=message.pod_uid,
        )


def objection(error: Exception) -> Objection | None:
    """What its sender is told; None for what is not about the message."""
    match error:
        case ValidationError() | BadMessageError():
            return Objection(400, _sentence(error))
        case NotRegisteredError():
            return Objection(404, "this agent has not registered with this coordinator; register first")
        case FutureGenerationError():
            return Objection(400, str(error))
        case OldGenerationError():
            return Objection(409, str(error), generation=error.current)
        case _:
            return None


def _sentence(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"the message is not valid: {where or 'body'}: {first['msg']}"[:1024]
