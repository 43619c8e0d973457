"""Copy prepared data from S3 into the cache, and read the vocabulary of prepared data before they are opened.

Guarantees:
- Prepared data in S3 are copied once per machine and used from there.
- A copy is published by one rename.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_trainer.data.cache import create_once
from trainium_trainer.data.prepared.reader import KIND, MANIFEST_FILE, is_prepared, read_manifest
from trainium_trainer.data.sources.files import S3, open_s3, read_s3_file, read_with_retries
from trainium_trainer.data.sources.resolve import list_sources
from trainium_trainer.data.tokens.tokenizer import CONFIG_FILE, TOKENIZER_FILE, count_entries, find_tokenizer_file

if TYPE_CHECKING:
    from trainium_contract.trainer.data import DataConfig

_COPIED_AT_ONCE = 16 << 20


def find_vocabulary_size(config: DataConfig) -> int:
    """Return the size of the data's tokenizer; access S3 only for data in S3. Raises UserError, StorageError."""
    if config.tokenizer.path is not None:
        return count_entries(find_tokenizer_file(config.tokenizer))
    for spec in list_sources(config):
        name = spec.name
        if name.startswith(S3):
            manifest = _read_remote_manifest(name)
            if manifest is not None:
                return int(json.loads(manifest)["vocabulary"])
        elif is_prepared(folder := Path(name).expanduser()):
            return count_entries(folder / TOKENIZER_FILE)
    return config.tokenizer.vocab_size


def has_prepared_sources(config: DataConfig) -> bool:
    """Return whether a source includes its tokenizer; access S3 only for data in S3. Raises UserError, StorageError."""
    return any(
        _read_remote_manifest(spec.name) is not None
        if spec.name.startswith(S3)
        else is_prepared(Path(spec.name).expanduser())
        for spec in list_sources(config)
    )


def _read_remote_manifest(name: str) -> bytes | None:
    content = read_with_retries(name, lambda: read_s3_file(_format_object_key(name, MANIFEST_FILE)))
    return content if content is not None and KIND.encode() in content else None


def copy_from_s3(name: str, cache: Path) -> Path | None:
    """Copy a folder into the cache, in the first process that needs it, and return the copy; None for other data.

    Files of an interrupted copy are reused. Raises UserError or StorageError.
    """
    manifest = _read_remote_manifest(name)
    if manifest is None:
        return None
    folder = cache / f"mirror-{hashlib.sha256(manifest).hexdigest()[:32]}"

    def create() -> None:
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(exist_ok=True)
        (partial / MANIFEST_FILE).write_bytes(manifest)
        shards = read_manifest(partial).shards
        (partial / MANIFEST_FILE).unlink()
        sizes = {shard.file: shard.bytes for shard in shards} | {"index.arrow": -1, TOKENIZER_FILE: -1}
        for file, size in sizes.items():
            target = partial / file
            if not target.exists() or target.stat().st_size != size:
                read_with_retries(f"{name.rstrip('/')}/{file}", functools.partial(_copy, name, file, target))
        if read_with_retries(name, lambda: open_s3().get_file_info(_format_object_key(name, CONFIG_FILE)).is_file):
            read_with_retries(
                f"{name.rstrip('/')}/{CONFIG_FILE}", lambda: _copy(name, CONFIG_FILE, partial / CONFIG_FILE)
            )
        (partial / MANIFEST_FILE).write_bytes(manifest)
        partial.rename(folder)

    return create_once(folder, create)


def _format_object_key(name: str, file: str) -> str:
    return f"{name.removeprefix(S3).rstrip('/')}/{file}"


def _copy(name: str, file: str, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    with open_s3().open_input_stream(_format_object_key(name, file)) as stream, temporary.open("wb") as copy:
        shutil.copyfileobj(stream, copy, _COPIED_AT_ONCE)
    temporary.replace(target)
