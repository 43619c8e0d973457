"""Fork the processes of all pools, except where a test needs a clean start; train one tokenizer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.trainer.data_files import data_config, open_text, write_text
from tests.testing.trainer.forked_workers import CLEAN_START, forked_workers
from trainium_trainer.data.workers import pool


@pytest.fixture(scope="module", autouse=True)
def _fork_data_workers() -> Iterator[None]:
    with forked_workers():
        yield


@pytest.fixture
def clean_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes as in production."""
    monkeypatch.setattr(pool, "start_process", CLEAN_START)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_text(folder / "d.txt")
    return open_text(data_config(folder, folder / "d.txt")).tokenizer
