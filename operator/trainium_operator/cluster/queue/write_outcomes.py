"""Record the outcome of writes that nothing waits for, and compare what the API server stored with what was requested.

A write is refused by a right that an older ClusterRole does not grant, a quota, a webhook, or another owner's object of
the same name. A policy or a webhook may store an object other than it was requested, and another client may change it
later. The plan sees each as a `WriteRefusal`.

Guarantees:
- One optional write takes `SECONDS` at most. Pauses between attempts grow up to `MAX_PAUSE_SECONDS`, and no other write
  waits for them.
- An error that a new plan can resolve (a conflict, an unavailable API server) is raised as for any write.
- An object that is stored other than requested counts as applied until it changes, so it is not written without end.
- An object that other clients change is written again, from the third time within `REVERTED_SECONDS` on with pauses.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.api_server.errors import ApiError, ChangedError, ConflictError, NotOursError, UnavailableError
from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE
from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.cluster.api.resources import PODS
from trainium_operator.cluster.cache.parts import as_mapping
from trainium_operator.cluster.cache.views import ChildRecord, compute_stored_digest
from trainium_operator.plan.model.names import ANNOTATION_CONTENT_HASH, ANNOTATION_EVALUATES, ANNOTATION_PART
from trainium_operator.plan.model.observed import WriteRefusal
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from trainium_contract.api_server.responses import Json
    from trainium_operator.plan.model.observed import JobView

SECONDS = 10.0
FIRST_PAUSE = 2.0
MAX_PAUSE_SECONDS = 300.0
REVERTED_SECONDS = 600.0
FREE_REVERSIONS = 1
REMEMBERED = 4_096
"""Jobs."""
MAX_PLACES = 32
"""Objects with fixed names of one job."""
_COMPARED = ("data", "binaryData", "spec")
_READ_ANNOTATIONS = (ANNOTATION_EVALUATES, ANNOTATION_PART)
"""Annotations without which the operator does not know an object."""
_MAX_VALUE_CHARACTERS = 80
MAX_REFUSAL_CHARACTERS = 1024
_REQUEST = re.compile(r'^(?:[A-Z]+ \S+: HTTP \d+: )?(?:\S+ "[^"]*" is (?:forbidden|invalid): )?')
"""The request and the object, which precede the reason itself."""


@dataclass(frozen=True, slots=True)
class _Applied:
    requested: str
    """Digest of the requested object."""
    stored: str
    """Digest of what the API server stored."""
    at: float
    is_as_requested: bool
    reversions: int = 0
    """Number of writes in a row after which another client changed it."""


@dataclass(frozen=True, slots=True)
class _Refused:
    refusal: WriteRefusal
    pause: float
    """Seconds before the next attempt."""


class WriteOutcomes:
    """Outcomes by job uid and place (`Kind/name`); times in Unix seconds of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused: BoundedDict[str, BoundedDict[str, _Refused]] = BoundedDict(REMEMBERED)
        self._applied: BoundedDict[str, BoundedDict[str, _Applied]] = BoundedDict(REMEMBERED)

    def list_refusals(self, job_uid: str) -> Mapping[str, WriteRefusal]:
        """Return which of the job's objects are not as requested, why, and when they may be written again."""
        places = self._refused.get(job_uid)
        return {} if places is None else {place: refused.refusal for place, refused in places.items()}

    async def write(self, place: str, job_uid: str, work: Awaitable[None]) -> None:
        """Run an optional write. Raises ConflictError and UnavailableError, which a new plan resolves."""
        try:
            async with asyncio.timeout(SECONDS) as budget:
                await work
        except TimeoutError:
            if not budget.expired():
                raise
            kind = place.partition("/")[0]
            self._refuse(place, job_uid, f"the API server did not take the {kind} within {SECONDS:.0f} s")
        except NotOursError as error:
            self._refuse(place, job_uid, str(error), name_in_use=True)
        except ConflictError:
            raise
        except ApiError as error:
            if isinstance(error, UnavailableError) and error.status not in (500, 504):  # webhooks answer with these
                raise
            self.record_refusal(place, job_uid, str(error))
        else:
            places = self._refused.get(job_uid)
            outcome = None if places is None else places.get(place)
            if outcome is not None and not outcome.refusal.requested:
                self.clear_refusal(place, job_uid)

    def record_refusal(self, place: str, job_uid: str, text: str) -> None:
        """Record why the API server refused a write; the object is written again after a pause."""
        self._refuse(place, job_uid, format_refusal(place.partition("/")[2], place, text))

    def find_requested(self, job: JobView, place: str, record: ChildRecord) -> str:
        """Return the digest of the request that led to the stored object; empty if another client has changed it.

        Of an object that an earlier process wrote it is the annotation's, unless the job's status has a changed object:
        then it is empty, so that the object is written once and compared again.
        """
        places = self._applied.get(job.uid)
        applied = None if places is None else places.get(place)
        if applied is None:
            is_suspect = any(condition.reason == Reason.OBJECT_CHANGED for condition in job.status.conditions)
            return "" if is_suspect else record.content_hash
        return applied.requested if applied.stored == record.stored else ""

    def record_applied(self, job_uid: str, manifest: Json, before: ChildRecord | None, stored: Json) -> None:
        """Compare the response to a write with its request; `before` is what was cached before the write."""
        place = f"{manifest['kind']}/{manifest['metadata']['name']}"
        requested, now = str(manifest["metadata"]["annotations"][ANNOTATION_CONTENT_HASH]), self._clock()
        places = self._applied.setdefault(job_uid, BoundedDict(MAX_PLACES))
        last, reversions = places.get(place), 0
        if last is not None and last.requested == requested and now < last.at + REVERTED_SECONDS:
            is_reverted = last.is_as_requested and (before is None or before.stored != last.stored)
            reversions = last.reversions + 1 if is_reverted else 0
        difference = find_difference(manifest, stored)
        places[place] = _Applied(requested, compute_stored_digest(stored), now, not difference, reversions)
        if difference:
            sentence = f"{_format_place(place)} is stored other than requested: {difference}"
            self._refuse(place, job_uid, f"{sentence}; a policy or webhook of the cluster changes it", requested)
        elif reversions > FREE_REVERSIONS:
            sentence = f"{_format_place(place)} was changed or deleted by another client after each of the last writes"
            self._refuse(place, job_uid, sentence, requested)
        else:
            self.clear_refusal(place, job_uid)

    def _refuse(
        self, place: str, job_uid: str, sentence: str, requested: str = "", *, name_in_use: bool = False
    ) -> None:
        places = self._refused.setdefault(job_uid, BoundedDict(MAX_PLACES))
        outcome = places.get(place)
        is_repeated = outcome is not None and outcome.refusal.requested in ("", requested)
        pause = min(MAX_PAUSE_SECONDS, 2.0 * outcome.pause) if outcome is not None and is_repeated else FIRST_PAUSE
        places[place] = _Refused(WriteRefusal(sentence, name_in_use, self._clock() + pause, requested), pause)

    def clear_refusal(self, place: str, job_uid: str) -> None:
        """Record that the object was written as requested."""
        places = self._refused.get(job_uid)
        if places is not None:
            places.pop(place, None)
            if not places:
                del self._refused[job_uid]


