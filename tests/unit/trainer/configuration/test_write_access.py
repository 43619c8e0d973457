"""Report the user who cannot write to a place, and do not report the place as full."""

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainium_agent.checks.preflight import _explain_unwritable
from trainium_trainer.artifacts.store import create_write_error as artifact_error
from trainium_trainer.data.cache import use_cache
from trainium_trainer.exits import StorageError, UserError
from trainium_trainer.monitor.json_lines import create_write_error
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

NOBODY = 65534


@contextmanager
def ordinary_user() -> Iterator[int]:
    """Run the block as an ordinary user, like a worker, because root can write everywhere."""
    if os.geteuid() != 0:
        yield os.geteuid()
        return
    os.seteuid(NOBODY)
    try:
        yield NOBODY
    finally:
        os.seteuid(0)


@pytest.fixture
def locked_folder() -> Iterator[Path]:
    """Create a folder that all users can enter but only root can write; only root can enter folders of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="locked-"))
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture
def read_only_volume(tmp_path: Path) -> Iterator[Path]:
    """Mount a volume read-only."""
    root = tmp_path / "volume"
    root.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "none", str(root)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield root
    subprocess.run(["umount", "--lazy", str(root)], check=True)


def write_cache(folder: Path) -> None:
    with use_cache(folder / "cache"):
        pass


def write_checkpoint(folder: Path) -> None:
    Retry(()).run(lambda: PosixStorage(folder).write("step-1", b"x"), str(folder))


def write_artifact(folder: Path) -> None:
    Retry(()).run(lambda: PosixStorage(folder).write("model", b"x"), str(folder), artifact_error)


def write_record(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    try:
        path.write_bytes(b"x")
    except OSError as error:
        raise create_write_error(path, error) from error


WRITERS = [
    (write_cache, UserError),
    (write_checkpoint, StorageError),
    (write_artifact, StorageError),
    (write_record, StorageError),
]


@pytest.mark.parametrize(("write", "kind"), WRITERS)
def test_a_folder_of_another_user_is_reported_with_the_user_who_cannot_write_it(
    locked_folder: Path, write: Callable[[Path], None], kind: type[Exception]
) -> None:
    with ordinary_user() as user, pytest.raises(kind) as refused:
        write(locked_folder)
    message = str(refused.value)
    assert f"user {user} cannot write there: make it writable for that user (fsGroup; a hostPath takes none" in message
    assert str(locked_folder) in message
    assert "space" not in message


@pytest.mark.parametrize(("write", "kind"), WRITERS)
def test_a_volume_that_is_mounted_read_only_is_reported_as_read_only(
    read_only_volume: Path, write: Callable[[Path], None], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=r"Read-only file system\)?: it is mounted read-only: mount it writable"):
        write(read_only_volume)


def test_the_preflight_names_the_user_who_cannot_write(locked_folder: Path) -> None:
    with ordinary_user() as user:
        assert f"Permission denied: user {user} cannot write there" in _explain_unwritable(locked_folder)


def test_a_full_volume_is_still_reported_as_full(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"free space there or set data\.cacheDirectory"), use_cache(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
