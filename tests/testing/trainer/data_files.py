"""Small files of every format, data configurations for them, and their batches."""

import contextlib
import csv
import functools
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from trainium_contract.trainer.data import DataConfig
from trainium_trainer.data.batches.samples import RankSamples, Samples, Share
from trainium_trainer.data.dataset import Dataset, open_data
from trainium_trainer.data.loader import Loader, RankBatch
from trainium_trainer.data.prepared.reader import PreparedData
from trainium_trainer.data.tokens.tokenizer import load_tokenizer

TEXTS = [f"document number {number} says hello to the world of tokens" for number in range(40)]
END = "<|endoftext|>"
TABLE = pa.table({"text": TEXTS})
CSV_ROWS = [{"id": "1, 2", "text": text} for text in TEXTS]
LARGE_STRINGS = pa.table({"text": pa.array(TEXTS, pa.large_string())})


class TokenRange:
    """A sequence of tokens that count up from `first`."""

    def __init__(self, tokens: int, first: int = 0) -> None:
        self.tokens = tokens
        self.first = first

    def read(self, start: int, stop: int) -> NDArray[Any]:
        assert 0 <= start < stop <= self.tokens
        return np.arange(self.first + start, self.first + stop, dtype=np.uint16)


def data_config(tmp_path: Path, source: Path | str, **settings: Any) -> DataConfig:
    fields = {
        "sequence_length": 16,
        "cache_directory": str(tmp_path / "cache"),
        "tokenizer": {"vocab_size": 300},
        "workers": 1,
    }
    return DataConfig.model_validate({**fields, "source": str(source), **settings})


def open_text(settings: DataConfig) -> Dataset:
    return open_data(settings, 8)


def write_text(path: Path) -> None:
    path.write_text("\n".join(TEXTS))


def json_lines(texts: list[str] = TEXTS) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_json_lines(path: Path) -> None:
    path.write_bytes(json_lines())


def write_gzip(path: Path) -> None:
    """Write two members, as tools that work in parallel do."""
    path.write_bytes(gzip.compress(json_lines(TEXTS[:25])) + gzip.compress(json_lines(TEXTS[25:])))


def write_zstd(path: Path) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(json_lines())


def write_array(path: Path) -> None:
    """Write one JSON array, over many lines."""
    path.write_text(json.dumps([{"id": 1, "text": text} for text in TEXTS], indent=1))


def write_csv(path: Path, rows: Sequence[dict[str, Any]] = CSV_ROWS) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path) -> None:
    parquet.write_table(pa.table({"id": list(range(40)), "text": TEXTS}), path, row_group_size=7)


def write_arrow(
    path: Path, table: pa.Table = TABLE, *, rows: int | None = 9, open_writer: Any = pa.ipc.new_file
) -> None:
    """Write record batches of at most `rows` rows (None: one batch).

    `open_writer` selects the file or the stream format.
    """
    with pa.OSFile(str(path), "wb") as sink, open_writer(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


FORMATS = {
    "d.jsonl": write_json_lines,
    "d.json.gz": write_gzip,
    "d.jsonl.zst": write_zstd,
    "d.json": write_array,
    "d.csv": write_csv,
    "d.parquet": write_parquet,
    "d.arrow": write_arrow,
    "c.arrow": functools.partial(write_arrow, table=LARGE_STRINGS, rows=None),
    "s.arrow": functools.partial(write_arrow, open_writer=pa.ipc.new_stream),
}


def decode_all(data: Dataset) -> str:
    """Decode all tokens of the first source."""
    assert isinstance(data.training, Samples)
    sequence = data.training.sources[0].sequence
    tokens = sequence.read(0, sequence.tokens)
    return load_tokenizer(data.tokenizer).decode(list(tokens), skip_special_tokens=False)


def read_prepared(cache: Path) -> PreparedData:
    (folder,) = cache.glob("tokens-*[0-9a-f]")
    return PreparedData(folder)


def read_batch(samples: Samples, share: Share, position: int) -> RankBatch:
    """Read the batch of one rank at a global position."""
    loader = Loader(RankSamples(samples, share), samples.rules, share)
    with contextlib.closing(loader):
        return loader.read_batch(position)
