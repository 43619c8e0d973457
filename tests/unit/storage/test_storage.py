"""Read, write, list and remove files in a folder and in an S3 gateway on loopback; retry failures of S3."""

import errno
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.s3_gateway import ACCESS_KEY, SECRET_KEY, Fault, S3Gateway, run_gateway
from trainium_contract.exit_codes import ExitCode
from trainium_trainer.exits import UserError, find_exit_code
from trainium_trainer.storage import open_storage, posix
from trainium_trainer.storage.errors import DamagedFileError, StorageError
from trainium_trainer.storage.object_store import Limits, ObjectStorage
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry, Storage, read_part, read_small

FAST_LIMITS = Limits(
    request_seconds=2.0, retries=3, first_pause_seconds=0.01, longest_pause_seconds=0.02, retry_seconds=5
)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Gateway]:
    with run_gateway(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(params=["posix", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Return a folder, and a bucket of a real server."""
    if request.param == "posix":
        return PosixStorage(tmp_path / "root")
    request.getfixturevalue(request.param)
    return ObjectStorage("s3://bucket/some/run", FAST_LIMITS)


def pieces(data: bytes, size: int = 1000) -> Iterator[memoryview]:
    view = memoryview(data)
    yield from (view[start : start + size] for start in range(0, len(data), size))


def read_all(storage: Storage, name: str, size: int, start: int = 0) -> bytes:
    target = bytearray(size)
    storage.read_into(name, start, memoryview(target))
    return bytes(target)


def test_written_files_are_read_whole_and_in_parts(storage: Storage) -> None:
    storage.prepare()
    data = os.urandom(100_000)
    storage.write_stream("step-1/a/shard", pieces(data), len(data))
    assert storage.read("step-1/a/shard") == data
    assert read_all(storage, "step-1/a/shard", 50_000, 40_000) == data[40_000:90_000]
    assert read_all(storage, "step-1/a/shard", 0, 5) == b""
    with pytest.raises(DamagedFileError, match="step-1/a/shard ends too early"):
        read_all(storage, "step-1/a/shard", 20, len(data) - 10)
    with pytest.raises(DamagedFileError):
        read_all(storage, "step-1/a/shard", 20, len(data) + 10)


def test_a_missing_file_is_reported_as_missing(storage: Storage) -> None:
    storage.prepare()
    assert storage.list("") == storage.list("step-1") == []
    assert read_small(storage, "GENERATION") is None
    with pytest.raises(FileNotFoundError):
        read_all(storage, "step-1/shard", 3)
    with pytest.raises(DamagedFileError, match="step-1/shard is missing"):
        read_part(storage, "step-1/shard", 0, memoryview(bytearray(3)), Retry(()))
    storage.remove_file("step-1/shard")
    storage.remove_files("step-1", lambda _: True)


def test_a_small_file_is_replaced_by_write_and_never_by_create(storage: Storage) -> None:
    storage.prepare()
    storage.create("step-1/COMMITTED", b"first")
    with pytest.raises(FileExistsError):
        storage.create("step-1/COMMITTED", b"second")
    assert storage.read("step-1/COMMITTED") == b"first"
    storage.write("step-1/COMMITTED", b"third")
    assert storage.read("step-1/COMMITTED") == b"third"
    assert [entry.name for entry in storage.list("step-1")] == ["COMMITTED"]


def test_only_one_of_many_writers_creates_a_file(storage: Storage) -> None:
    storage.prepare()
    won: list[int] = []

    def create(number: int) -> None:
        try:
            storage.create("COMMITTED", str(number).encode())
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert storage.read("COMMITTED") == str(won[0]).encode()


def test_lists_are_complete_however_many_pages_they_have(storage: Storage) -> None:
    storage.prepare()
    for number in range(10):
        storage.write(f"step-{number}/COMMITTED", b"x" * number)
        storage.write(f"file-{number}", b"y" * number)
    entries = storage.list("")
    assert [(entry.name, entry.size, entry.is_folder) for entry in entries] == [
        *((f"file-{number}", number, False) for number in range(10)),
        *((f"step-{number}", 0, True) for number in range(10)),
    ]
    assert [(entry.name, entry.size) for entry in storage.list("step-7")] == [("COMMITTED", 7)]
    assert all(entry.modified > 0 for entry in entries if not entry.is_folder)


def test_files_are_removed_by_name_and_folders_when_they_are_empty(storage: Storage) -> None:
    storage.prepare()
    for name in ("step-1/a/0", "step-1/a/1", "step-1/a/b/1", "step-1/COMMITTED", "step-10/a/1", "step-2/a/1"):
        storage.write(name, b"x")
    storage.remove_file("step-1/COMMITTED")
    assert [entry.name for entry in storage.list("step-1")] == ["a"]
    storage.remove_files("step-1/a", lambda name: name == "1")
    assert [entry.name for entry in storage.list("step-1/a")] == ["0", "b"]
    storage.remove_files("step-2/a", lambda _: True)
    assert [entry.name for entry in storage.list("")] == ["step-1", "step-10"]


def test_a_large_file_appears_complete_and_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    observed: list[bytes | None] = []

    def observed_pieces(content: bytes, *, fails: bool = False) -> Iterator[memoryview]:
        for index in range(len(content)):
            yield memoryview(content)[index : index + 1]
            observed.append(storage.read("a/shard") if (tmp_path / "a/shard").exists() else None)
            assert [entry.name for entry in storage.list("a")] in ([], ["shard"])
        if fails:
            raise RuntimeError

    storage.write_stream("a/shard", observed_pieces(b"first"), 5)
    assert set(observed) == {None}
    with pytest.raises(RuntimeError):
        storage.write_stream("a/shard", observed_pieces(b"other", fails=True), 5)
    assert set(observed[5:]) == {b"first"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["shard"]
    assert storage.read("a/shard") == b"first"


def test_only_drafts_of_killed_writers_are_removed(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    draft = storage._draft("note", b"half of it")
    for name in (".draft-of-mine", ".draft-0123456789abc", "folder/.draft-0123456789ab", "note"):
        storage.write(name, b"the user's")
    assert draft in set(tmp_path.iterdir())
    storage.remove_drafts()
    remaining = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert remaining == {".draft-of-mine", ".draft-0123456789abc", "folder/.draft-0123456789ab", "note"}


def test_a_write_that_fails_half_way_leaves_no_object(s3: S3Gateway) -> None:
    storage = ObjectStorage("s3://bucket/run", FAST_LIMITS)
    data = os.urandom(40 << 20)

    def failing_pieces() -> Iterator[memoryview]:
        yield from pieces(data, 8 << 20)
        raise OSError(errno.EIO, "the disk that it is read from")

    with pytest.raises(OSError, match="the disk that it is read from"):
        storage.write_stream("shard", failing_pieces(), len(data) + 1)
    s3.inject_fault(Fault(status=500, times=99, fits=lambda request: "partNumber" in request.query))
    with pytest.raises(OSError, match="InternalError"):
        storage.write_stream("shard", pieces(data, 8 << 20), len(data))
    assert s3.objects("bucket") == {}
    assert s3.uploads("bucket") == []


def test_a_large_file_is_uploaded_in_parts_that_are_retried(s3: S3Gateway) -> None:
    storage = ObjectStorage("s3://bucket/run", replace(FAST_LIMITS, request_seconds=20))
    data = os.urandom(40 << 20)
    s3.inject_fault(Fault(status=503, code="SlowDown", times=2, method="POST"))
    s3.inject_fault(Fault(status=500, times=3, method="PUT"))
    storage.write_stream("shard", pieces(data, 8 << 20), len(data))
    assert s3.objects("bucket") == {"run/shard": data}
    assert sum(request.method == "PUT" for request in s3.requests) == 3 + 3
    assert max(request.length for request in s3.requests) == 16 << 20


def test_a_read_is_retried_after_failures_and_truncated_responses(s3: S3Gateway) -> None:
    storage = ObjectStorage("s3://bucket/run", FAST_LIMITS)
    data = os.urandom(100_000)
    storage.write("shard", data)
    s3.inject_fault(Fault(status=500, times=2))
    s3.inject_fault(Fault(cut=1000))
    assert read_all(storage, "shard", len(data)) == data


def test_a_request_without_an_answer_times_out_and_is_retried(s3: S3Gateway) -> None:
    storage = ObjectStorage("s3://bucket/run", replace(FAST_LIMITS, request_seconds=0.2))
    stalled = s3.inject_fault(Fault(stall=threading.Event(), times=99))
    with pytest.raises(StorageError, match="did not answer in time") as caught:
        Retry(()).run(lambda: storage.write("GENERATION", b"1"), storage.location)
    assert find_exit_code(caught.value) == ExitCode.STORAGE_UNAVAILABLE

    def recover(_: float) -> None:
        stalled.times = 0

    Retry((0.1,), sleep=recover).run(lambda: storage.write("GENERATION", b"2"), storage.location)
    assert storage.read("GENERATION") == b"2"


def test_a_file_whose_response_was_lost_exists_at_the_next_attempt(s3: S3Gateway) -> None:
    """The store has the file, but the client received an error."""
    storage = ObjectStorage("s3://bucket/run", FAST_LIMITS)
    s3.inject_fault(Fault(status=500, after=True, method="PUT"))
    with pytest.raises(FileExistsError):
        storage.create("step-1/COMMITTED", b"mine")
    assert storage.read("step-1/COMMITTED") == b"mine"


@pytest.mark.parametrize(
    ("change", "path", "sentence"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "of-somebody-else"}, "s3://bucket/run", "SignatureDoesNotMatch.*write permission"),
        ({}, "s3://no-such-bucket/run", "the bucket does not exist: make the bucket"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "s3://bucket/run", "cannot be reached: check the store"),
    ],
)
def test_errors_of_the_store_show_no_credentials(
    s3: S3Gateway, monkeypatch: pytest.MonkeyPatch, caplog: Any, change: dict[str, str], path: str, sentence: str
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("DEBUG"), pytest.raises(StorageError, match=sentence) as caught:
        Retry(()).run(ObjectStorage(path, FAST_LIMITS).prepare, path)
    output = f"{caught.value!r} {caught.value.__cause__!r} {caplog.text}"
    assert not any(secret in output for secret in (ACCESS_KEY, SECRET_KEY, "of-somebody-else", "Signature="))


def test_all_objects_are_listed_beyond_a_page_of_a_thousand(s3: S3Gateway) -> None:
    for number in range(1001):
        s3.put("bucket", f"run/step-1/{number:04}", b"")
    assert len(ObjectStorage("s3://bucket/run", FAST_LIMITS).list("step-1")) == 1001


def test_paths_name_their_store(tmp_path: Path, s3: S3Gateway) -> None:
    assert open_storage(str(tmp_path)).location == str(tmp_path)
    assert open_storage("s3://bucket/a/b/").location == "s3://bucket/a/b"
    for path, sentence in (("gs://bucket/x", "no store 'gs'"), ("s3://Not_A_Bucket/x", "is not a bucket's name")):
        with pytest.raises(UserError, match=sentence):
            open_storage(path)


# ---- file systems without hard links, folders that change ----------------------------------------------------------


def failing_link(number: int) -> Any:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return link


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_is_created_once_also_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    storage = PosixStorage(tmp_path)
    monkeypatch.setattr(os, "link", failing_link(number))
    storage.create("OWNER-1", b"first")
    with pytest.raises(FileExistsError):
        storage.create("OWNER-1", b"second")
    assert storage.read("OWNER-1") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["OWNER-1"], "no draft is left"


def test_a_full_disk_is_not_taken_for_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing_link(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        PosixStorage(tmp_path).create("OWNER-1", b"first")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "platform", "darwin")
    posix._sync_file_range.cache_clear()
    yield
    posix._sync_file_range.cache_clear()


@pytest.mark.usefixtures("macos")
def test_large_files_are_written_without_sync_file_range(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 40
    storage = PosixStorage(tmp_path)
    storage.write_stream("large", iter([memoryview(data)[: 36 << 20], memoryview(data)[36 << 20 :]]), len(data))
    assert storage.read("large") == data


def test_a_folder_that_was_removed_because_it_was_empty_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder = Path.mkdir
    removals = iter([True, True])

    def mkdir_and_remove(path: Path, *args: Any, **kwargs: Any) -> None:
        make_folder(path, *args, **kwargs)
        if path.name == "shared" and next(removals, False):
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir_and_remove)
    PosixStorage(tmp_path).write_stream("shared/file", iter([memoryview(b"data")]), 4)
    assert (tmp_path / "shared" / "file").read_bytes() == b"data"


def test_a_folder_that_is_always_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError):
        PosixStorage(tmp_path).write_stream("shared/file", iter([memoryview(b"data")]), 4)


def test_a_file_that_vanishes_while_a_folder_is_listed_is_not_in_the_list(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    storage.write("present", b"data")
    (tmp_path / "removed").symlink_to(tmp_path / "nowhere")  # stat fails as for a file that was just removed
    assert [entry.name for entry in storage.list("")] == ["present"]
