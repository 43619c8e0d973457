"""Find the checkpoints that a program has written.

Guarantees:
- Nothing is written, moved or deleted.
- Folders are listed in a separate thread, since storage may hang.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.spec.program import STEP_GROUP, ProgramCheckpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_ENTRIES = 20_000
"""Number of paths that are looked at."""
_LIST_SECONDS = 10.0
_CREATED_SECONDS = 3600.0
"""Time after which a program must have saved its first checkpoint."""
_STEPS = 1024
"""Number of steps whose ends are known when a file is found to have been replaced."""


def find_committed(checkpoints: ProgramCheckpoints) -> Iterator[tuple[int, Path]]:
    """Yield step and marker of each complete checkpoint; -1 for a file that each save replaces. Raises OSError."""
    root, pattern = Path(checkpoints.path), checkpoints.committed_pattern()
    for path in islice(root.glob(checkpoints.committed.replace("{step}", "*")), MAX_ENTRIES):
        if checkpoints.is_replaced:
            yield -1, path
        elif match := pattern.fullmatch(str(path.relative_to(root))):
            yield int(match[STEP_GROUP]), path


class CheckpointFolder:
    """Finds the newest checkpoint of a program."""

    def __init__(self, checkpoints: ProgramCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._root = Path(checkpoints.path)
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS)
        """When steps ended, by Unix seconds; only for a file that each save replaces."""
        self._written: float | None = None
        """When that file was written last."""
        self.newest = -1
        self.problem = ""
        self._began = time.monotonic()
        self._listing = threading.Lock()
        threading.Thread(target=self._follow, name="checkpoints", daemon=True).start()

    def record_step(self, updated: float, step: int) -> None:
        """Record the newest step, and the Unix seconds of its end."""
        if self._checkpoints.is_replaced and (updated, step) not in list(self._steps)[-1:]:
            self._steps.append((updated, step))

    def list_now(self) -> threading.Thread:
        """List the folder now, in a thread that is returned."""
        thread = threading.Thread(target=self._list, name="checkpoints-now", daemon=True)
        thread.start()
        return thread

    def _follow(self) -> None:
        while True:
            self._list()
            time.sleep(_LIST_SECONDS)

    def _list(self) -> None:
        with self._listing:
            try:
                self.newest, self.problem = self._find_newest(), ""
            except OSError as error:
                self.problem = (
                    f"program.checkpoints.path {self._root} cannot be listed ({error.strerror or error}): mount the "
                    "volume there, or correct the path"
                )

    def _find_newest(self) -> int:
        """Return the newest step whose checkpoint is complete. Raises OSError."""
        if not self._root.is_dir():
            # A program creates the folder with its first checkpoint; its volume is mounted from the start.
            if Path(*self._root.parts[:2]).is_dir() and time.monotonic() < self._began + _CREATED_SECONDS:
                return -1
            raise FileNotFoundError(errno.ENOENT, "it does not exist")
        if self._checkpoints.is_replaced:
            return self._find_replaced()
        return max((step for step, _ in find_committed(self._checkpoints)), default=-1)

    def _find_replaced(self) -> int:
        """Return the newest step that had ended when the file was written. Raises OSError."""
        try:
            written = (self._root / self._checkpoints.committed).stat().st_mtime
        except FileNotFoundError:
            return self.newest
        if written == self._written:
            return self.newest
        self._written = written
        return max((step for updated, step in [*self._steps] if updated <= written), default=self.newest)
