"""Push an artifact of the last step to a repository of the Hugging Face hub.

Guarantees:
- A repository that the token may not write to is refused before the first step; a restart does not ask the hub.
- All files of an artifact are one commit; a repeated push of the same files adds no commit.
"""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_trainer.artifacts.stage import kinds_of
from trainium_trainer.exits import UserError
from trainium_trainer.storage.hub import TOKEN, Repository, api, ask, token

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
    where, kinds = f"artifacts.push {push.repo}", kinds_of(config)
    if _kind_of(push, kinds) not in kinds:
        raise UserError(f"{where}: the run writes no {_kind_of(push, kinds)}: add it to artifacts.kinds")
    if not token():
        raise UserError(f"{where}: needs a token: set the environment variable {TOKEN} from a Secret")
    _create_repository(push)


def push_artifact(push: PushConfig, artifacts: Sequence[ArtifactReport], beat: Callable[[], None]) -> str:
    """Upload one of the artifacts and return the address of the commit; `beat` is called meanwhile.

    Raises UserError and StorageError.
    """
    kind = _kind_of(push, [ArtifactKind(artifact.kind) for artifact in artifacts])
    artifact = next(artifact for artifact in artifacts if artifact.kind == kind)
    _create_repository(push)  # the first start may have ended before it did
    upload = api().upload_folder(
        repo_id=push.repo,
        folder_path=artifact.path,
        commit_message=f"{kind} of step {artifact.step}",
        run_as_future=True,
    )
    while not wait([upload], timeout=_BEAT_SECONDS).done:
        beat()
    return ask(lambda: str(upload.result().commit_url), _repository(push))


def _kind_of(push: PushConfig, kinds: Sequence[ArtifactKind]) -> ArtifactKind:
    return push.kind or (ArtifactKind.ADAPTER if ArtifactKind.MODEL not in kinds else ArtifactKind.MODEL)


def _create_repository(push: PushConfig) -> None:
    ask(lambda: api().create_repo(push.repo, private=push.private, exist_ok=True), _repository(push))


def _repository(push: PushConfig) -> Repository:
    return Repository("artifacts.push", push.repo, "repository", access="write to it")
