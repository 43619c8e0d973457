"""Push an artifact of the last step to a repository of the Hugging Face hub.

Guarantees:
- A repository without write permission is refused before the first step; a restart does not access the hub.
- All files of an artifact are one commit; a repeated push of the same files adds no commit.
"""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_trainer.artifacts.stage import list_artifact_kinds
from trainium_trainer.exits import UserError
from trainium_trainer.storage.hub import TOKEN, Repository, call_hub, create_client, find_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_contract.status.results import ArtifactReport
    from trainium_contract.trainer.artifacts import PushConfig
    from trainium_contract.trainer.config import TrainingConfig

_BEAT_SECONDS = 1.0


def open_repository(config: TrainingConfig) -> None:
    """Create the repository of `artifacts.push` if it does not exist. Raises UserError and StorageError."""
    push = config.artifacts.push
    if push is None:
        return
    setting, kinds = f"artifacts.push {push.repo}", list_artifact_kinds(config)
    if _select_kind(push, kinds) not in kinds:
        raise UserError(f"{setting}: the run writes no {_select_kind(push, kinds)}: add it to artifacts.kinds")
    if not find_token():
        raise UserError(f"{setting}: needs a token: set the environment variable {TOKEN} from a Secret")
    _create_repository(push)


def push_artifact(push: PushConfig, artifacts: Sequence[ArtifactReport], heartbeat: Callable[[], None]) -> str:
    """Upload one of the artifacts and return the URL of the commit; `heartbeat` is called during the upload.

    Raises UserError and StorageError.
    """
    kind = _select_kind(push, [ArtifactKind(artifact.kind) for artifact in artifacts])
    artifact = next(artifact for artifact in artifacts if artifact.kind == kind)
    _create_repository(push)  # the first start may have ended before it created the repository
    upload = create_client().upload_folder(
        repo_id=push.repo,
        folder_path=artifact.path,
        commit_message=f"{kind} of step {artifact.step}",
        run_as_future=True,
    )
    while not wait([upload], timeout=_BEAT_SECONDS).done:
        heartbeat()
    return call_hub(lambda: str(upload.result().commit_url), _format_repository(push))


def _select_kind(push: PushConfig, kinds: Sequence[ArtifactKind]) -> ArtifactKind:
    return push.kind or (ArtifactKind.ADAPTER if ArtifactKind.MODEL not in kinds else ArtifactKind.MODEL)


def _create_repository(push: PushConfig) -> None:
    call_hub(
        lambda: create_client().create_repo(push.repo, private=push.private, exist_ok=True), _format_repository(push)
    )


def _format_repository(push: PushConfig) -> Repository:
    return Repository("artifacts.push", push.repo, "repository", access="write to it")
