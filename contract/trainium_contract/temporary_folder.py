"""Choose the folder for temporary files in a container whose root is read-only and that has no volume on /tmp."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_FOLDERS = ("/tmp", "/var/tmp", "/usr/tmp")  # noqa: S108 - the folders that Python's tempfile tries
_CACHE_VARIABLE = "XDG_CACHE_HOME"
"""Each container of a worker pod has it; the folder is a volume of the pod."""


def set_temporary_folder(environment: MutableMapping[str, str]) -> None:
    """Set TMPDIR to a folder in the pod's cache, for this process and its children, where no usual one is writable."""
    usual = (*filter(None, map(environment.get, _VARIABLES)), *_FOLDERS)
    if any(_is_writable(folder) for folder in usual) or not environment.get(_CACHE_VARIABLE):
        return
    folder = os.path.join(environment[_CACHE_VARIABLE], "tmp")  # noqa: PTH118 - pathlib takes the agent 3 ms to import
    with suppress(OSError):  # the user of a temporary file reports that none can be written
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - as above
        environment["TMPDIR"] = folder


def _is_writable(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)  # noqa: PTH112 - as above
