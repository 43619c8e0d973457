"""One data file of an artifact as a stream: the next rows are made while the newest are hashed and written.

Invariant: memory holds the rows that are written and the few that come next.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

from trainium_trainer.artifacts.manifest import ArtifactFile
from trainium_trainer.checkpoint.format.shards import bytes_of
from trainium_trainer.weights.tensors import TORCH_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor

    from trainium_trainer.artifacts.layout import PlannedFile
    from trainium_trainer.storage.protocol import Storage

CHUNK_BYTES = 16 << 20
"""Of the rows that are made at once, in float32: what the C library gives again without new pages."""
_FLOAT32_BYTES = 4
_MADE_AHEAD = 2


def write_file(
    storage: Storage,
    file: PlannedFile,
    rows: Callable[[str, int, int, torch.dtype], Tensor],
    beat: Callable[[int], None],
) -> ArtifactFile:
    """Write a file; `rows` returns some rows of a tensor, `beat` is called with the bytes that the store has written.

    Raises OSError when the store fails, and what `rows` raises.
    """
    sha = hashlib.sha256()
    failures: list[BaseException] = []
    with ThreadPoolExecutor(_MADE_AHEAD + 1, thread_name_prefix="artifact") as pool:

        def pieces() -> Iterator[memoryview]:
            try:
                yield from _pieces(file, rows, sha.update, pool, beat)
            except GeneratorExit:
                raise
            except BaseException as error:
                failures.append(error)
                raise

        try:
            storage.write_stream(file.name, pieces(), file.size)
        except BaseException:
            if failures:  # some stores wrap it in another error
                raise failures[0] from None
            raise
    return ArtifactFile(name=file.name, size=file.size, digest=sha.hexdigest())


def _pieces(
    file: PlannedFile,
    rows: Callable[[str, int, int, torch.dtype], Tensor],
    update: Callable[[memoryview], None],
    pool: ThreadPoolExecutor,
    beat: Callable[[int], None],
) -> Iterator[memoryview]:
    dtype = TORCH_TYPES[file.dtype]

    def make(part: tuple[str, int, int]) -> memoryview:
        return bytes_of(rows(*part, dtype))

    header = memoryview(file.header)
    update(header)
    yield header
    parts = _parts(file)
    coming = deque(pool.submit(make, part) for part in islice(parts, _MADE_AHEAD))
    hashed: Future[None] | None = None
    while coming:
        view = coming.popleft().result()
        coming.extend(pool.submit(make, part) for part in islice(parts, 1))
        if hashed is not None:
            hashed.result()
        hashed = pool.submit(update, view)
        yield view
        beat(len(view))
    if hashed is not None:
        hashed.result()


def _parts(file: PlannedFile) -> Iterator[tuple[str, int, int]]:
    """Tensor, first row and number of rows of each piece, in the file's order."""
    for name, size in file.tensors:
        most = max(1, CHUNK_BYTES // (_FLOAT32_BYTES * math.prod(size[1:])))
        for first in range(0, size[0], most):
            yield name, first, min(most, size[0] - first)
