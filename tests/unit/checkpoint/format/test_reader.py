"""Read boxes of a committed checkpoint: each block is read once, and verified."""

from pathlib import Path

import pytest
import torch

from trainium_contract.wire.checkpoint_manifest import BLOCK_BYTES
from trainium_trainer.checkpoint.format.reader import CheckpointReader
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.root.survey import survey
from trainium_trainer.checkpoint.whole_tensors import TensorSource, write_whole
from trainium_trainer.storage.errors import DamagedFileError
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

ROWS, WIDTH = 5000, 1000
WHOLE = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)


class ByteCountingStorage(PosixStorage):
    """A folder that counts the bytes that are read of shards."""

    read_bytes = 0

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        if "shard" in name:
            self.read_bytes += len(target)
        super().read_into(name, start, target)


@pytest.fixture
def storage(tmp_path: Path) -> ByteCountingStorage:
    """Write a checkpoint of one tensor of about two and a half blocks."""
    storage = ByteCountingStorage(tmp_path)
    source = TensorSource("model.weight", torch.float32, WHOLE.shape, lambda: WHOLE)
    write_whole(storage, [source], Position(step=1, samples=1, tokens=1), {}, Retry())
    return storage


def open_reader(storage: ByteCountingStorage) -> CheckpointReader:
    return CheckpointReader(storage, survey(storage).committed[0], Retry())


def read_rows(reader: CheckpointReader, first: int, count: int) -> torch.Tensor:
    target = torch.empty(count, WIDTH)
    reader.fill(reader.plan_read("model.weight", (first, 0), target))
    return target


def test_rows_that_are_read_one_after_the_other_cost_each_block_once(storage: ByteCountingStorage) -> None:
    reader = open_reader(storage)
    parts = [read_rows(reader, first, 700) for first in range(0, 4900, 700)] + [read_rows(reader, 4900, 100)]
    assert torch.equal(torch.cat(parts), WHOLE)
    size = sum(path.stat().st_size for path in storage._root.rglob("shard-*"))
    assert size > 2 * BLOCK_BYTES
    assert storage.read_bytes == size


def test_rows_are_read_in_any_order(storage: ByteCountingStorage) -> None:
    reader = open_reader(storage)
    for first, count in ((4000, 500), (0, 10), (2000, 1500), (10, 3000), (4500, 500), (0, 5000)):
        assert torch.equal(read_rows(reader, first, count), WHOLE[first : first + count])


def test_every_read_of_a_part_of_an_altered_block_is_refused(storage: ByteCountingStorage) -> None:
    (path,) = storage._root.rglob("shard-*")
    with path.open("r+b") as file:
        file.seek(BLOCK_BYTES + 5)
        file.write(b"\x01\x02\x03")
    reader = open_reader(storage)
    assert torch.equal(read_rows(reader, 0, 2000), WHOLE[:2000])
    for first in (2000, 3000, 4000):
        with pytest.raises(DamagedFileError):
            read_rows(reader, first, 500)
    assert torch.equal(read_rows(reader, 4500, 500), WHOLE[4500:])
