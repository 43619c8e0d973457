"""Find and read the files of data sets on the Hugging Face hub.

`datasets` resolves the files of a configuration and a split; this module reads them in ranges, like those of a bucket,
without a copy on disk.

Guarantees:
- A location with a commit always names the same files with the same digests; they are listed once per node, and the
  list is read from there even if HF_HOME can no longer be written.
- The identity of a file is the hub's digest of its contents, independently of the name of the data set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from pydantic import ValidationError

from trainium_contract.trainer.data import HubConfig
from trainium_trainer.data.cache import write_cache_file
from trainium_trainer.data.sources.files import HUB, SUFFIXES, DataFile, list_formats
from trainium_trainer.exits import StorageError, UserError
from trainium_trainer.storage.hub import Repository, call_hub, create_client, find_endpoint, find_token

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger("trainium.data")

HubFiles = tuple[tuple[str, int, str], ...]
"""Path, bytes and digest of each file of a split."""
_DATASETS = "hf://datasets/"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES_AT_ONCE = 500
_NOT_READING = frozenset({"name", "version", "data_dir", "data_files", "description"})
"""Fields of a configuration of `datasets` that do not affect how a file is read."""
_READ_SECONDS = 60


def format_location(config: HubConfig, split: str | None = None) -> str:
    """Return the URL of a data set, for instance hf://datasets/owner/name@main?split=train."""
    fields = {"name": config.name, "directory": config.directory, "split": split or config.split}
    query = urlencode({name: value for name, value in fields.items() if value is not None}, safe="/")
    return f"{_DATASETS}{config.dataset}@{quote(config.revision, safe='')}?{query}"


