"""A TrainingJob in a file, as `kubectl apply -f` takes it; other objects may stand beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.raw import mapping, text
from trainium_contract.wire.worker_env import KIND

if TYPE_CHECKING:
    import os


def read_job(path: str | os.PathLike[str], name: str = "") -> dict[str, Any]:
    """Return the TrainingJob in the file, or the one of that name. Raises ClientError for none and for several."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            found = list(yaml.safe_load_all(file))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ClientError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    jobs: dict[str, dict[str, Any]] = {text(mapping(each, "metadata"), "name"): each for each in found if _is_job(each)}
    if not jobs:
        raise ClientError(f"{path} holds no {KIND} with a name")
    if name in jobs:
        return jobs[name]
    if name or len(jobs) > 1:
        wanted = f"no {KIND} {name!r}" if name else f"more than one {KIND}"
        raise ClientError(f"{path} holds {wanted}; there are {', '.join(sorted(jobs))}")
    return next(iter(jobs.values()))


def _is_job(found: Any) -> bool:
    return isinstance(found, dict) and found.get("kind") == KIND and bool(text(mapping(found, "metadata"), "name"))
