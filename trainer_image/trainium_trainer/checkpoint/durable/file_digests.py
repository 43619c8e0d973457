"""What ranks that have written say on the way to the coordinator: digests, until they are enough for a table.

A rank of the tree that has heard of many files writes their digests itself and passes on what the manifest needs, a
fifth to a tenth of it. Invariants: a table holds the files of one stretch of places, and no file of it is in another; a
rank whose ranks hold other places than their own numbers passes everything on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainium_trainer.checkpoint.format.shards import WrittenFile, WrittenTable, enough_for_a_table


@dataclass(frozen=True, slots=True)
class Said:
    """Of one rank, or of several together."""

    at_home: bool
    """Whether the places of these ranks are the numbers of these ranks."""
    files: tuple[tuple[int, WrittenFile], ...] = ()
    """By place; those that are in no table yet."""
    tables: tuple[WrittenTable, ...] = ()

    @staticmethod
    def of(rank: int, place: int, file: WrittenFile | None) -> Said:
        """What one rank says of its file, if it has written one."""
        return Said(place == rank, () if file is None else ((place, file),))


Write = Callable[[Mapping[int, WrittenFile], list[int]], list[WrittenTable]]


def folded(said: list[Said], write: Write) -> list[Said]:
    """What a rank passes on of what it has heard, its own first.

    `write` writes tables of some files by place, none of which reaches beyond one of the places where others begin.
    """
    files = tuple(pair for each in said for pair in each.files)
    tables = tuple(table for each in said for table in each.tables)
    at_home = all(each.at_home for each in said)
    if at_home and enough_for_a_table(file for _, file in files):
        tables += tuple(write(dict(files), [table.first for table in tables]))
        files = ()
    return [Said(at_home, files, tables)]
