"""A durable save and a resume from storage: planning, gathering, commit, index, and what a reader reads before tensors.

Real: one rank's state as ZeRO-1 divides it, its copy on the training thread, what all ranks say (packed as it travels),
the tables and the commit on a real folder, what a rank of the middle reads and parses. Simulated: the other ranks, and
the tensors' bytes (the files of tensors are not written; their headers are what they would be). Not counted: what a
network and a store add.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.scale.book import MIBIBYTE, Book, measured
from benchmarks.scale.models import Place, state_of
from benchmarks.scale.talk import Climb, as_said, climb
from trainium_contract.wire.checkpoint_manifest import BLOCK_BYTES, CheckpointKind, Manifest
from trainium_trainer.checkpoint import collectives
from trainium_trainer.checkpoint.collectives import pack, unpack
from trainium_trainer.checkpoint.durable.file_digests import Said, folded
from trainium_trainer.checkpoint.durable.save_plan import Word, agreed
from trainium_trainer.checkpoint.durable.staging import Staging
from trainium_trainer.checkpoint.format.contents import Contents
from trainium_trainer.checkpoint.format.live_state import box_of, scheme_of
from trainium_trainer.checkpoint.format.shards import WrittenFile, header_of, write_digests, write_tables
from trainium_trainer.checkpoint.root.commit import FenceToken, claim_fence, prepare_commit, publish
from trainium_trainer.checkpoint.root.survey import survey
from trainium_trainer.checkpoint.storage.posix import PosixStorage
from trainium_trainer.checkpoint.storage.protocol import Retry

if TYPE_CHECKING:
    from benchmarks.scale.models import Model
    from trainium_trainer.checkpoint.dividing.cuts import Grid
    from trainium_trainer.checkpoint.dividing.scheme import Scheme
    from trainium_trainer.checkpoint.root.survey import Committed

SECTION = "Save and resume"
LARGEST_COPY = 2**30
"""A rank's state above so many bytes is not copied here."""
TRAINING_SHARE = 0.02
RETRY = Retry(())


def words_of(scheme: Scheme) -> list[bytes]:
    """What all ranks say when saves are planned."""
    return as_said([Word(r, 0, scheme.digest, scheme if r == 0 else None) for r in range(scheme.grid.size)], "layout")


def hand_up(scheme: Scheme, files: dict[int, WrittenFile], storage: PosixStorage, label: str) -> Climb:
    """What all ranks say when they have written, and the tables that those on the way write."""

    def fold(heard: list[Said]) -> list[Said]:
        return folded(heard, lambda new, old: write_digests(storage, label, new, old, RETRY))

    told = as_said([Said.of(rank, rank, files.get(rank)) for rank in range(scheme.grid.size)], label)
    return climb(told, lambda said: collectives._folded(said, label, fold))  # noqa: SLF001 - as `settle` does


