"""The memory tier: files of snapshots, full memory, and copies to another rank in a thread."""

import errno
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.testing.trainer.base_models import with_flipped_bit
from trainium_worker.snapshots import copies
from trainium_worker.snapshots.copies import CopySender, choose_buddies
from trainium_worker.snapshots.files import DamagedSnapshotError, Part, SnapshotFile, Version, checksum, read_part
from trainium_worker.snapshots.store import PartFiles, SnapshotStore, part_name

BYTES = 4096


def part(step: int = 7, *, name: str = "one", payload_bytes: int = BYTES) -> Part:
    return Part(Version(step, 1, "session", "details"), name, "layout", payload_bytes)


def finish_next(files: PartFiles, step: int) -> SnapshotFile:
    file = files.next(BYTES)
    file.finish(part(step))
    return file


def open_files(folder: Path, count: int = 3) -> PartFiles:
    files = PartFiles(folder, "one", generation=1, count=count)
    reserve(files, folder)
    return files


def reserve(files: PartFiles, folder: Path) -> None:
    files.reserve(BYTES, SnapshotStore(folder, print).parts(), "layout")


def steps(folder: Path) -> list[int]:
    return sorted(found.version.step for found in SnapshotStore(folder, print).parts().values())


# ---- files ----------------------------------------------------------------------------------------------------------


def test_every_single_bit_changes_the_checksum() -> None:
    payload = torch.randint(0, 255, (3 * 4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = checksum(payload)
    rng = random.Random(2)
    for _ in range(300):
        byte, bit = rng.randrange(len(payload)), rng.randrange(8)
        payload[byte] ^= 1 << bit
        assert checksum(payload) != before
        payload[byte] ^= 1 << bit
    assert checksum(payload) == before
    blocks = payload.view(3, 4096)
    assert checksum(blocks[[1, 0, 2]].reshape(-1)) != before


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[: len(data) // 2], "4096 bytes where 8192 belong"),
        (lambda data: with_flipped_bit(data, 20), "the header is altered"),
        (lambda data: replace(part(), payload_bytes=-1).to_page() + data, "the header is of another format"),
        (lambda data: replace(part(), payload_bytes="x").to_page() + data, "the header is of another format"),
        (lambda data: part().to_page().replace(b"layout", b"format") + data, "the header is altered"),
    ],
)
def test_damage_is_reported_once_and_the_file_is_not_listed(
    tmp_path: Path, damage: Callable[[bytes], bytes], sentence: str
) -> None:
    file = SnapshotFile.create(tmp_path / "g1-one-x.snapshot", BYTES)
    file.finish(part())
    assert read_part(file.path) == file.part
    file.path.write_bytes(damage(file.path.read_bytes()))
    reported: list[Exception] = []
    store = SnapshotStore(tmp_path, lambda _, error: reported.append(error))
    for _ in range(2):
        assert store.parts() == {}
    assert [sentence in str(error) for error in reported] == [True]


def test_an_altered_payload_is_found_when_it_is_opened(tmp_path: Path) -> None:
    file = SnapshotFile.create(tmp_path / "x.snapshot", BYTES)
    finished = file.finish(part())
    reported: list[Path] = []
    store = SnapshotStore(tmp_path, lambda path, _: reported.append(path))
    file.payload[9] = 1
    assert store.open(file.path, finished, verifies=False) is not None, "another process verifies it"
    assert store.open(file.path, finished) is None
    assert (reported, store.parts()) == ([file.path], {})


def test_a_part_that_arrives_altered_is_never_marked_as_finished(tmp_path: Path) -> None:
    sent = SnapshotFile.create(tmp_path / "sent.snapshot", BYTES).finish(part())
    file = SnapshotFile.create(tmp_path / "x.snapshot", 2 * BYTES)
    file.payload[5] = 1
    assert not file.finish_received(sent)
    assert (file.part, read_part(file.path)) == (None, None)
    file.payload[5] = 0
    assert file.finish_received(sent)
    assert read_part(file.path) == file.part == sent


def test_a_header_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="the header of a snapshot has"):
        part(name="x" * 5000).to_page()


