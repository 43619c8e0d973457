"""Store files on other file systems than local ones of Linux, and in folders that others change meanwhile."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainium_trainer.storage import posix
from trainium_trainer.storage.posix import PosixStorage

if TYPE_CHECKING:
    from collections.abc import Iterator


def refusing(number: int) -> Any:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return link


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_a_name_is_taken_once_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    storage = PosixStorage(tmp_path)
    monkeypatch.setattr(os, "link", refusing(number))
    storage.create("OWNER-1", b"first")
    with pytest.raises(FileExistsError):
        storage.create("OWNER-1", b"second")
    assert storage.read("OWNER-1") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["OWNER-1"], "no draft is left"


def test_a_full_disk_is_not_taken_for_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        PosixStorage(tmp_path).create("OWNER-1", b"first")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "platform", "darwin")
    posix._sync_file_range.cache_clear()
    yield
    posix._sync_file_range.cache_clear()


@pytest.mark.usefixtures("elsewhere")
def test_large_files_are_written_where_the_kernel_cannot_be_asked_to_begin(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 40
    storage = PosixStorage(tmp_path)
    storage.write_stream("large", iter([memoryview(data)[: 36 << 20], memoryview(data)[36 << 20 :]]), len(data))
    assert storage.read("large") == data


def test_a_folder_that_somebody_removes_because_it_was_empty_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path.mkdir
    removals = iter([True, True])

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        made(path, *args, **kwargs)
        if path.name == "shared" and next(removals, False):
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    PosixStorage(tmp_path).write_stream("shared/file", iter([memoryview(b"data")]), 4)
    assert (tmp_path / "shared" / "file").read_bytes() == b"data"


def test_a_folder_that_is_removed_forever_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError):
        PosixStorage(tmp_path).write_stream("shared/file", iter([memoryview(b"data")]), 4)


def test_a_file_that_vanishes_while_a_folder_is_listed_is_not_in_the_list(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    storage.write("here", b"data")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # stat fails as for a file that was just removed
    assert [entry.name for entry in storage.list("")] == ["here"]
