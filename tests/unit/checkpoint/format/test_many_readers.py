"""Many readers of one checkpoint: a store that is busy, slow or gone, and an index of another world."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoint_world import SOLO, State, solo, written

from tests.testing.trainer.s3_gateway import Fault, S3Gateway, serving
from trainium_contract.wire.checkpoint_manifest import ManifestFile, digest_of
from trainium_trainer.checkpoint.dividing import INDEX_FORMAT, Axis, Cut, Divided, Grid, Scheme
from trainium_trainer.checkpoint.format import contents
from trainium_trainer.checkpoint.format.contents import Contents
from trainium_trainer.checkpoint.root.survey import Committed, survey
from trainium_trainer.storage.errors import DamagedFileError, StorageError
from trainium_trainer.storage.object_store import Limits, ObjectStorage
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)
READERS = 16
RETRY = Retry((0.01,) * 3)
LIMITS = Limits(request_seconds=0.5, first_pause_seconds=0.01, longest_pause_seconds=0.05)
BUSY = Fault(status=503, code="SlowDown", method="GET", times=4 * READERS)
"""What S3 answers when too many ask at once."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Gateway]:
    with serving(tmp_path, monkeypatch) as running:
        run = solo("s3://bucket/run", storage=ObjectStorage("s3://bucket/run", LIMITS)).settle()
        run.to(3, save_at=(3,)).settle()
        run.manager.close()
        yield running


def read_by_all(checkpoint: Committed, limits: Limits) -> list[list[str] | Exception]:
    """Return the wrong tensors of each reader or its error; all start together, each as a process would."""
    together = threading.Barrier(READERS)

    def read(_: int) -> list[str] | Exception:
        state = State(SOLO)
        storage = ObjectStorage("s3://bucket/run", limits)
        together.wait()
        try:
            contents.load(storage, checkpoint, state, RETRY)
        except Exception as error:  # noqa: BLE001 - checked by the test
            return error
        return state.wrong(3)

    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, range(READERS)))


@pytest.mark.parametrize(
    "fault",
    [
        BUSY,
        Fault(status=500, method="GET", times=2 * READERS),
        Fault(cut=40, method="GET", times=READERS),
        Fault(stall=threading.Event(), method="GET", times=READERS),
    ],
    ids=["busy", "failing", "cut off", "stalled"],
)
def test_a_store_that_fails_under_many_readers_gives_each_of_them_the_right_state(
    server: S3Gateway, fault: Fault
) -> None:
    (checkpoint,) = survey(ObjectStorage("s3://bucket/run", LIMITS)).committed
    server.fail(fault)
    assert read_by_all(checkpoint.for_readers(), LIMITS) == [[]] * READERS
    assert fault.times <= 0, "the fault was not met"


def test_a_store_that_stays_busy_ends_every_reader_with_one_sentence_and_blames_no_checkpoint(
    server: S3Gateway,
) -> None:
    short = Limits(request_seconds=0.5, first_pause_seconds=0.01, longest_pause_seconds=0.02, retry_seconds=0.2)
    (checkpoint,) = survey(ObjectStorage("s3://bucket/run", LIMITS)).committed
    server.fail(Fault(status=503, code="SlowDown", method="GET", times=float("inf")))
    for outcome in read_by_all(checkpoint.for_readers(), short):
        assert isinstance(outcome, StorageError), outcome
        assert "checkpoint storage s3://bucket/run" in str(outcome)


def scheme_of(ranks: int) -> Scheme:
    return Scheme(Grid(1, ranks, 1), [Divided("model.w", "F32", (48,), 0, (Cut(0, Axis.DATA),))])


@pytest.mark.parametrize("other", [4, 6, 16])
def test_the_index_of_another_worlds_size_is_damage_and_gives_no_value(tmp_path: Path, other: int) -> None:
    """Mix the folders of two sizes as by hand, with a manifest that vouches for the mixture."""
    storage, whole = PosixStorage(tmp_path), torch.arange(48, dtype=torch.float32)
    checkpoint = written(tmp_path, scheme_of(8), lambda rank, _: whole.chunk(8)[rank])
    path = tmp_path / "step-1/a/index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"format": INDEX_FORMAT} | scheme_of(other).to_json()))
    data = path.read_bytes()
    entries = [entry for entry in checkpoint.manifest.files if entry.name != "index.json"]
    entries.append(ManifestFile(name="index.json", size=len(data), digest=digest_of(data)))
    mixed = Committed(1, "step-1/a", checkpoint.manifest.model_copy(update={"files": tuple(entries)}))
    target = torch.full((48,), -1.0)

    def read() -> None:
        contents = Contents(storage, mixed, RETRY)
        contents.fill(contents.wanted("model.w", (0,), target))

    with pytest.raises(DamagedFileError, match=r"is not divided as in index\.json|has no description of shard-"):
        read()
    assert torch.equal(target, torch.full((48,), -1.0))