def files_of(scheme: Scheme) -> dict[int, WrittenFile]:
    """What every rank would say of its file; the digests are of nothing."""
    files: dict[int, WrittenFile] = {}
    for rank in range(scheme.grid.size):
        if items := scheme.file(rank):
            header, spans = header_of(items)
            size = spans[-1][1]
            volume = sum(item.box.volume for item in items)
            digests = os.urandom(32 * -(-size // BLOCK_BYTES))
            files[rank] = WrittenFile(size, hashlib.sha256(header).digest(), digests, volume)
    return files


def tables_of(scheme: Scheme, cost: Climb, storage: PosixStorage, label: str) -> list[Any]:
    """Write the index and the tables that are not written yet; the manifest's entries."""
    heard: list[Said] = [pickle.loads(pickle.loads(each)[1])[1] for each in unpack(pack(list(cost.said)))]
    left = {place: file for each in heard for place, file in each.files}
    return write_tables(storage, label, scheme, left, RETRY, [table for each in heard for table in each.tables])


def measure(book: Book, model: Model, ranks: int) -> None:
    """One size of one model."""
    section = f"{SECTION} ({model.name})"
    grid = model.grid(ranks)
    scheme = _plan(book, section, model, grid)
    _copy(book, section, model, grid)
    files = files_of(scheme)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = _commit(book, section, scheme, files, Path(folder))
        for data in dict.fromkeys((grid.data, max(1, grid.data * 31 // 32))):
            _resume(book, section, model, checkpoint, Path(folder), grid, type(grid)(1, data, grid.tensor))


def _plan(book: Book, section: str, model: Model, grid: Grid) -> Scheme:
    """The first save's planning; later ones have none."""
    ranks = grid.size
    for rank, where in ((0, "rank 0"), (ranks // 2, "a middle rank")):
        place = Place(grid, rank)
        state = state_of(model.shape, place)

        def derive(state: Any = state, place: Place = place) -> Scheme:
            scheme = scheme_of(state, place)
            _ = scheme.digest, scheme.file(place.rank)
            return scheme

        scheme, derived, peak = measured(derive)
        book.add(section, "plan, once for a layout: derive", where, "s", ranks, derived)
        book.add(section, "the same", where, "MiB peak", ranks, peak)
    told = words_of(scheme)
    cost = climb(told)
    packed = pack(told)

    def decide() -> None:
        agreed([pickle.loads(pickle.loads(each)[1])[1] for each in unpack(packed)])

    _, decided, peak = measured(decide)
    book.add(section, "plan: decide", "rank 0", "s", ranks, decided, budget=60.0)
    book.add(section, "plan: decide", "rank 0", "MiB peak", ranks, peak)
    book.add(section, "plan: gathered", "rank 0", "MiB", ranks, cost.first / MIBIBYTE, budget=1.0)
    book.add(section, "plan: received and sent", "a middle rank", "MiB", ranks, cost.middle / MIBIBYTE, budget=1.0)
    book.add(section, "plan: messages", "rank 0", "count", ranks, cost.messages)
    return scheme


def _copy(book: Book, section: str, model: Model, grid: Grid) -> None:
    """What a save costs the training thread."""
    place = Place(grid, 0)
    if sum(2 * box_of(value).volume for value in state_of(model.shape, place).values()) > LARGEST_COPY:
        return
    live = state_of(model.shape, place, values=True)
    staging = Staging(live)
    for _ in range(5):
        fits, compared, _ = measured(lambda: staging.fits(live))
        assert fits
        _, copied, _ = measured(lambda: staging.fill(live))
        budget = TRAINING_SHARE * model.step_seconds
        book.add(section, "save: on the training thread", "rank 0", "s", grid.size, compared + copied, budget=budget)


def _commit(book: Book, section: str, scheme: Scheme, files: dict[int, WrittenFile], root: Path) -> Committed:
    """What happens in each save after the last byte."""
    ranks, storage = scheme.grid.size, PosixStorage(root)
    token = FenceToken(1, "run", "session")
    storage.prepare()
    claim_fence(storage, token)
    cost = hand_up(scheme, files, storage, f"step-1/{token.attempt}")

    def work() -> None:
        tables = tables_of(scheme, cost, storage, f"step-1/{token.attempt}")
        publish(storage, prepare_commit(storage, "step-1", _manifest(scheme, tables), token, RETRY), RETRY)

    began = time.monotonic()
    _, _, peak = measured(work)
    book.add(section, "commit: after the last byte", "rank 0", "s", ranks, time.monotonic() - began, budget=60.0)
    book.add(section, "commit: after the last byte", "rank 0", "MiB peak", ranks, peak)
    book.add(section, "commit: gathered", "rank 0", "MiB", ranks, cost.first / MIBIBYTE, budget=1.0)
    book.add(section, "commit: received and sent", "a middle rank", "MiB", ranks, cost.middle / MIBIBYTE, budget=1.0)
    book.add(section, "commit: bytes of the gather", "the job", "MiB", ranks, cost.total / MIBIBYTE)
    book.add(section, "commit: messages", "rank 0", "count", ranks, cost.messages)
    folder = root / "step-1" / token.attempt
    tables = [path.stat().st_size for path in folder.glob("*.json") if path.name != "manifest.json"]
    book.add(section, "index", "storage", "MiB", ranks, (folder / "index.json").stat().st_size / MIBIBYTE)
    book.add(section, "index and digests", "storage", "MiB", ranks, sum(tables) / MIBIBYTE)
    book.add(section, "manifest", "storage", "MiB", ranks, (folder / "manifest.json").stat().st_size / MIBIBYTE)
    book.add(section, "files", "storage", "count", ranks, len(files) + len(tables) + 1)
    for rank, file in files.items():  # a survey compares sizes
        with (folder / f"shard-{rank:05d}.safetensors").open("wb") as sparse:
            sparse.truncate(file.size)
    found, seconds, peak = measured(lambda: survey(storage).committed[0])
    book.add(section, "resume: survey of one checkpoint", "rank 0", "s", ranks, seconds, budget=60.0)
    book.add(section, "resume: survey of one checkpoint", "rank 0", "MiB peak", ranks, peak)
    return found.for_readers()


def _manifest(scheme: Scheme, tables: list[Any]) -> Manifest:
    grid = scheme.grid
    return Manifest(
        kind=CheckpointKind.STATE,
        step=1,
        samples=1024,
        tokens=4194304,
        generation=1,
        world_size=grid.size,
        data_parallel=grid.data,
        tensor_parallel=grid.tensor,
        config_digest="0" * 64,
        created=0.0,
        files=tuple(tables),
    )


class CountingStorage(PosixStorage):
    """A store that counts what is read whole, to be parsed."""

    parsed = 0

    def read(self, name: str) -> bytes:
        """See `Storage.read`."""
        data = super().read(name)
        self.parsed += len(data)
        return data


def _resume(
    book: Book, section: str, model: Model, checkpoint: Committed, root: Path, old: Grid, new: Grid
) -> None:  # fmt: skip
    """What a rank of the middle does before it reads the first byte of a tensor."""
    how = "the same size" if new == old else "31/32 of the size"
    live = state_of(model.shape, Place(new, new.size // 2))
    storage = CountingStorage(root)
    found: list[Any] = []

    def work() -> None:
        contents = Contents(storage, checkpoint, RETRY)
        for name, value in live.items():
            box = box_of(value)
            if box.volume:
                found.extend(contents.wanted(name, box.offsets, torch.empty(box.sizes, device="meta")))

    _, seconds, peak = measured(work)
    name, where = f"resume at {how}", "a middle rank"
    book.add(section, f"{name}: control work", where, "s", old.size, seconds, budget=60.0)
    book.add(section, f"{name}: control work", where, "MiB peak", old.size, peak)
    book.add(section, f"{name}: parsed", where, "MiB", old.size, storage.parsed / MIBIBYTE, budget=1.0)
    files = {each.part.file for each in found}
    book.add(section, f"{name}: files of tensors", where, "count", old.size, len(files))
    blocks = {
        (each.part.file, block)
        for each in found
        for block in range(each.part.start // BLOCK_BYTES, -(-(each.part.start + each.part.length) // BLOCK_BYTES))
    }
    most = len(blocks) * BLOCK_BYTES / MIBIBYTE
    book.add(section, f"{name}: tensor bytes read, at most", where, "MiB", old.size, most)
