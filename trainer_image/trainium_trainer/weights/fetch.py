"""`trainium-trainer fetch-model`: a model of the Hugging Face hub as a folder, by the hub's own library.

Invariants: only what training needs is fetched, no pickles; what cannot be trained is refused before its weights are
fetched; files that are there already are not fetched again, and a connection that breaks is continued within a file.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from trainium_agent.linux.write_access import FORBIDDEN, explain_forbidden
from trainium_trainer.exits import StorageError, UserError
from trainium_trainer.models.huggingface import CONFIG_NAME, shape_of_document
from trainium_trainer.storage.hub import Repository, api, ask, endpoint, token
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


def fetch(name: str, output: Path, *, revision: str | None = None) -> str:
    """Fetch a model into a folder, which may hold a part of it already; returns what was fetched, for a person.

    Raises UserError when there is no such model, when it may not be read, or when it cannot be trained; StorageError
    when the hub cannot be reached or the folder cannot be written.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for this command

    about = Repository("fetch-model", name, revision=revision)
    info = _asked(lambda: api().model_info(name, revision=revision), about)
    found = [each.rfilename for each in info.siblings or ()]
    files = [file for file in found if file in _WANTED]
    weights = next((file for file in (WHOLE_NAME, INDEX_NAME) if file in found), None)
    _refuse_without_weights(name, found, weights)

    def get(names: list[str]) -> None:
        _asked(
            lambda: snapshot_download(
                name, revision=info.sha, local_dir=output, allow_patterns=names, token=token(), endpoint=endpoint()
            ),
            about,
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


def _asked(request: Callable[[], T], about: Repository) -> T:
    """Return the hub's response. Raises UserError, and StorageError also where the folder cannot be written."""
    try:
        return ask(request, about)
    except OSError as error:
        if error.errno is None:
            raise
        advice = explain_forbidden(error.errno) if error.errno in FORBIDDEN else "free space"
        raise StorageError(
            f"{about.where}: cannot be written ({error.strerror}): {advice}, or name another folder by --output"
        ) from error
