"""Checks of every result: it has its declared type, it can be serialized, and it is bounded."""

import dataclasses
import json
import logging
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

from pydantic import BaseModel

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.wire.messages import HeartbeatRequest
from trainium_operator.cluster.cache.membership_record import MembershipRecord
from trainium_operator.plan.model import observed as _observed
from trainium_operator.plan.model.actions import CreatePod, Plan

LONGEST_LINE = 8 << 10
"""Characters of a line of the log."""
LARGEST_STATUS = 96 << 10
"""Bytes of a status as JSON: every list and text at its bound."""
LARGEST_MANIFEST = 1 << 20
"""Bytes that the API server accepts of a ConfigMap."""
MOST_EVENTS = 64
"""Limit of one plan, besides one for each pod."""
LONGEST_NOTE = 1000
_INT64 = 1 << 63
CHECKED_PODS = 2
"""Number of pods that are checked at each end of a plan; all have one template."""
MOST_ACTIONS = 32
"""Limit of one plan, besides two for each pod that exists or may be created."""


class InvariantError(AssertionError):
    """A result breaks an invariant."""


def require(is_met: bool, message: str) -> None:
    """Raise InvariantError with this message unless the condition is met."""
    if not is_met:
        raise InvariantError(message)


def check_type(value: Any) -> None:
    """Check that every field of a view, at any depth, has its annotated type. Raises InvariantError."""
    _check(value, type(value), type(value).__name__)


def check_plan(plan: Plan, pods: int) -> None:
    """Check that a plan can be executed, with `pods` existing or possible worker pods. Raises InvariantError."""
    wire = plan.status.to_wire()
    text = json.dumps(wire, allow_nan=False)
    require(len(text) <= LARGEST_STATUS, f"a status of {len(text)} bytes")
    TrainingJobStatus.model_validate(wire)
    _fits_64_bits(wire, "status")
    require(len(plan.actions) <= MOST_ACTIONS + 2 * pods, f"{len(plan.actions)} actions for {pods} pods")
    require(len(plan.events) <= MOST_EVENTS + pods, f"{len(plan.events)} events for {pods} pods")
    for event in plan.events:
        require(len(event.note) <= LONGEST_NOTE, f"an event of {len(event.note)} characters")
    others = [action for action in plan.actions if not isinstance(action, CreatePod)]
    new = [action for action in plan.actions if isinstance(action, CreatePod)]
    for action in (*others, *new[:CHECKED_PODS], *new[-CHECKED_PODS:]):
        manifest = getattr(action, "manifest", None)
        if manifest is not None:
            size = len(json.dumps(manifest, allow_nan=False))
            require(size <= LARGEST_MANIFEST, f"a {manifest['kind']} of {size} bytes")
    delay = plan.requeue_after
    require(delay is None or (math.isfinite(delay) and delay >= 0), f"requeues after {delay} s")


def _fits_64_bits(value: Any, where: str) -> None:
    """Check that all integers have 64 bits, as the API server requires."""
    match value:
        case dict():
            for key, inner in value.items():
                _fits_64_bits(inner, f"{where}.{key}")
        case list():
            for inner in value:
                _fits_64_bits(inner, f"{where}[]")
        case int():
            require(-_INT64 <= value < _INT64, f"{where} is a number of more than 64 bits")
        case _:
            pass


class LogChecker(logging.Handler):
    """Check log records: only loggers in `expected` may log an error, and every line is bounded."""

    def __init__(self, expected: frozenset[str]) -> None:
        super().__init__(logging.DEBUG)
        self._expected = expected
        self._errors: list[tuple[str, BaseException | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        line = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if len(line) > LONGEST_LINE:
            self._errors.append((f"{record.name} logs a line of {len(line)} characters", None))
        if record.levelno >= logging.ERROR and record.name not in self._expected:
            self._errors.append((f"{record.name} logs an error: {record.msg}", error))

    def check(self) -> None:
        """Clear the records. Raises InvariantError for the first unexpected one."""
        errors, self._errors = self._errors, []
        for sentence, error in errors:
            raise InvariantError(sentence) from error


def _check(value: Any, wanted: Any, where: str) -> None:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any or isinstance(value, BaseModel):
        return
    if origin in (types.UnionType, typing.Union):
        _check_any(value, arguments, where)
    elif origin is tuple:
        require(type(value) is tuple, f"{where} is {type(value).__name__}, no tuple")
        is_variadic = len(arguments) == 2 and arguments[1] is Ellipsis
        require(is_variadic or len(value) == len(arguments), f"{where} has {len(value)} entries")
        for inner, kind in zip(value, arguments[:1] * len(value) if is_variadic else arguments, strict=True):
            _check(inner, kind, where)
    elif origin is frozenset:
        require(type(value) is frozenset, f"{where} is {type(value).__name__}, no frozenset")
        for inner in value:
            _check(inner, arguments[0], where)
    elif origin in (dict, Mapping):
        require(isinstance(value, dict), f"{where} is {type(value).__name__}, no mapping")
        for key, inner in value.items():
            _check(key, arguments[0], where)
            _check(inner, arguments[1], where)
    elif wanted is float:
        require(type(value) in (int, float) and math.isfinite(value), f"{where} is no finite number")
    elif isinstance(wanted, type) and issubclass(wanted, Enum):
        require(isinstance(value, wanted), f"{where} is no {wanted.__name__}")
    else:
        require(type(value) is wanted, f"{where} is {type(value).__name__}, no {wanted.__name__}")
        if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
            for name, kind in _fields(wanted).items():
                _check(getattr(value, name), kind, f"{where}.{name}")


def _check_any(value: Any, choices: tuple[Any, ...], where: str) -> None:
    if value is None:
        require(type(None) in choices, f"{where} is None")
        return
    errors = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            _check(value, choice, where)
        except InvariantError as error:
            errors.append(str(error))
        else:
            return
    raise InvariantError(errors[0])


@cache
def _fields(view: type) -> dict[str, Any]:
    models = (TrainingJobSpec, TrainingJobStatus, MembershipRecord, HeartbeatRequest)
    known = {**vars(_observed), "Mapping": Mapping, **{model.__name__: model for model in models}}
    return typing.get_type_hints(view, localns=known)
