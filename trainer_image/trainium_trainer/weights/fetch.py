"""Fetch a model of the Hugging Face hub into a folder, with the hub's library: `trainium-trainer fetch-model`.

Guarantees:
- Only files that training needs are fetched, and no pickles.
- A model that cannot be trained is refused before its weights are fetched.
- Existing files are not fetched again, and an interrupted file is continued.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from trainium_contract.worker_process.write_access import FORBIDDEN, explain_forbidden
from trainium_trainer.data.tokens.tokenizer import OTHER_FORMATS, TOKENIZER_FILE, explain_conversion
from trainium_trainer.exits import StorageError, UserError
from trainium_trainer.models.huggingface import CONFIG_NAME, parse_shape
from trainium_trainer.storage.hub import Repository, call_hub, create_client, find_endpoint, find_token
from trainium_trainer.weights.folder import INDEX_NAME, WHOLE_NAME, ModelFolder, list_some, read_weight_map

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")
_WANTED = (
    CONFIG_NAME,
    "generation_config.json",
    TOKENIZER_FILE,
    *OTHER_FORMATS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "merges.txt",
)


def fetch(name: str, output: Path, *, revision: str | None = None) -> str:
    """Fetch a model into a folder, which may already hold a part of it; return a summary.

    Raises UserError if the model does not exist, may not be read or cannot be trained; StorageError if the hub cannot
    be reached or the folder cannot be written.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for this command

    repository = Repository("fetch-model", name, revision=revision)
    info = _request_from_hub(lambda: create_client().model_info(name, revision=revision), repository)
    present = [sibling.rfilename for sibling in info.siblings or ()]
    files = [file for file in present if file in _WANTED]
    weights = next((file for file in (WHOLE_NAME, INDEX_NAME) if file in present), None)
    _refuse_without_weights(name, present, weights)

    def get(names: list[str]) -> None:
        _request_from_hub(
            lambda: snapshot_download(
                name,
                revision=info.sha,
                local_dir=output,
                allow_patterns=names,
                token=find_token(),
                endpoint=find_endpoint(),
            ),
            repository,
        )

    def read_document(file: str) -> dict[str, Any]:
        get([file])
        try:
            document = json.loads((output / file).read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"fetch-model {name}: its {file} cannot be read: use another model") from error
        if not isinstance(document, dict):
            raise UserError(f"fetch-model {name}: its {file} holds no fields: use another model")
        return document

    parse_shape(read_document(CONFIG_NAME), f"fetch-model {name}: {CONFIG_NAME}")
    assert weights is not None
    files.append(weights)
    if weights == INDEX_NAME:
        shards = sorted(set(read_weight_map(read_document(INDEX_NAME), f"fetch-model {name}").values()))
        if missing := [file for file in shards if file not in present]:
            raise UserError(
                f"fetch-model {name}: its {INDEX_NAME} names {list_some(missing)}, not in the repository: use another "
                "revision"
            )
        files += shards
    get(files)
    ModelFolder.open(str(output), field="fetch-model")
    for part in (output / ".cache/huggingface/download").glob("*.incomplete"):
        part.unlink(missing_ok=True)  # incomplete files of a killed process; the library restarts them
    size = sum((output / file).stat().st_size for file in files)
    summary = f"{len(files)} files, {size / 1e9:.2f} GB, commit {info.sha}"
    if TOKENIZER_FILE in files:
        return summary
    advice = f"has no {TOKENIZER_FILE}: name another folder with one in data.tokenizer.path"
    return f"{summary}; the folder {explain_conversion(output) or advice}"


def _refuse_without_weights(name: str, present: list[str], weights: str | None) -> None:
    if CONFIG_NAME not in present:
        raise UserError(f"fetch-model {name}: has no {CONFIG_NAME}: it is no model for transformers, use another one")
    if weights is None:
        stored = [file for file in present if file.endswith((".safetensors", ".bin", ".pt", ".pth"))]
        holds = f", only {list_some(stored)}" if stored else ""
        raise UserError(
            f"fetch-model {name}: has neither {WHOLE_NAME} nor {INDEX_NAME}{holds}: use a revision that has one of "
            "them, or save the model again with transformers (safe_serialization=True)"
        )


def _request_from_hub(request: Callable[[], T], repository: Repository) -> T:
    """Return the hub's response. Raises UserError, and StorageError also if the folder cannot be written."""
    try:
        return call_hub(request, repository)
    except OSError as error:
        if error.errno is None:
            raise
        advice = explain_forbidden(error.errno) if error.errno in FORBIDDEN else "free space"
        raise StorageError(
            f"{repository.where}: cannot be written ({error.strerror}): {advice}, or name another folder by --output"
        ) from error
