"""Share the record of what a program's ranks import late with the standbys of the job's other pods.

A new pod has no record: without that of another pod, its first ranks would import these modules while training waits.

Guarantees:
- Names are bounded in number and length, and are those of modules. The standby of the receiver imports them only if
  they are installed in its image (`python_imports`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_agent.ranks.python_imports import read_recorded
from trainium_contract.wire.messages import MAX_IMPORTED_MODULES, MAX_MODULE_NAME_LENGTH, ImportedModules

if TYPE_CHECKING:
    from collections.abc import Iterable

_log = logging.getLogger(__name__)
_SETTLED_SECONDS = 3.0
"""Time without a further import after which a record is sent."""


class SharedImports:
    """The record of this pod; used in the event loop."""

    def __init__(self, record: str) -> None:
        """`record`: the file of an `ImportRecorder`; empty for none."""
        self._path = Path(record) if record else None
        self._size = 0
        self._newest: ImportedModules | None = None

    def read(self) -> ImportedModules | None:
        """Return the recorded modules, the same object until the record has changed; None before the first."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                status = self._path.stat()
                if status.st_size != self._size and time.time() - status.st_mtime > _SETTLED_SECONDS:
                    self._size = status.st_size
                    self._newest = _select_modules(read_recorded(str(self._path))) or self._newest
        return self._newest

    def add(self, imported: ImportedModules) -> None:
        """Add the modules of another pod to the record, from which the standby imports them."""
        if self._path is None:
            return
        known = set(read_recorded(str(self._path)))
        new = [name for name in imported.modules if name not in known]
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{name}\n" for name in new))
        except OSError as error:
            _log.warning("the modules of other pods are not imported ahead: %s: %s", self._path, error.strerror)
        else:
            _log.info("the standby imports %d modules that the ranks of another pod have imported", len(new))


def _select_modules(names: Iterable[str]) -> ImportedModules | None:
    """Return the modules to send: no packages whose submodules are sent too; None for none."""
    valid = [name for name in names if _is_module_name(name)]
    packages = {name.rpartition(".")[0] for name in valid}
    modules = [name for name in valid if name not in packages][:MAX_IMPORTED_MODULES]
    return ImportedModules(modules=tuple(modules)) if modules else None


def _is_module_name(name: str) -> bool:
    return name.isascii() and len(name) <= MAX_MODULE_NAME_LENGTH and all(map(str.isidentifier, name.split(".")))
