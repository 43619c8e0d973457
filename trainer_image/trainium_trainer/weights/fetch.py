"""`trainium-trainer fetch-model`: a model of the Hugging Face hub as a folder, by the hub's own library.

Invariants: the token comes from the environment variable HF_TOKEN, goes to the library and nowhere else; only what
training needs is fetched, no pickles; what cannot be trained is refused before its weights are fetched; files that are
there already are not fetched again, and a connection that breaks is continued within a file.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, TypeVar

from trainium_agent.linux.write_access import FORBIDDEN, explain_forbidden
from trainium_trainer.exits import StorageError, TrainerError, UserError
from trainium_trainer.models.huggingface import CONFIG_NAME, shape_of_document
from trainium_trainer.weights.folder import INDEX_NAME, WHOLE_NAME, ModelFolder, listed, weight_map

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")
_WANTED = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
_LOST = frozenset({"TransportError", "RequestException", "LocalEntryNotFoundError"})
"""Errors of a network, as the clients call them."""
_TOKEN = "HF_TOKEN"  # noqa: S105 - the variable's name


def fetch(name: str, output: Path, *, revision: str | None = None) -> str:
    """Fetch a model into a folder, which may hold a part of it already; returns what was fetched, for a person.

    Raises UserError when there is no such model, when it may not be read, or when it cannot be trained; StorageError
    when the hub cannot be reached or the folder cannot be written.
    """
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - only for this command

    token = os.environ.get(_TOKEN) or False  # not what a login has left on this machine
    endpoint = os.environ.get("HF_ENDPOINT") or None
    api = HfApi(endpoint=endpoint, token=token)
    info = _asked(lambda: api.model_info(name, revision=revision), name, revision)
    found = [each.rfilename for each in info.siblings or ()]
    files = [file for file in found if file in _WANTED]
    weights = next((file for file in (WHOLE_NAME, INDEX_NAME) if file in found), None)
    _refuse_without_weights(name, found, weights)

    def get(names: list[str]) -> None:
        _asked(
            lambda: snapshot_download(
                name, revision=info.sha, local_dir=output, allow_patterns=names, token=token, endpoint=endpoint
            ),
            name,
            revision,
        )

    def document_of(file: str) -> dict[str, Any]:
        get([file])
        try:
            document = json.loads((output / file).read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"fetch-model {name}: its {file} cannot be read: use another model") from error
        if not isinstance(document, dict):
            raise UserError(f"fetch-model {name}: its {file} holds no fields: use another model")
        return document

    shape_of_document(document_of(CONFIG_NAME), f"fetch-model {name}: {CONFIG_NAME}")
    assert weights is not None
    files.append(weights)
    if weights == INDEX_NAME:
        shards = sorted(set(weight_map(document_of(INDEX_NAME), f"fetch-model {name}").values()))
        if missing := [file for file in shards if file not in found]:
            raise UserError(
                f"fetch-model {name}: its {INDEX_NAME} names {listed(missing)}, not in the repository: use another "
                "revision"
            )
        files += shards
    get(files)
    ModelFolder.open(str(output), field="fetch-model")
    for part in (output / ".cache/huggingface/download").glob("*.incomplete"):
        part.unlink(missing_ok=True)  # of a process that was killed; the library restarts such a file
    size = sum((output / file).stat().st_size for file in files)
    return f"{len(files)} files, {size / 1e9:.2f} GB, commit {info.sha}"


def _refuse_without_weights(name: str, found: list[str], weights: str | None) -> None:
    if CONFIG_NAME not in found:
        raise UserError(f"fetch-model {name}: has no {CONFIG_NAME}: it is no model for transformers, use another one")
    if weights is None:
        stored = [file for file in found if file.endswith((".safetensors", ".bin", ".pt", ".pth"))]
        holds = f", only {listed(stored)}" if stored else ""
        raise UserError(
            f"fetch-model {name}: has neither {WHOLE_NAME} nor {INDEX_NAME}{holds}: use a revision that has one of "
            "them, or save the model again with transformers (safe_serialization=True)"
        )


def _asked(request: Callable[[], T], name: str, revision: str | None) -> T:
    """Return the hub's answer; its refusals as sentences."""
    try:
        return request()
    except Exception as error:
        explained = _explained(error, name, revision)
        if explained is None:
            raise
        raise explained from error


def _explained(error: Exception, name: str, revision: str | None) -> TrainerError | None:
    """Return the error to raise for one of the hub's library; None for an unknown one."""
    from huggingface_hub import errors  # noqa: PLC0415 - only for this command

    where = f"fetch-model {name}"
    lost = StorageError(f"{where}: the hub cannot be reached: look at the network, then start again")
    match error:
        case errors.GatedRepoError():
            return UserError(
                f"{where}: the model is gated: accept its terms on its page of the hub, and set {_TOKEN} to a token of "
                "that account"
            )
        case errors.RevisionNotFoundError():
            return UserError(f"{where}: has no revision {revision}: correct --revision or leave it out")
        case errors.RepositoryNotFoundError():
            return UserError(
                f"{where}: there is no such model, or it may not be read: correct the name, or set {_TOKEN} if it is "
                "private"
            )
        case errors.HFValidationError():
            return UserError(f"{where}: is not the name of a model: write owner/name")
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return UserError(f"{where}: the hub refused the token: set {_TOKEN} to one that may read it")
        case errors.HfHubHTTPError():
            status = error.response.status_code
            return StorageError(f"{where}: the hub answered {status}: start again later, what is there stays")
        case errors.LocalEntryNotFoundError() | ConnectionError() | TimeoutError():
            return lost
        case OSError(errno=int() as number):
            advice = explain_forbidden(number) if number in FORBIDDEN else "free space"
            return StorageError(
                f"{where}: cannot be written ({error.strerror}): {advice}, or name another folder by --output"
            )
    # By name: the library has changed the client that it asks by before.
    return lost if {kind.__name__ for kind in type(error).__mro__} & _LOST else None
