"""Read a TrainingJob from a file for `kubectl apply -f`, which may contain other objects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.raw import read_mapping, read_text
from trainium_contract.wire.worker_env import KIND

if TYPE_CHECKING:
    import os


def read_manifest(path: str | os.PathLike[str], name: str = "") -> dict[str, Any]:
    """Return the TrainingJob in the file, or the one of that name. Raises ClientError for none and for several."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            documents = list(yaml.safe_load_all(file))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ClientError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    jobs: dict[str, dict[str, Any]] = {
        read_text(read_mapping(document, "metadata"), "name"): document
        for document in documents
        if _is_named_job(document)
    }
    if not jobs:
        raise ClientError(f"{path} has no {KIND} with a name")
    if name in jobs:
        return jobs[name]
    if name or len(jobs) > 1:
        problem = f"no {KIND} {name!r}" if name else f"more than one {KIND}"
        raise ClientError(f"{path} has {problem}; there are {', '.join(sorted(jobs))}")
    return next(iter(jobs.values()))


def _is_named_job(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and document.get("kind") == KIND
        and bool(read_text(read_mapping(document, "metadata"), "name"))
    )
