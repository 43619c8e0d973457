"""Write directories whose files change atomically, in the layout of a kubelet.

The files are in a directory with a time in its name; `..data` is a symlink to it and every visible entry a symlink
through `..data`. Invariants: a reader that opens `..data` once sees one version of all files; a change is one rename;
nothing is written when nothing changed.
"""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from trainium_devcluster.node.spec.config_data import ProjectedFile

_DATA = "..data"
_NEW_DATA = "..data_tmp"


def write(folder: Path, files: Mapping[str, ProjectedFile]) -> bool:
    """Write exactly `files` (by relative path) to `folder`; return whether anything changed."""
    folder.mkdir(parents=True, exist_ok=True)
    current = folder / _DATA
    if current.is_symlink() and _read(current) == dict(files):
        return False
    old = os.readlink(current) if current.is_symlink() else None  # noqa: PTH115 - the text of the link, not what it leads to
    new_folder = folder / f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{time.time_ns() % 10**9:09d}"
    new_folder.mkdir()
    for path, content in files.items():
        target = new_folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.data)
        target.chmod(content.mode)
    link = folder / _NEW_DATA
    link.unlink(missing_ok=True)
    link.symlink_to(new_folder.name)
    link.replace(current)
    _update_links(folder, {path.split("/", 1)[0] for path in files})
    if old is not None:
        shutil.rmtree(folder / old, ignore_errors=True)
    return True


def _update_links(folder: Path, names: set[str]) -> None:
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in names:
            entry.unlink()
    for name in names:
        entry = folder / name
        if not entry.is_symlink():
            entry.symlink_to(f"{_DATA}/{name}")


def _read(folder: Path) -> dict[str, ProjectedFile]:
    files: dict[str, ProjectedFile] = {}
    base = folder.resolve()
    for path in base.rglob("*"):
        if path.is_file():
            files[str(path.relative_to(base))] = ProjectedFile(path.read_bytes(), path.stat().st_mode & 0o7777)
    return files
