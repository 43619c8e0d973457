"""Many readers of one checkpoint whose store is busy, slow or unavailable."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.testing.trainer.s3_gateway import Fault, S3Gateway, run_gateway
from tests.unit.checkpoint.checkpoint_builders import SINGLE_RANK, State, start_run
from trainium_trainer.checkpoint.format.reader import load_checkpoint
from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint, survey
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.object_store import Limits, ObjectStorage
from trainium_trainer.storage.protocol import Retry

READERS = 16
RETRY = Retry((0.01,) * 3)
LIMITS = Limits(request_seconds=0.5, first_pause_seconds=0.01, longest_pause_seconds=0.05)
BUSY = Fault(status=503, code="SlowDown", method="GET", times=4 * READERS)
"""The answer of S3 to too many requests at once."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Gateway]:
    with run_gateway(tmp_path, monkeypatch) as running:
        start_run("s3://bucket/run", storage=ObjectStorage("s3://bucket/run", LIMITS)).flush().save_steps(3).close()
        yield running


def load_in_all_readers(checkpoint: CommittedCheckpoint, limits: Limits) -> list[list[str] | Exception]:
    """Return the wrong tensors or the error of each reader; all start together, each with a separate storage."""
    start_barrier = threading.Barrier(READERS)

    def read(_: int) -> list[str] | Exception:
        state = State(SINGLE_RANK)
        storage = ObjectStorage("s3://bucket/run", limits)
        start_barrier.wait()
        try:
            load_checkpoint(storage, checkpoint, state, RETRY)
        except Exception as error:  # noqa: BLE001 - checked by the test
            return error
        return state.wrong_tensors(3)

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
def test_a_store_that_fails_under_many_readers_lets_each_of_them_load_the_right_state(
    server: S3Gateway, fault: Fault
) -> None:
    (checkpoint,) = survey(ObjectStorage("s3://bucket/run", LIMITS)).committed
    server.inject_fault(fault)
    assert load_in_all_readers(checkpoint.drop_shards(), LIMITS) == [[]] * READERS
    assert fault.times <= 0, "the fault was injected less often than planned"


def test_a_store_that_stays_busy_is_the_error_of_every_reader_and_no_damage(
    server: S3Gateway,
) -> None:
    short = Limits(request_seconds=0.5, first_pause_seconds=0.01, longest_pause_seconds=0.02, retry_seconds=0.2)
    (checkpoint,) = survey(ObjectStorage("s3://bucket/run", LIMITS)).committed
    server.inject_fault(Fault(status=503, code="SlowDown", method="GET", times=float("inf")))
    for outcome in load_in_all_readers(checkpoint.drop_shards(), short):
        assert isinstance(outcome, StorageError), outcome
        assert "checkpoint storage s3://bucket/run" in str(outcome)
