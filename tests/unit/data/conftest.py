"""The processes of all pools are forked; a test of the clean start asks for it."""

from collections.abc import Iterator

import pytest

from tests.testing.trainer.forked_workers import CLEAN_START, forked_workers
from trainium_trainer.data.workers import pool


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with forked_workers():
        yield


@pytest.fixture
def clean_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes as a user does."""
    monkeypatch.setattr(pool, "start_process", CLEAN_START)