def parse_location(location: str) -> HubConfig:
    """Return the parts of a location. Raises UserError."""
    parts = urlsplit(location)
    dataset, _, revision = location.partition("?")[0].removeprefix(_DATASETS).partition("@")
    fields = dict(parse_qsl(parts.query)) | {"dataset": dataset} | ({"revision": unquote(revision)} if revision else {})
    try:
        if not location.startswith(_DATASETS):
            raise ValueError  # noqa: TRY301 - one sentence for all that it is not
        return HubConfig.model_validate(fields)
    except (ValidationError, ValueError) as error:
        raise UserError(
            f"data.source {location}: is no data set on the hub: write {_DATASETS}owner/name, followed by @revision "
            "and ?name=...&split=... where you need them"
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class SplitPart:
    """A part of the split in a location, for instance train[:50%] of train[:50%]+test."""

    text: str

    @property
    def split(self) -> str:
        """The split's name."""
        return re.split(r"[\[(]", self.text, maxsplit=1)[0]

    @property
    def is_slice(self) -> bool:
        """Whether it is not the whole split."""
        return self.split != self.text

    def find_rows(self, count: int) -> tuple[int, int]:
        """Return the first row and the end of a slice of a split with `count` rows. Raises UserError."""
        from datasets import ReadInstruction  # noqa: PLC0415 - takes two seconds, only for slices

        try:
            (rows,) = ReadInstruction.from_spec(self.text).to_absolute({self.split: count})
        except ValueError as error:
            raise UserError(
                f"data.hub.split {self.text}: {error}: write a slice as train[:50%] or train[10:20]"
            ) from error
        return rows.from_, max(rows.from_, rows.to)


def list_parts(location: str) -> list[tuple[SplitPart, str]]:
    """Return the parts of the split of a location, each with the location of its split. Raises UserError."""
    config = parse_location(location)
    parts = [
        SplitPart(text) for text in re.split(r"\s*\+\s*|\s+", config.split.strip())
    ]  # a + of an address is a blank
    return [(part, format_location(config, part.split)) for part in parts]


def _open_repository(config: HubConfig) -> Repository:
    advice = "correct data.hub.revision"
    return Repository("data.hub", config.dataset, "data set", config.revision, advice)


def pin_revision(location: str) -> str:
    """Replace the revision of a location by its current commit. Raises UserError and StorageError."""
    config = parse_location(location)
    return format_location(config.model_copy(update={"revision": find_commit(config)}))


@functools.lru_cache(maxsize=64)
def find_commit(config: HubConfig) -> str:
    """Return the commit of a revision, cached in this process. Raises UserError and StorageError."""
    if _COMMIT.fullmatch(config.revision):
        return config.revision
    info = call_hub(
        lambda: create_client().dataset_info(config.dataset, revision=config.revision), _open_repository(config)
    )
    return str(info.sha)


@functools.lru_cache(maxsize=64)
def list_files(location: str) -> HubFiles:
    """Return path, bytes and digest of each file of a split, in the order of `datasets`.

    Raises UserError and StorageError.
    """
    from huggingface_hub.utils import WeakFileLock  # noqa: PLC0415 - only data on the hub pay for it

    config = parse_location(pin_revision(location))
    cached_file = _find_cache_path(config)
    with contextlib.ExitStack() as locked:
        try:
            cached_file.parent.mkdir(parents=True, exist_ok=True)
            locked.enter_context(WeakFileLock(cached_file.with_suffix(".lock")))
        except OSError as error:
            _log.warning("%s: cannot be written (%s): what is not in it is asked for again", cached_file.parent, error)
        files = _read_cached_list(cached_file)
        if files is None:
            try:
                files = _find_files(config)
            except OSError as error:  # `datasets` caches files of a repository there
                raise StorageError(
                    f"data.hub {config.dataset}: {cached_file.parent.parent} cannot be written "
                    f"({error.strerror or error}): set HF_HOME to a folder that can"
                ) from error
            write_cache_file(cached_file, json.dumps(files).encode())
    return tuple((path, size, digest) for path, size, digest in files)


def store_files(location: str, files: HubFiles) -> None:
    """Store the files of a location with a commit on this node, for `list_files` in this and later processes."""
    cached_file = _find_cache_path(parse_location(location))
    with contextlib.suppress(OSError):
        cached_file.parent.mkdir(parents=True, exist_ok=True)
    if _read_cached_list(cached_file) is None:
        write_cache_file(cached_file, json.dumps(files).encode())


def _find_cache_path(config: HubConfig) -> Path:
    from huggingface_hub import constants  # noqa: PLC0415 - as above

    key = hashlib.sha256(f"1\0{find_endpoint()}\0{format_location(config)}".encode()).hexdigest()[:32]
    return Path(constants.HF_HOME) / "trainium" / f"files-{key}.json"


def _read_cached_list(cached_file: Path) -> list[tuple[str, int, str]] | None:
    """Return the list that another process stored; None if there is none or it cannot be read."""
    try:
        files: list[tuple[str, int, str]] = json.loads(cached_file.read_text())
    except (OSError, ValueError):
        return None
    return files


def _find_files(config: HubConfig) -> list[tuple[str, int, str]]:
    repository = _open_repository(config)
    call_hub(lambda: create_client().auth_check(config.dataset, repo_type="dataset"), repository)
    files = _list_split_files(config)
    infos: dict[str, Any] = {}
    for first in range(0, len(files), _FILES_AT_ONCE):
        some = files[first : first + _FILES_AT_ONCE]
        received = call_hub(
            lambda some=some: create_client().get_paths_info(  # type: ignore[misc]
                config.dataset, some, revision=config.revision, repo_type="dataset"
            ),
            repository,
        )
        infos |= {info.path: info for info in received}
    prefix = f"datasets/{config.dataset}@{config.revision}"
    return [
        (f"{prefix}/{info.path}", info.size, info.lfs.sha256 if info.lfs else info.blob_id)
        for info in (infos[file] for file in files)
    ]


def _list_split_files(config: HubConfig) -> list[str]:
    """Return the paths of a split's files in the repository, as `datasets` resolves them. Raises UserError."""
    import datasets  # noqa: PLC0415 - takes two seconds, only for the first look

    setting = f"data.hub {config.dataset}"
    name = f"{_DATASETS}{config.dataset}"  # not a local folder of that name

    def open_builder() -> Any:
        return datasets.load_dataset_builder(
            name, config.name, data_dir=config.directory, revision=config.revision, token=find_token()
        )

    try:
        builder = call_hub(open_builder, _open_repository(config))
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        raise UserError(
            f"{setting}: is loaded by a script, which is not run: set data.hub.revision to refs/convert/parquet, the "
            "hub's conversion to Parquet, and data.hub.directory to the folder of a configuration there"
        ) from error
    except (ValueError, FileNotFoundError) as error:  # no such configuration, or no files of a known format
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{setting}: {reason}: correct data.hub.name or data.hub.directory") from error
    splits = {str(split): list(files) for split, files in (builder.config.data_files or {}).items()}
    if config.split not in splits:
        available = ", ".join(splits) or "none"
        raise UserError(f"{setting}: has no split {config.split!r} (splits: {available}): correct data.hub.split")
    plain = type(builder.config)()
    special = [
        field.name
        for field in dataclasses.fields(plain)
        if field.name not in _NOT_READING and getattr(builder.config, field.name) != getattr(plain, field.name)
    ]
    if special:
        raise UserError(
            f"{setting}: its files need special settings to be read ({', '.join(special)}), which are not known here: "
            "set data.hub.revision to refs/convert/parquet, the hub's conversion to Parquet"
        )
    return [str(file).partition(f"@{config.revision}/")[2] for file in splits[config.split]]


def find_hub_files(name: str) -> tuple[DataFile, ...]:
    """Return the files of a location. Raises UserError and StorageError."""
    files = list_files(name)
    for path, _, _ in files:
        if not path.endswith(SUFFIXES):
            raise UserError(
                f"data.source {HUB}{path}: files end in {list_formats()}: set data.hub.revision to "
                "refs/convert/parquet, the hub's conversion to Parquet"
            )
    return tuple(HubDataFile(path, size, digest, path.split("/", 3)[3], HUB) for path, size, digest in files)


class HubDataFile(DataFile):
    """A file of a data set on the hub."""

    __slots__ = ()

    def open_remote(self) -> HubFile:
        """See `DataFile.open_remote`."""
        return HubFile(self.path, self.size)


class HubFile(io.RawIOBase):
    """A file of a data set, read in ranges. Raises UserError and StorageError."""

    def __init__(self, path: str, size: int) -> None:
        """Open the file; `path` is one of `list_files`."""
        from huggingface_hub import hf_hub_url  # noqa: PLC0415 - only data on the hub pay for it

        repository, _, rest = path.removeprefix("datasets/").partition("@")
        revision, _, file = rest.partition("/")
        self._repository = Repository("data.hub", repository, "data set", revision, "correct data.hub.revision")
        self._url = hf_hub_url(repository, file, repo_type="dataset", revision=revision, endpoint=find_endpoint())
        self._size, self._position = size, 0

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        """Read up to the size of the buffer; less only at the end of the file."""
        view = memoryview(buffer).cast("B")
        end = min(self._position + len(view), self._size)
        if end <= self._position:
            return 0
        data = call_hub(lambda: self._fetch(self._position, end), self._repository)
        if len(data) != end - self._position:
            raise StorageError(f"{self._repository.where}: the hub sent {len(data)} bytes of {end - self._position}")
        view[: len(data)] = data
        self._position = end
        return len(data)

    def _fetch(self, start: int, end: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # noqa: PLC0415 - as above

        headers = build_hf_headers(token=find_token()) | {
            "range": f"bytes={start}-{end - 1}",
            "accept-encoding": "identity",
        }
        response = http_backoff("GET", self._url, headers=headers, timeout=_READ_SECONDS)
        hf_raise_for_status(response)
        return bytes(response.content)
