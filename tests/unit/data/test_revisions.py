"""Record the commits that a run reads from a hub."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.trainer.hub_server import HubServer, run_hub
from trainium_contract.trainer.data import DataConfig
from trainium_trainer.data.revisions import RECORD_NAME, RunRevisions
from trainium_trainer.data.sources.hub import store_files
from trainium_trainer.data.sources.resolve import list_locations
from trainium_trainer.exits import StorageError, UserError
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

RETRY_AT_ONCE = Retry((0.0,))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    with run_hub(monkeypatch) as server:
        yield server


def test_every_source_of_a_data_set_is_pinned_to_one_commit(hub: HubServer, tmp_path: Path) -> None:
    first, second = (hub.add(f"datasets/owner/pinned-{name}", {"a.jsonl": b"{}"}) for name in ("one", "other"))
    config = DataConfig.model_validate(
        {
            "sources": [
                {"hub": {"dataset": "owner/pinned-one"}},
                {"source": "hf://datasets/owner/pinned-one?split=test"},
                {"hub": {"dataset": "owner/pinned-other", "revision": second}},
                {"source": "/data"},
            ],
            "validation": {"source": "hf://datasets/owner/pinned-one@main?split=validation"},
        }
    )
    pinned = RunRevisions(PosixStorage(tmp_path)).pin(config)
    hf = "hf://datasets/owner/pinned-"
    assert list_locations(pinned) == [
        f"{hf}one@{first}?split=train",
        f"{hf}one@{first}?split=test",
        f"{hf}other@{second}?split=train",
        "/data",
        f"{hf}one@{first}?split=validation",
    ]
    assert [request.path for request in hub.requests] == ["/api/datasets/owner/pinned-one/revision/main"]
    hub.add("datasets/owner/pinned-one", {"a.jsonl": b"{}"})
    (tmp_path / RECORD_NAME).write_text('{"commits": {"owner/pinned-one@main": "%s"}}' % ("a" * 40))
    again = RunRevisions(PosixStorage(tmp_path)).pin(config)
    assert again.sources[0].hub.revision == "a" * 40, "the recorded commit"


def test_data_without_the_hub_need_no_record(tmp_path: Path) -> None:
    (tmp_path / RECORD_NAME).write_text("no JSON")
    config = DataConfig.model_validate({"source": "/data"})
    assert RunRevisions(PosixStorage(tmp_path)).pin(config) is config


def test_a_damaged_record_is_refused_with_a_remedy(tmp_path: Path) -> None:
    config = DataConfig.model_validate({"hub": {"dataset": "owner/any"}})
    for text in ("", "no JSON", '{"files": {"x": [["path"]]}}'):
        (tmp_path / RECORD_NAME).write_text(text)
        with pytest.raises(UserError, match=rf"{RECORD_NAME}: cannot be read.*: restore the file, or remove it"):
            RunRevisions(PosixStorage(tmp_path)).pin(config)


class FailingStorage(PosixStorage):
    """A folder that is full, or that cannot be read."""

    readable = True

    def write(self, name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    def read(self, name: str) -> bytes:
        if not self.readable:
            raise OSError(errno.EIO, "Input/output error", name)
        return super().read(name)


def test_a_full_store_does_not_stop_the_run_but_an_unreadable_one_does(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("datasets/owner/pinned-full", {"a.jsonl": b"{}"})
    config = DataConfig.model_validate({"hub": {"dataset": "owner/pinned-full"}})
    storage = FailingStorage(tmp_path)
    revisions = RunRevisions(storage, RETRY_AT_ONCE)
    pinned = revisions.pin(config)
    (name,) = list_locations(pinned)
    store_files(name, (("datasets/owner/pinned-full@x/a.jsonl", 2, "digest"),))
    revisions.write()
    assert "No space left on device" in caplog.text
    assert "the next start asks the hub for its data sets again" in caplog.text
    storage.readable = False
    with pytest.raises(StorageError, match="Input/output error"):
        RunRevisions(storage, RETRY_AT_ONCE).pin(config)
