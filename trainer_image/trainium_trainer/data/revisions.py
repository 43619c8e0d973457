"""Record the commits and file lists of the hub's data sets, and a date, at the first start of a run.

The record is below the checkpoints of the run. The date is that of chat templates that ask for one.

Guarantees:
- A moved branch does not affect a run: every later start reads the files of the recorded commits.
- Such a start requests only the contents of missing files from the hub.
- Without a record, all ranks read the commits that rank 0 found, even while a branch moves.
- Only the owner of the checkpoints writes the record.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from trainium_contract.base import MessageModel
from trainium_trainer.data.examples.recipe import pin_date
from trainium_trainer.data.sources.files import HUB
from trainium_trainer.data.sources.hub import (
    HubFiles,
    find_commit,
    format_location,
    list_files,
    list_parts,
    parse_location,
    store_files,
)
from trainium_trainer.data.sources.resolve import list_locations
from trainium_trainer.exits import UserError
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.protocol import Retry, Storage, read_small

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from trainium_contract.trainer.data import DataConfig, HubConfig

RECORD_NAME = "DATA-REVISIONS"
_log = logging.getLogger("trainium.data")


class _Record(MessageModel):
    """The contents of the file."""

    commits: dict[str, str] = Field(default_factory=dict)
    """The commit by data set and revision, as owner/name@main."""
    files: dict[str, HubFiles] = Field(default_factory=dict)
    """The files by location with a commit."""
    date: str | None = None
    """The date of chat templates."""


class RunRevisions:
    """The record of a run at one start."""

    def __init__(
        self,
        storage: Storage,
        retry: Retry | None = None,
        *,
        rank: int = 0,
        open_store: Callable[[], Store | None] = lambda: None,
    ) -> None:
        """Create the record; `open_store` returns a store that all ranks can reach, None for a single rank."""
        self._storage, self._retry = storage, retry or Retry()
        self._rank, self._open_store = rank, open_store
        self._store: Store | None = None
        self._known = _Record()
        self._commits: dict[str, str] = {}
        self._locations: list[str] = []
        self._date: str | None = None

    def pin(self, config: DataConfig) -> DataConfig:
        """Return the configuration with the recorded commits and date, and the current ones where none is recorded.

        Collective if data come from the hub or depend on a date. Raises UserError and StorageError.
        """
        dated = pin_date(config, None) != config
        if not dated and not any(name.startswith(HUB) for name in list_locations(config)):
            return config
        self._known = self._read()
        self._store = self._open_store()
        if self._store is not None and self._rank > 0:
            first = _Record.model_validate_json(self._store.get(RECORD_NAME))
            self._commits, self._date = first.commits, first.date
        if dated:
            config = pin_date(config, self._date or self._known.date)
            self._date = config.examples.chat.date
        split, sources = config.validation, config.sources
        pinned = config.model_copy(
            update={
                "source": config.source and self._pin_name(config.source),
                "hub": config.hub and self._pin_config(config.hub),
                "sources": sources
                and tuple(
                    source.model_copy(
                        update={
                            "source": source.source and self._pin_name(source.source),
                            "hub": source.hub and self._pin_config(source.hub),
                        }
                    )
                    for source in sources
                ),
                "validation": split
                and split.model_copy(update={"source": split.source and self._pin_name(split.source)}),
            }
        )
        if self._store is not None and self._rank == 0:
            self._store.set(RECORD_NAME, _Record(commits=self._commits, date=self._date).model_dump_json())
        on_hub = [name for name in list_locations(pinned) if name.startswith(HUB)]
        self._locations = [location for name in on_hub for _, location in list_parts(name)]
        for name in self._locations:
            if name in self._known.files:
                store_files(name, self._known.files[name])
        return pinned

    def write(self) -> None:
        """Write the commits of `pin`, on rank 0, once the run owns its checkpoints; a full store only warns."""
        files = {name: list_files(name) for name in self._locations}
        record = _Record(commits=self._commits, files=files, date=self._date)
        if record == self._known:
            return
        location = f"{self._storage.location}/{RECORD_NAME}"
        data = record.model_dump_json(by_alias=True).encode()
        try:
            Retry(self._retry.delays[:1], self._retry.sleep).run(
                lambda: self._storage.write(RECORD_NAME, data), location
            )
        except StorageError as error:
            _log.warning("%s: the next start asks the hub for its data sets again", error)

    def _read(self) -> _Record:
        location = f"{self._storage.location}/{RECORD_NAME}"
        data = self._retry.run(lambda: read_small(self._storage, RECORD_NAME), location)
        try:
            return _Record() if data is None else _Record.model_validate_json(data)
        except ValidationError as error:
            raise UserError(
                f"{location}: cannot be read, and names the commits of the hub that the run reads: restore the file, "
                "or remove it and set data.hub.revision to the commit"
            ) from error

    def _pin_name(self, name: str) -> str:
        return format_location(self._pin_config(parse_location(name))) if name.startswith(HUB) else name

    def _pin_config(self, config: HubConfig) -> HubConfig:
        name = f"{config.dataset}@{config.revision}"
        commit = self._commits.get(name) or self._known.commits.get(name) or find_commit(config)
        if commit != config.revision:
            self._commits[name] = commit
            _log.info("data.hub %s: this run reads commit %s", name, commit)
        return config.model_copy(update={"revision": commit})
