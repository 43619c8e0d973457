"""Find the folders that replace the contents of an image: virtual environment, interpreter, editable sources.

A volume may hide a folder that contains one of them (for instance a checkout below /tmp). In a real image the programs
are elsewhere, so they are mounted again below such a volume.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.wire.worker_env import AGENT_MOUNT
from trainium_devcluster.node.processes.command import Mount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def find_program_folders(bin_folder: Path, search_path: Sequence[str] = sys.path) -> tuple[str, ...]:
    """Return the outermost folders that contain the programs of `bin_folder` and their modules."""
    folders = {bin_folder.absolute().parent}
    interpreter = bin_folder / "python"
    if interpreter.exists():
        folders.add(interpreter.resolve().parents[1])
    folders |= {Path(entry).resolve() for entry in search_path if entry and Path(entry).is_dir()}
    return tuple(sorted(str(folder) for folder in folders if not any(other in folder.parents for other in folders)))


def remount_hidden(volumes: Iterable[Mount], folders: Iterable[str], state_dir: str) -> tuple[Mount, ...]:
    """Return mounts of the folders that a volume hides; volumes of the machine (`hostPath`) are not changed."""
    pod_volumes = [
        mount.target.rstrip("/") + "/" for mount in volumes if mount.source.startswith(state_dir.rstrip("/") + "/")
    ]
    return tuple(
        Mount(folder, folder, read_only=True)
        for folder in folders
        if any(folder.startswith(volume) for volume in pod_volumes)
    )


AGENT_IMAGE = "trainium-agent"
"""Name of the image, without registry and tag, that contains the agent with its interpreter."""


def create_agent_image(folder: Path, bin_folder: Path) -> None:
    """Create the contents of the agent's image, as links to the virtual environment's interpreter, loader and packages.

    A copy starts as in a foreign image: by its loader, and without the PATH.
    """
    python = (bin_folder / "python").resolve()
    maps = Path("/proc/self/maps").read_text().split()
    loader = next(Path(path).resolve() for path in maps if Path(path).name.startswith(("ld-linux", "ld-musl", "ld.so")))
    packages = next((bin_folder.absolute().parent / "lib").glob("python*/site-packages"))
    spec = importlib.util.find_spec("trainium_worker")
    worker = Path(spec.origin).parent if spec is not None and spec.origin else None
    links = {
        "bin/python": python,
        "lib/ld.so": loader,
        f"lib/{packages.parent.name}/site-packages": packages,
        **({"site/trainium_worker": worker} if worker else {}),
    }
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    (folder / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")


def build_agent_mounts(image: str, folder: Path) -> tuple[Mount, ...]:
    """Return the mounts of the agent for a container of its image; none for other images."""
    name = image.rpartition("/")[2].partition("@")[0].partition(":")[0]
    return (Mount(str(folder), AGENT_MOUNT, read_only=True),) if name == AGENT_IMAGE else ()
