"""Commit a save that all ranks have written: copy the parts to other nodes, and agree on the outcome."""

from __future__ import annotations

import logging
from enum import IntEnum
from typing import TYPE_CHECKING

import trainium_worker
from trainium_worker.dcp.session import FILES_PER_PART, TAG
from trainium_worker.snapshots.copies import receive_part, send_part
from trainium_worker.snapshots.files import DamagedSnapshotError, Part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_worker.dcp.session import Session
    from trainium_worker.snapshots.copies import Spans
    from trainium_worker.snapshots.files import SnapshotFile

_log = logging.getLogger(__name__)


class Outcome(IntEnum):
    """The outcome of a save on a rank; the job has the highest one of its ranks."""

    OK = 0
    NO_SPACE = 1
    FAILED = 2


def commit(
    session: Session,
    files: Mapping[int, SnapshotFile],
    part: Part | None,
    outcome: Outcome,
    *,
    problem: str = "",
    failure: BaseException | None = None,
    spans: dict[int, Spans | None] | None = None,
) -> bool:
    """Commit a save, and return whether it is kept; without space on a rank, no rank keeps this one or later ones.

    Collective. files: those of this rank's part and of the copies that it keeps, by the part's rank. part: this rank's
    part, written if `outcome` is OK. problem: the sentence for the user without space. spans: what each copy needs, by
    the part's rank, if all ranks are known to have written their parts; else unset, and the copies are whole.

    Raises `failure`, or RuntimeError if another rank failed.
    """
    job_outcome = max(session.all_gather_integers(outcome)) if spans is None else outcome
    if job_outcome == Outcome.OK and part is not None:
        problem = "a copy did not arrive as it was sent"
        try:
            outcome = Outcome.OK if _replicate(session, files, part, spans or {}) else Outcome.FAILED
        except (RuntimeError, DamagedSnapshotError) as error:
            outcome, failure = Outcome.FAILED, error
        job_outcome = max(session.all_gather_integers(outcome))
    if job_outcome == Outcome.NO_SPACE:
        session.disable(files.values())
        reason = next(rank_reason for rank_reason in session.all_gather(problem) if rank_reason)
        trainium_worker.notice(reason)
        if session.rank == 0:
            _log.warning("%s", reason)
        return False
    if job_outcome == Outcome.FAILED or part is None:
        for file in files.values():
            file.invalidate()  # the next save overwrites these files, not the newest complete save
        if failure is not None:
            raise failure
        raise RuntimeError(f"a save is not in memory: {problem or 'another rank failed to save it'}")
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


def _replicate(session: Session, files: Mapping[int, SnapshotFile], part: Part, spans: dict[int, Spans | None]) -> bool:
    """Send this rank's part to its buddy and receive those of others; return whether all arrived intact.

    A copy of spans that does not match, because the ranks differ where they should not, is repeated as a whole, and
    its spans are removed.
    """
    group, target = session.group, session.copy_target
    if group is None or target is None:
        return True

    def receive(source: int) -> bool:
        def choose_file(received: Part) -> SnapshotFile:
            if received.name != str(source):
                raise DamagedSnapshotError(f"rank {source} sent part {received.name}")
            return files[source]

        is_intact = receive_part(group, source, TAG, choose_file, spans=spans.get(source))
        if not is_intact and spans.pop(source, None) is not None:
            is_intact = receive_part(group, source, TAG, choose_file)
        return bool(is_intact)

    futures = [session.receivers.submit(receive, source) for source in session.copy_sources]
    page, payload = part.to_page(), files[session.rank].payload[: part.payload_bytes]
    was_sent = send_part(group, target, TAG, page, payload, spans=spans.get(session.rank))
    if not was_sent and spans.pop(session.rank, None) is not None:
        was_sent = send_part(group, target, TAG, page, payload)
    return all([was_sent, *(future.result() for future in futures)])
