"""What stands for an image: folders of modules that its programs read first, or that nobody can pull it.

A node has no images: any name starts the programs of the virtual environment. So that two versions can be seen side by
side, a name may be given modules of its own, one file for each name. Invariant: a name without a file is as before.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote


class PullError(Exception):
    """The image cannot be had."""


@dataclass(frozen=True, slots=True)
class Image:
    """Folders of modules, before those of the virtual environment; none: just those."""

    modules: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the variables that containers of the image have in addition."""
        return {"PYTHONPATH": ":".join(self.modules)} if self.modules else {}


def write_image(folder: Path, name: str, modules: Sequence[Path] | None) -> None:
    """Give the image separate modules; None: it cannot be pulled."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f".{quote(name, safe='')}"
    draft.write_text(json.dumps(None if modules is None else [str(each.absolute()) for each in modules]))
    draft.replace(folder / quote(name, safe=""))


def read_image(folder: Path, name: str) -> Image:
    """Return the image of that name.

    Raises:
        PullError: when it cannot be pulled.
    """
    file = folder / quote(name, safe="")
    if not name or not file.is_file():
        return Image()
    modules = json.loads(file.read_text())
    if modules is None:
        raise PullError(f"failed to pull and unpack image {name!r}: not found")
    return Image(tuple(modules))
