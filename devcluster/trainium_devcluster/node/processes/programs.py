"""Find the folders that replace the contents of an image: virtual environment, interpreter, editable sources.

A volume may be mounted over a folder that contains one of them (for instance a checkout below /tmp). A real image has
the programs elsewhere, so they are mounted again below such a volume.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_devcluster.node.processes.container_root import Mount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def program_folders(bin_folder: Path, search_path: Sequence[str] = sys.path) -> tuple[str, ...]:
    """Return the outermost folders that programs of `bin_folder` and their modules are read from."""
    found = {bin_folder.absolute().parent}
    interpreter = bin_folder / "python"
    if interpreter.exists():
        found.add(interpreter.resolve().parents[1])
    found |= {Path(entry).resolve() for entry in search_path if entry and Path(entry).is_dir()}
    return tuple(sorted(str(one) for one in found if not any(other in one.parents for other in found)))


def shown_again(volumes: Iterable[Mount], folders: Iterable[str], state_dir: str) -> tuple[Mount, ...]:
    """Mounts for the folders that a volume hides; volumes of the machine (`hostPath`) are left as they are."""
    own = [mount.target.rstrip("/") + "/" for mount in volumes if mount.source.startswith(state_dir.rstrip("/") + "/")]
    return tuple(Mount(folder, folder, read_only=True) for folder in folders if any(folder.startswith(p) for p in own))
