"""Commit a save that all ranks have written: copy the parts to other nodes, and agree on the outcome."""

from __future__ import annotations

import logging
import operator
from enum import IntFlag
from functools import reduce
from typing import TYPE_CHECKING

import trainium_worker
from trainium_worker.dcp.session import FILES_PER_PART, TAG
from trainium_worker.snapshots.copies import receive_part, send_part
from trainium_worker.snapshots.files import DamagedSnapshotError, Part

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from trainium_worker.dcp.session import Session
    from trainium_worker.snapshots.files import SnapshotFile

_log = logging.getLogger(__name__)


class Outcome(IntFlag):
    """The outcome of a save on a rank; that of the job is the union of those of all ranks."""

    OK = 0
    LAST = 1
    """The next save needs a plan."""
    WHOLE = 2
    """A copy that this rank keeps is received as a whole."""
    DIFFERENT = 4
    """The bytes that this rank has of a copy are not those of the part."""
    NO_SPACE = 8
    FAILED = 16
    PLAN = 32
    """The save has another layout than the last one, and needs a plan."""


def commit(
    session: Session,
    files: Mapping[int, SnapshotFile],
    part: Part | None,
    outcome: Outcome,
    *,
    problem: str = "",
    failure: BaseException | None = None,
) -> bool:
    """Copy the parts of a save to other nodes, and return whether it is kept. Collective.

    files: those of this rank's part and of the copies that it keeps, by the part's rank. part: this rank's part,
    written if `outcome` is OK. problem: the sentence for the user without space. Raises as `conclude`.
    """
    outcome = unite(session.all_gather_integers(outcome))
    if outcome == Outcome.OK and part is not None:
        outcome, failure = replicate(session, files, part, range(session.world_size))
    return conclude(session, files, part, outcome, problem=problem, failure=failure)


def unite(outcomes: Iterable[int]) -> Outcome:
    """Return the outcome of the job from those of its ranks."""
    return Outcome(reduce(operator.or_, outcomes))


def replicate(
    session: Session, files: Mapping[int, SnapshotFile], part: Part, ranks: Container[int]
) -> tuple[Outcome, BaseException | None]:
    """Copy the parts of ranks to other nodes; return the outcome of the job, and the error of this rank. Collective."""
    outcome = Outcome.FAILED
    failure: BaseException | None = None
    try:
        if _send_and_receive(session, files, part, ranks):
            outcome = Outcome.OK
        else:
            failure = RuntimeError("a save is not in memory: a copy did not arrive as it was sent")
    except (RuntimeError, DamagedSnapshotError) as error:
        failure = error
    return unite(session.all_gather_integers(outcome)), failure


def conclude(
    session: Session,
    files: Mapping[int, SnapshotFile],
    part: Part | None,
    outcome: Outcome,
    *,
    problem: str = "",
    failure: BaseException | None = None,
) -> bool:
    """Keep a save or discard it by the outcome of the job, and return whether it is kept. Collective.

    Without space on a rank, no rank keeps this save or later ones. Raises `failure`, or RuntimeError if another rank
    failed.
    """
    has_failed = bool(outcome & Outcome.FAILED)
    if outcome & Outcome.NO_SPACE and not has_failed:
        session.disable(files.values())
        reason = next(rank_reason for rank_reason in session.all_gather(problem) if rank_reason)
        trainium_worker.notice(reason)
        if session.rank == 0:
            _log.warning("%s", reason)
        return False
    if has_failed or part is None:
        for file in files.values():
            file.invalidate()  # the next save overwrites these files, not the newest complete save
        raise failure or RuntimeError("a save is not in memory: another rank failed to save it")
    session.complete_saves += 1
    session.newest_files = dict(files)
    trainium_worker.saved(part.version.step, trainium_worker.MEMORY)
    return True


def describe_no_space(session: Session, error: OSError, sizes: Sequence[int]) -> str:
    """Return a sentence for a rank without space. `sizes`: those of this rank's part and of the copies it keeps."""
    return (
        f"no snapshots are kept in memory, only checkpoints on storage count: {session.directory} of rank "
        f"{session.rank}: {error.strerror}: the rank needs {FILES_PER_PART * sum(sizes) / 2**20:.0f} MiB there; raise "
        "the size of the memory volume"
    )


def _send_and_receive(session: Session, files: Mapping[int, SnapshotFile], part: Part, ranks: Container[int]) -> bool:
    """Send this rank's part to its buddy and receive those of others; return whether all arrived intact."""
    group, target = session.group, session.copy_target
    if group is None:
        return True

    def receive(source: int) -> bool:
        def choose_file(received: Part) -> SnapshotFile:
            if received.name != str(source):
                raise DamagedSnapshotError(f"rank {source} sent part {received.name}")
            return files[source]

        return bool(receive_part(group, source, TAG, choose_file))

    futures = [session.receivers.submit(receive, source) for source in session.copy_sources if source in ranks]
    was_sent = True
    if target is not None and session.rank in ranks:
        payload = files[session.rank].payload[: part.payload_bytes]
        was_sent = send_part(group, target, TAG, part.to_page(), payload)
    return all([was_sent, *(future.result() for future in futures)])