def test_the_oldest_file_is_written_next_but_an_unfinished_one_first(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    for step in range(1, 6):
        finish_next(files, step)
        assert steps(tmp_path) == list(range(max(1, step - 2), step + 1))
    files.invalidate(lambda found, _: found.version.step == 4)
    finish_next(files, 6)
    assert steps(tmp_path) == [3, 5, 6]
    assert {part_name(path) for path in tmp_path.iterdir()} == {"one"}


def test_files_of_earlier_processes_are_reused_if_they_fit_and_removed_otherwise(tmp_path: Path) -> None:
    finish_next(open_files(tmp_path), 7)
    other = SnapshotFile.create(tmp_path / "g1-two-x.snapshot", BYTES)
    other.finish(part(3, name="two"))
    files = open_files(tmp_path)
    assert (steps(tmp_path), len(list(tmp_path.iterdir()))) == ([3, 7], 4)
    reserve(files, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4, "files that are open are not opened again"
    PartFiles(tmp_path, "one", generation=2, count=3).reserve(
        2 * BYTES, SnapshotStore(tmp_path, print).parts(), "layout"
    )
    assert steps(tmp_path) == [3]


def test_files_grow_with_their_part_and_a_failed_save_leaves_the_newest_complete_one(tmp_path: Path) -> None:
    files = PartFiles(tmp_path, "one", generation=1, count=2)
    first, second = finish_next(files, 1), finish_next(files, 2)
    assert files.next(BYTES) is first
    first.finish(part(3))
    first.invalidate()
    assert files.next(BYTES) is first
    larger = files.next(3 * BYTES)
    assert (larger.capacity, len(list(tmp_path.iterdir())), second.part.version.step) == (3 * BYTES, 2, 2)
    files.remove_unfinished()
    assert list(tmp_path.iterdir()) == [second.path]


def test_full_memory_keeps_finished_snapshots_and_no_unfinished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = finish_next(open_files(tmp_path, count=1), 7)
    remaining, fallocate = iter(range(1)), os.posix_fallocate

    def limit_new_files(*arguments: Any) -> None:
        if next(remaining, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", limit_new_files)
    with pytest.raises(OSError, match="No space left"):
        open_files(tmp_path)
    assert (list(tmp_path.iterdir()), steps(tmp_path)) == ([kept.path], [7])


# ---- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stores", "names", "targets"),
    [
        ("aa", "xy", {}),
        ("ab", "xy", {0: 1, 1: 0}),
        ("ab", "xx", {}),
        ("aabb", "wxyz", {0: 2, 1: 3, 2: 0, 3: 1}),
        ("aabb", "xxyy", {0: 2, 2: 0}),
        ("aab", "xyz", {0: 2, 1: 2, 2: 0}),
        ("abc", "xyz", {0: 1, 1: 2, 2: 0}),
    ],
)
def test_a_part_of_a_single_node_has_its_copy_on_another(stores: str, names: str, targets: dict[int, int]) -> None:
    assert choose_buddies([*zip(stores, names, strict=True)]) == targets


@pytest.mark.parametrize("nodes", [2, 4, 36])
@pytest.mark.parametrize("servers", [2, 3, 5, 8])
def test_the_copies_of_an_ultra_server_are_on_others(servers: int, nodes: int) -> None:
    ranks = range(servers * nodes)  # those of an UltraServer are neighbours
    targets = choose_buddies([(f"store{rank}", f"part{rank}") for rank in ranks])
    assert targets.keys() == set(ranks)
    assert all(rank // nodes != target // nodes for rank, target in targets.items())


class FakeNetwork:
    """Record the pages that are sent; each transfer waits for its outcome in `answers` if there may be one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, waits: bool = True) -> None:
        self.pages: list[bytes] = []
        self.answers: Queue[bool | Exception] = Queue()
        self.ends = 0
        self._waits = waits
        monkeypatch.setattr(copies, "send_part", self._send)
        monkeypatch.setattr(copies, "_send_page", self._send_page)
        self.sender = CopySender(None, 1, 0)

    def _send(self, group: None, target: int, tag: int, page: bytes, payload: torch.Tensor) -> bool:
        self.pages.append(page)
        answer = self.answers.get(timeout=10) if self._waits else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send_page(self, group: None, target: int, tag: int, page: bytes) -> None:
        assert page == b""
        self.ends += 1

    def offer(self, folder: Path, step: int) -> SnapshotFile:
        file = SnapshotFile.create(folder / f"{step}.snapshot", BYTES)
        self.sender.offer(file, file.finish(part(step)))
        return file


@pytest.fixture
def no_thread_switches() -> Iterator[None]:
    """Let a thread run until it blocks."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(10)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_thread_switches")
def test_a_snapshot_that_is_overwritten_before_its_copy_starts_is_sent_with_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty page is the end: after it, the receiver would get no more copies."""
    network = FakeNetwork(monkeypatch, waits=False)
    file = network.offer(tmp_path, 7)
    finished = file.part
    file.invalidate()  # as its writer does after the timeout of an earlier copy
    assert network.sender.wait(10)
    assert Part.from_page(network.pages[0], "sent") == finished
    network.sender.close()


def test_a_snapshot_that_is_offered_during_another_copy_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = FakeNetwork(monkeypatch)
    network.offer(tmp_path, 1)
    network.offer(tmp_path, 2)
    network.answers.put(True)
    assert network.sender.wait(10)
    assert (len(network.pages), network.sender.newest) == (1, 1)
    network.offer(tmp_path, 3)
    network.answers.put(False)  # it arrived altered
    assert network.sender.wait(10)
    assert network.sender.newest == 1
    network.sender.close()
    assert network.ends == 1


def test_a_missing_receiver_ends_the_copies_without_a_closing_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = FakeNetwork(monkeypatch)
    network.offer(tmp_path, 1)
    network.answers.put(RuntimeError("connection reset by peer"))
    assert network.sender.wait(10)
    network.offer(tmp_path, 2)
    assert network.sender.wait(0), "no copy is in progress"
    network.sender.close()
    assert (len(network.pages), network.ends, network.sender.newest) == (1, 0, None)
    assert "no more copies of snapshots are made: connection reset by peer" in caplog.text


def test_a_part_that_does_not_fit_is_refused_before_its_bytes_are_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = []

    def irecv(buffer: torch.Tensor, *_: Any, **__: Any) -> None:
        received.append(buffer.numel())
        page = part(payload_bytes=9 * BYTES).to_page()
        buffer[: len(page)] = torch.frombuffer(bytearray(page), dtype=torch.uint8)

    monkeypatch.setattr(dist, "irecv", irecv)
    file = SnapshotFile.create(tmp_path / "x.snapshot", BYTES)
    with pytest.raises(DamagedSnapshotError, match="36864 bytes do not fit into 4096"):
        copies.receive_part(None, 1, 0, lambda _: file)
    assert (received, file.part) == ([4096], None)
