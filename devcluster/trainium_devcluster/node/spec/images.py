"""Replace images by folders of modules that programs import first, or mark images that cannot be pulled.

A node has no images: any name starts the programs of the virtual environment. An image may have separate modules, one
file for each name, so that two versions run side by side.
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
