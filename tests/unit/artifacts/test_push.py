"""Push artifacts to a hub on loopback, through the library of the hub."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.hub_server import PART_BYTES, HubServer, run_hub
from trainium_contract.status.results import ArtifactReport
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.artifacts.push import open_repository, push_artifact
from trainium_trainer.exits import StorageError, UserError

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # from huggingface_hub about httpx
TOKEN = "hf_token_that_must_never_be_shown"
REPO = "acme/tuned"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # Xet's service is not on loopback
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with run_hub(monkeypatch) as server:
        server.writer = TOKEN
        yield server


def config(**push: Any) -> TrainingConfig:
    tuning = {"method": "LoRA"}
    return TrainingConfig.model_validate(
        {"model": {"weights": "/base"}, "tuning": tuning, "artifacts": {"push": {"repo": REPO} | push}}
    )


def write_artifacts(tmp_path: Path) -> list[ArtifactReport]:
    reports = []
    for kind in ("Adapter", "Model"):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "README.md").write_text(f"---\nlicense: mit\n---\n{kind}")
        (folder / "weights.safetensors").write_bytes(kind.encode() * (PART_BYTES // 2))
        reports.append(ArtifactReport(kind=kind, path=str(folder), step=7))
    return reports


def test_a_push_is_one_commit_and_an_unchanged_push_adds_none(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    push = config().artifacts.push
    for _ in range(2):
        open_repository(config())
    (created,) = hub.created
    assert created["visibility"] == "private"
    artifacts = write_artifacts(tmp_path)
    address = push_artifact(push, artifacts, lambda: None)
    assert address.startswith(f"{hub.url}/{REPO}/commit/")
    (_, commit) = hub.repositories[REPO].commits.values()
    assert {name: data for name, data in commit.items() if name != ".gitattributes"} == {
        file.name: file.read_bytes() for file in (tmp_path / "Model").iterdir()
    }
    adapter = config(kind="Adapter").artifacts.push
    push_artifact(adapter, artifacts, lambda: None)
    assert [*hub.repositories[REPO].commits.values()][-1]["weights.safetensors"] == b"Adapter" * (PART_BYTES // 2)
    commits = len(hub.repositories[REPO].commits)
    push_artifact(adapter, artifacts, lambda: None)
    assert len(hub.repositories[REPO].commits) == commits
    assert TOKEN not in caplog.text
    assert {request.token for request in hub.requests if request.method == "POST"} <= {f"Bearer {TOKEN}", None}


def test_a_push_that_cannot_succeed_is_refused_before_the_first_step(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.writer = "another"
    with pytest.raises(UserError, match=rf"artifacts.push {REPO}: the hub refused the token: set HF_TOKEN to one that"):
        open_repository(config())
    full = TrainingConfig.model_validate({"artifacts": {"push": {"repo": REPO}}})
    with pytest.raises(UserError, match=r"the run writes no Adapter: add it to artifacts.kinds"):
        open_repository(full)
    hub.status = 500
    with pytest.raises(StorageError, match="the hub answered 500"):
        open_repository(config())
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"needs a token: set the environment variable HF_TOKEN from a Secret"):
        open_repository(config())


def test_a_failed_upload_commits_nothing_and_its_repetition_sends_only_missing_files(
    hub: HubServer, tmp_path: Path
) -> None:
    push = config().artifacts.push
    artifacts = write_artifacts(tmp_path)
    hub.status, hub.failing = 403, "lfs/"
    with pytest.raises(UserError, match=r"the hub refused the token: set HF_TOKEN to one that may write to it"):
        push_artifact(push, artifacts, lambda: None)
    hub.status, hub.failing = 500, "api/models/acme/tuned/commit"
    with pytest.raises(StorageError, match="the hub answered 500"):
        push_artifact(push, artifacts, lambda: None)
    assert [*hub.repositories[REPO].commits.values()] == [{}]
    hub.status = None
    hub.requests.clear()
    push_artifact(push, artifacts, lambda: None)
    assert not any(request.method == "PUT" for request in hub.requests), "the hub has the object"
    (_, commit) = hub.repositories[REPO].commits.values()
    assert commit["weights.safetensors"] == b"Model" * (PART_BYTES // 2)


@pytest.mark.parametrize(
    ("artifacts", "sentence"),
    [
        ({"push": {"repo": "tuned"}}, "write the name of a repository on the hub, owner/name"),
        ({"push": {"repo": REPO}, "path": "s3://bucket/a"}, "set artifacts.path to a mounted folder"),
    ],
)
def test_a_wrong_push_is_refused(artifacts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainingConfig.model_validate({"artifacts": artifacts})
