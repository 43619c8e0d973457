"""Handle the messages of agents.

Guarantees:
- A message counts for the pod whose token opened the stream and for no other.
- Every refusal is one sentence.
- A newer agent's message is read as far as possible: the models ignore unknown fields, and an unknown value of an
  enumeration (a cause, a check, an alert) removes the smallest optional part with it, never the heartbeat. Anything
  else that is invalid is an error.
"""

from __future__ import annotations

import logging
import time
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from trainium_contract.stored_json import optional_part, remove_places
from trainium_contract.wire.messages import HeartbeatRequest, HeartbeatResponse, RegisterRequest, RegisterResponse
from trainium_operator.coordinator.state import FutureGenerationError, NotRegisteredError, OldGenerationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.base import MessageModel
    from trainium_operator.coordinator.authentication import Authenticator, Caller
    from trainium_operator.coordinator.state import CoordinatorState
    from trainium_operator.plan.model.names import JobId

logger = logging.getLogger(__name__)
_M = TypeVar("_M", bound="MessageModel")
_Place = tuple[str | int, ...]
_ROUNDS = 4
LARGEST_INLINE_MEMBERSHIP = 64
"""Members of a membership that the answer to a registration contains; a larger one is sent separately, compressed."""


class BadMessageError(Exception):
    """The request cannot be parsed."""


@dataclass(frozen=True, slots=True)
class MessageError:
    """The answer to a message that is refused."""

    status: int
    sentence: str
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class MessageHandler:
    """Applies messages to the state and notifies the plan of what matters; see CoordinatorServer."""

    state: CoordinatorState
    authenticator: Authenticator
    _: KW_ONLY
    notify: Callable[[str, str, bool], None]
    on_news: Callable[[HeartbeatRequest, HeartbeatRequest], None]
    heartbeat_seconds: float

    def register(self, caller: Caller, body: bytes) -> tuple[JobId, RegisterResponse]:
        """Register an agent. Raises the errors of `message_error`."""
        message = read_message(RegisterRequest, body)
        job_id = self._job_of(caller, message)
        if self.state.register(job_id, message):
            about = {"namespace": message.namespace, "job": message.job, "node": message.node_name}
            logger.info("%s registered", message.pod_name, extra={**about, "pod": message.pod_name})
            self.notify(message.namespace, message.job, True)
        membership = self.state.membership(job_id)
        answer = RegisterResponse(
            heartbeat_seconds=self.heartbeat_seconds,
            membership=membership if membership and len(membership.members) <= LARGEST_INLINE_MEMBERSHIP else None,
            time=time.time(),
        )
        return job_id, answer

    def heartbeat(self, caller: Caller, body: bytes) -> HeartbeatResponse:
        """Apply a heartbeat. Raises the errors of `message_error`."""
        message = read_message(HeartbeatRequest, body)
        job_id = self._job_of(caller, message)
        accepted = self.state.heartbeat(job_id, message)
        if accepted.matters and accepted.before is not None:
            self.on_news(accepted.before, message)
        if accepted.matters or accepted.progressed:
            self.notify(message.namespace, message.job, accepted.matters)
        return HeartbeatResponse(
            generation=self.state.published(job_id),
            full_heartbeat_seconds=self.state.full_heartbeat_seconds(job_id),
            time=time.time(),
        )

    def _job_of(self, caller: Caller, message: RegisterRequest | HeartbeatRequest) -> JobId:
        return self.authenticator.check(
            caller,
            namespace=message.namespace,
            job=message.job,
            pod_name=message.pod_name,
            pod_uid=message.pod_uid,
        )


def message_error(error: Exception) -> MessageError | None:
    """Return the answer to an error; None if the message did not cause it."""
    match error:
        case ValidationError() | BadMessageError():
            return MessageError(400, _sentence(error))
        case NotRegisteredError():
            return MessageError(404, "this agent has not registered with this coordinator; register first")
        case FutureGenerationError():
            return MessageError(400, str(error))
        case OldGenerationError():
            return MessageError(409, str(error), generation=error.current)
        case _:
            return None


def _sentence(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"the message is not valid: {where or 'body'}: {first['msg']}"[:1024]


def read_message(model: type[_M], body: bytes) -> _M:
    """Return the message, reduced to what is kept. Raises ValidationError."""
    try:
        return model.model_validate_json(body).lean()
    except ValidationError as error:
        first = last = error
    raw, left_out = None, set[_Place]()
    for _ in range(_ROUNDS):
        places = _places_to_leave_out(last, left_out)
        if not places:
            break
        raw = from_json(body) if raw is None else raw
        remove_places(raw, places)
        left_out |= places
        try:
            return model.model_validate_json(to_json(raw)).lean()
        except ValidationError as error:
            last = error
    raise first


def _places_to_leave_out(error: ValidationError, left_out: set[_Place]) -> set[_Place]:
    """Return the parts to leave out; none when anything else is invalid."""
    places = set()
    for each in error.errors(include_url=False, include_input=False):
        place = each["loc"]
        if each["type"] == "missing" and place in left_out and len(place) > 1:
            places.add(place[:-1])  # it is required, so the part that contains it is left out
        elif each["type"] == "enum":
            places.add(optional_part(place))
        else:
            return set()
    return places
