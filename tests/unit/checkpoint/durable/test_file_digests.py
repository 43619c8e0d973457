"""Collect the digests of files on the first rank: any ranks write the tables, and a reader finds each file in one."""

import hashlib
import json
import pickle
import random
from bisect import bisect_right
from pathlib import Path

import pytest

from trainium_contract.wire.checkpoint_manifest import blocks_name, digest_bytes, shard_name
from trainium_trainer.checkpoint.collectives import pack_values
from trainium_trainer.checkpoint.format.writer import (
    DigestReport,
    WrittenFile,
    WrittenTable,
    fold_reports,
    write_digests,
)
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry


def written_file(number: int, blocks: int) -> WrittenFile:
    digests = b"".join(hashlib.sha256(b"%d %d" % (number, block)).digest() for block in range(blocks))
    return WrittenFile(8 * blocks, hashlib.sha256(b"%d" % number).digest(), digests, blocks)


class ReductionTree:
    """All ranks, joined in pairs as in `collectives`.

    `numbers`: the number of each rank's file; `received`: bytes by rank; `tables_by_others`: not by the first rank.
    """

    def __init__(self, root: Path, files: list[WrittenFile | None], numbers: list[int]) -> None:
        self.storage = PosixStorage(root)
        self.storage.prepare()
        reports = {rank: [DigestReport.of(rank, numbers[rank], file)] for rank, file in enumerate(files)}
        self.received = [0] * len(files)
        distance = 1
        while distance < len(files):
            for rank in range(distance, len(files), 2 * distance):
                passed = fold_reports(reports.pop(rank), self.write)
                self.received[rank - distance] += len(pack_values([pickle.dumps(report) for report in passed]))
                reports[rank - distance] += passed
            distance *= 2
        unwritten = {number: file for report in reports[0] for number, file in report.files}
        tables = [table for report in reports[0] for table in report.tables]
        self.tables_by_others = len(tables)
        self.tables = [*tables, *self.write(unwritten, [table.first for table in tables])]

    def write(self, files: dict[int, WrittenFile], firsts: list[int]) -> list[WrittenTable]:
        return write_digests(self.storage, "step", files, firsts, Retry(()))

    def check(self, expected: dict[int, WrittenFile]) -> None:
        """Check that every file is in the table in which a reader looks for it, and once in the manifest's entries."""
        firsts = sorted(table.first for table in self.tables)
        assert len(set(firsts)) == len(firsts)
        entries = [entry for table in self.tables for entry in table.files]
        expected_entries = {(number, file.size, bytes.fromhex(file.digest)) for number, file in expected.items()}
        assert len(entries) == len(set(entries))
        assert set(entries) == expected_entries
        assert sum(table.values for table in self.tables) == sum(file.values for file in expected.values())
        for number, file in expected.items():
            name = blocks_name(firsts[bisect_right(firsts, number) - 1])
            data = self.storage.read(f"step/{name}")
            (table,) = (table for table in self.tables if blocks_name(table.first) == name)
            assert (table.size, table.digest.hex()) == (len(data), digest_bytes(data))
            entry = json.loads(data)["files"][shard_name(number)]
            assert entry == {"size": file.size, "header": file.header.hex(), "blocks": file.blocks.hex()}


@pytest.mark.parametrize("seed", range(12))
def test_a_reader_finds_every_files_digests_whichever_rank_has_written_them(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice((1, 2, 7, 40, 100))
    numbers = list(range(ranks))
    for start in range(0, ranks - 3, 4):  # some nodes number their ranks in another order
        if rng.random() < 0.2:
            numbers[start : start + 4] = rng.sample(numbers[start : start + 4], 4)
    max_blocks = rng.choice((3, 60, 900, 3000))
    files = [None if rng.random() < 0.1 else written_file(number, rng.randint(1, max_blocks)) for number in numbers]
    tree = ReductionTree(tmp_path, files, numbers)
    tree.check({number: file for number, file in zip(numbers, files, strict=True) if file is not None})


def test_no_rank_receives_more_than_a_few_tables_of_digests(tmp_path: Path) -> None:
    """1,024 ranks with 50 blocks each have 1.6 MiB of digests."""
    files = [written_file(rank, 50) for rank in range(1024)]
    tree = ReductionTree(tmp_path, [*files], list(range(1024)))
    tree.check(dict(enumerate(files)))
    assert tree.tables_by_others > 20
    assert max(tree.received) < 200 << 10
