"""Removal of folders that pods have written in."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def remove_tree(folder: Path) -> None:
    """Remove `folder` with all below it, also directories that were made unreadable (overlay work directories are)."""

    def unlock(_: object, path: str, __: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IRWXU)  # noqa: PTH101 - rmtree gives text
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)  # noqa: PTH108, PTH112

    shutil.rmtree(folder, onerror=unlock)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
