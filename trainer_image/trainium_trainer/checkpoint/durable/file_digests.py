"""Digests of written files on their way to the coordinator, until they are enough for a table.

A rank of the tree that has received the digests of many files writes them itself and passes on what the manifest needs,
a fifth to a tenth of it.

Guarantees:
- A table holds the files of one stretch of places, and no file of it is in another.
- A rank whose ranks hold other places than their numbers passes everything on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainium_trainer.checkpoint.format.shards import WrittenFile, WrittenTable, enough_for_a_table


@dataclass(frozen=True, slots=True)
class DigestReport:
    """The digests of one rank's file, or of several together."""

    is_ordered: bool
    """Whether the places of these ranks are the numbers of these ranks."""
    files: tuple[tuple[int, WrittenFile], ...] = ()
    """By place; those that are in no table yet."""
    tables: tuple[WrittenTable, ...] = ()

    @staticmethod
    def of(rank: int, place: int, file: WrittenFile | None) -> DigestReport:
        """Report the file of one rank, if it has written one."""
        return DigestReport(place == rank, () if file is None else ((place, file),))


Write = Callable[[Mapping[int, WrittenFile], list[int]], list[WrittenTable]]


def fold_reports(reports: list[DigestReport], write: Write) -> list[DigestReport]:
    """Return what a rank passes on of the reports that it has received, its own first.

    `write` writes tables of some files by place, none of which reaches beyond one of the places where others begin.
    """
    files = tuple(pair for each in reports for pair in each.files)
    tables = tuple(table for each in reports for table in each.tables)
    is_ordered = all(each.is_ordered for each in reports)
    if is_ordered and enough_for_a_table(file for _, file in files):
        tables += tuple(write(dict(files), [table.first for table in tables]))
        files = ()
    return [DigestReport(is_ordered, files, tables)]