def check_identity(manifest: Json, stored: Json, *parts: str) -> None:
    """Check that the operator can find a stored object again, and that these parts are as requested.

    Raises ChangedError.
    """
    metadata = manifest["metadata"]
    labels = {key: value for key, value in metadata["labels"].items() if key in (LABEL_JOB, LABEL_ROLE)}
    annotations = {key: value for key, value in metadata.get("annotations", {}).items() if key in _READ_ANNOTATIONS}
    needed = {"labels": labels, "annotations": annotations, "ownerReferences": metadata.get("ownerReferences", ())}
    difference = find_difference({"metadata": needed, **{part: manifest[part] for part in parts}}, stored)
    if difference:
        name = f"{stored.get('kind', manifest.get('kind'))} {metadata['name']}"
        raise ChangedError(f"{name} is stored other than requested: {difference}; a policy or webhook changes it")


def format_refusal(job: str, place: str, text: str) -> str:
    """Return why the API server refused an object, after its kind and name.

    Names of single pods are left out, so that all attempts give the same sentence.
    """
    subject = f"Pod {job}-w-N" if place == PODS.kind else _format_place(place)
    text = re.sub(rf"\b{re.escape(job)}-w-\d+\b", f"{job}-w-N", _REQUEST.sub("", text))
    return (text if text.startswith(subject) else f"{subject}: {text}")[:MAX_REFUSAL_CHARACTERS]


def _format_place(place: str) -> str:
    return place.replace("/", " ", 1)


def find_difference(manifest: Json, stored: Json) -> str:
    """Return the first part of a requested object that is missing or different; empty if all is there.

    What the API server or others add beside it is no difference.
    """
    requested, metadata = manifest["metadata"], as_mapping(stored.get("metadata"))
    for part in ("labels", "annotations"):
        for key, value in requested.get(part, {}).items():
            current = as_mapping(metadata.get(part)).get(key)
            if current != value:
                return f"metadata.{part}[{key}] is {_format_value(current)}"
    owners = metadata.get("ownerReferences")
    uids = [as_mapping(owner).get("uid") for owner in owners] if isinstance(owners, list) else []
    if any(owner["uid"] not in uids for owner in requested.get("ownerReferences", ())):
        return "its owner is missing in metadata.ownerReferences"
    parts = (_find_differences(part, manifest[part], stored.get(part)) for part in _COMPARED if part in manifest)
    return next((difference for differences in parts for difference in differences), "")


def _find_differences(place: str, requested: Any, stored: Any) -> Iterator[str]:
    if isinstance(requested, dict) and isinstance(stored, dict):
        for key, value in requested.items():
            yield from _find_differences(f"{place}.{key}", value, stored.get(key))
    elif isinstance(requested, list) and isinstance(stored, list) and len(requested) == len(stored):
        for index, value in enumerate(requested):
            yield from _find_differences(f"{place}[{index}]", value, stored[index])
    elif requested != stored and (requested or stored):  # empty parts are left out
        yield f"{place} is {_format_value(stored)}"


def _format_value(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}…"
