"""Replace images by folders of modules that programs import first, or mark images that cannot be pulled.

A node has no images: any name runs the programs of the virtual environment. An image may have separate modules,
configured in one file for each name, so that two versions run side by side.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote


class PullError(Exception):
    """The image cannot be pulled."""


@dataclass(frozen=True, slots=True)
class Image:
    """Folders of modules that precede those of the virtual environment; may be empty."""

    modules: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the additional variables of the image's containers."""
        return {"PYTHONPATH": ":".join(self.modules)} if self.modules else {}


def write_image(folder: Path, name: str, modules: Sequence[Path] | None) -> None:
    """Set the modules of an image; None: it cannot be pulled."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f".{quote(name, safe='')}"
    draft.write_text(json.dumps(None if modules is None else [str(path.absolute()) for path in modules]))
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
