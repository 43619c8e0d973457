"""Tokenize text during the training: the same samples for any processes, ranks and interruptions."""

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from tests.testing.trainer.data_files import END, data_config, json_lines
from trainium_trainer.data import dataset
from trainium_trainer.data.batches.order import find_shuffled_item
from trainium_trainer.data.batches.samples import Samples, Share
from trainium_trainer.data.dataset import Dataset, open_data
from trainium_trainer.data.loader import open_loader
from trainium_trainer.data.online import streams
from trainium_trainer.data.online.stream_shards import ShardPlan, StreamShards, TextBlocks
from trainium_trainer.data.online.streams import BlockCounts, Streams
from trainium_trainer.data.tokens.encoding import DocumentEncoder
from trainium_trainer.data.tokens.tokenizer import load_tokenizer
from trainium_trainer.data.workers.pool import WorkerError
from trainium_trainer.exits import UserError

SHARDS = 4
DOCUMENTS = [f"document {number}: " + f"word{number % 7} " * (number % 23 + 1) for number in range(600)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_SMALLEST_BLOCK", 1500)


def open_online(tmp_path: Path, tokenizer: Path, texts: Sequence[str] = DOCUMENTS, **settings: Any) -> Dataset:
    (tmp_path / "d.jsonl").write_bytes(json_lines(list(texts)))
    fields = {"tokenizer": {"path": str(tokenizer)}, "tokenization": "Online"} | settings
    return open_data(data_config(tmp_path, tmp_path / "d.jsonl", **fields), SHARDS)


def shard_plan(data: Dataset) -> ShardPlan:
    assert isinstance(data.training, Streams)
    return data.training.plan


def text_blocks(plan: ShardPlan) -> TextBlocks:
    (source,) = plan.sources
    table = np.load(source.blocks_file)[: source.blocks]
    return TextBlocks(source.spec.source, table, DocumentEncoder(Path(plan.tokenizer)), plan.held_back)


def rows(data: Dataset, share: Share, steps: Sequence[int], counts_folder: Path | None = None) -> list[list[int]]:
    """Return the tokens of each sample of one rank."""
    with closing(open_loader(data, share, ahead=2, counts_folder=counts_folder)) as loader:
        batches = [loader.read_batch(step * SHARDS) for step in steps]
    return [row.tolist() for batch in batches for micro in batch.micro_batches for row in micro.inputs]


def share(rank: int = 0, size: int = 1) -> Share:
    return Share(global_size=SHARDS, micro_size=1, dp_rank=rank, dp_size=size)


def test_an_epoch_of_all_shards_has_every_document_once_and_nothing_is_dropped(tmp_path: Path, tokenizer: Path) -> None:
    data = open_online(tmp_path, tokenizer)
    plan = shard_plan(data)
    blocks = text_blocks(plan)
    blocks_per_shard = len(blocks) // SHARDS
    assert blocks_per_shard > 4
    reader = load_tokenizer(tokenizer)
    read_documents = []
    for shard in range(SHARDS):
        shards = StreamShards(plan, [shard], [blocks])
        shard_blocks = [
            find_shuffled_item(shard + number * SHARDS, len(blocks), plan.seed) for number in range(blocks_per_shard)
        ]
        length = sum(len(blocks.read(block).tokens) for block in shard_blocks)
        steps = -(-length // plan.sequence_length)
        stream = np.concatenate([shards.read_rows(step).rows[0][:-1] for step in range(steps)])[:length]
        read_documents += reader.decode(list(stream), skip_special_tokens=False).split(END)[:-1]
    leftover = len(blocks) - blocks_per_shard * SHARDS
    assert len(set(read_documents)) == len(read_documents)
    assert set(read_documents) <= set(DOCUMENTS)
    assert len(DOCUMENTS) - len(read_documents) <= leftover * 60
    if not leftover:
        assert sorted(read_documents) == sorted(DOCUMENTS)


def test_the_samples_are_the_same_for_any_ranks_processes_and_interruptions(tmp_path: Path, tokenizer: Path) -> None:
    data = open_online(tmp_path, tokenizer)
    whole = rows(data, share(), range(12), counts_folder=tmp_path / "counts")
    with_three_workers = open_online(tmp_path, tokenizer, workers=3)
    assert with_three_workers.identity == data.identity
    assert rows(with_three_workers, share(), range(12)) == whole
    halves = [rows(data, share(rank, 2), range(12)) for rank in range(2)]
    assert [halves[number % 4 // 2][number // 4 * 2 + number % 2] for number in range(48)] == whole
    assert rows(data, share(), [7, 8, 3, 4]) == whole[28:36] + whole[12:20], "at any step, without recorded counts"
    assert rows(data, share(1, 4), [9], counts_folder=tmp_path / "counts") == [whole[37]]
    assert data.training.list_numbers(8, 4) == [8, 9, 10, 11]


def test_a_shard_continues_from_recorded_counts_without_reading_earlier_blocks(tmp_path: Path, tokenizer: Path) -> None:
    data = open_online(tmp_path, tokenizer)
    plan = shard_plan(data)
    rows(data, share(), range(80), counts_folder=tmp_path / "counts")
    ((numbers, counts),) = BlockCounts(tmp_path / "counts", data.training.identity, None).group_by_source(1)
    assert len(set(numbers.tolist())) >= 4
    uncounted, counted = text_blocks(plan), text_blocks(plan)
    counted.add_counts(numbers, counts)
    slow, fast = (StreamShards(plan, [1], [blocks]).read_rows(70) for blocks in (uncounted, counted))
    assert slow.rows[0].tolist() == fast.rows[0].tolist()
    assert len(fast.counts) == 1
    assert len(slow.counts) > 1, "without recorded counts, it counts earlier blocks"


def test_torn_or_changed_counts_are_ignored(tmp_path: Path) -> None:
    counts_folder = BlockCounts(tmp_path, "identity", 0)
    counts_folder.add([(0, 1, 100), (1, 2, 200)])
    counts_folder.add([(0, 3, 300)])
    counts_folder.close()
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[8] ^= 1
    file.write_bytes(bytes(content) + b"torn")
    BlockCounts(tmp_path, "identity", 0).add([(0, 4, 400)])
    recorded = BlockCounts(tmp_path, "identity", None).group_by_source(2)
    assert [(blocks.tolist(), counts.tolist()) for blocks, counts in recorded] == [([3, 4], [300, 400]), ([2], [200])]
    assert BlockCounts(tmp_path, "other", None).group_by_source(1)[0][0].tolist() == []
    assert BlockCounts(None, "identity", 0).group_by_source(1)[0][0].tolist() == []


def test_counts_recorded_while_the_run_ends_reach_no_file_that_reuses_the_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts_folder = BlockCounts(tmp_path, "identity", 0)
    write, other_file = os.write, tmp_path / "other"

    def end_run() -> None:
        counts_folder.close()
        reopened.append(other_file.open("wb"))  # reuses the descriptor

    def write_after_end(descriptor: int, data: bytes) -> int:
        ending.start()
        ending.join(0.2)
        return write(descriptor, data)

    reopened: list[BinaryIO] = []
    ending = threading.Thread(target=end_run)
    monkeypatch.setattr(os, "write", write_after_end)
    counts_folder.add([(0, 4, 400)])
    monkeypatch.undo()
    ending.join(10)
    reopened[0].close()
    assert other_file.read_bytes() == b""
    counts_folder.add([(0, 5, 500)])
    assert BlockCounts(tmp_path, "identity", None).group_by_source(1)[0][1].tolist() == [400]


def trained_documents(data: Dataset, steps: int) -> set[str]:
    """Return the whole documents in the first samples."""
    shards = [[] for _ in range(SHARDS)]  # type: list[list[int]]
    for number, row in enumerate(rows(data, share(), range(steps))):
        shards[number % SHARDS] += row
    reader = load_tokenizer(data.tokenizer)
    return {text for shard in shards for text in reader.decode(shard, skip_special_tokens=False).split(END)[:-1]}


@pytest.mark.parametrize("split", ["DocumentHash", "Tail"])
def test_held_out_documents_are_never_trained_on(tmp_path: Path, tokenizer: Path, split: str) -> None:
    validation = {"fraction": 0.2, "split": split, "samples": 1000}
    data = open_online(tmp_path, tokenizer, validation=validation)
    reader = load_tokenizer(tokenizer)
    samples = [sample for sample in data.validation.read_rank_samples(0, 1) if sample is not None]
    tokens = [token for sample in samples for token in sample.tokens[:-1].tolist()] + samples[-1].tokens[-1:].tolist()
    texts = set(reader.decode(tokens, skip_special_tokens=False).split(END)[:-1])
    assert texts <= set(DOCUMENTS)
    assert len(DOCUMENTS) * 0.1 < len(texts) < len(DOCUMENTS) * 0.3
    if split == "Tail":
        assert texts == set(DOCUMENTS[-len(texts) :])
    trained = trained_documents(data, 700)
    assert len(trained) > 0.7 * len(DOCUMENTS)
    assert not trained & texts
    smaller = open_online(tmp_path, tokenizer, validation=validation | {"fraction": 0.1})
    assert smaller.identity != data.identity
    three_samples = open_online(tmp_path, tokenizer, validation=validation | {"samples": 3})
    assert three_samples.validation.num_samples == 3
    assert three_samples.identity == data.identity


def test_sources_are_mixed_in_each_shard_and_prepared_ones_may_be_among_them(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(json_lines([text.upper() for text in DOCUMENTS]))
    (tmp_path / "t.jsonl").write_bytes(json_lines(DOCUMENTS))
    ahead = open_data(data_config(tmp_path, tmp_path / "p.jsonl", tokenizer={"path": str(tokenizer)}), SHARDS)
    assert isinstance(ahead.training, Samples)
    (prepared,) = (tmp_path / "cache").glob("tokens-*[0-9a-f]")
    sources = [{"source": str(tmp_path / "t.jsonl"), "weight": 3}, {"source": str(prepared), "weight": 1}]
    data = open_data(data_config(tmp_path, "unused", sources=sources, tokenizer={}, tokenization="Online"), SHARDS)
    reader = load_tokenizer(tokenizer)
    samples = rows(data, share(), range(60))
    is_upper = [any(word in reader.decode(row) for word in ("DOC", "WOR", "ORD")) for row in samples]
    assert abs(sum(is_upper) - 60) <= 2
    for shard in range(SHARDS):
        assert abs(sum(is_upper[shard::SHARDS]) - 15) <= 1
    assert rows(data, share(), [31]) == samples[124:128]


def test_bad_lines_are_counted_while_training(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(json_lines(DOCUMENTS[:300]) + b"{oops\n" * 3 + json_lines(DOCUMENTS[300:]))
    fields = {"tokenizer": {"path": str(tokenizer)}, "tokenization": "Online"}
    lenient = open_data(data_config(tmp_path, tmp_path / "d.jsonl", **fields), SHARDS)
    assert len(rows(lenient, share(), range(400))) == 1600
    strict = open_data(data_config(tmp_path, tmp_path / "d.jsonl", max_bad_lines=2, **fields), SHARDS)
    with pytest.raises(UserError, match=r"d.jsonl line 303: not JSON .*more such lines than data.maxBadLines 2"):
        rows(strict, share(), range(400))


@pytest.mark.parametrize("ranks", [1, 2])
def test_records_of_which_more_than_one_in_a_hundred_is_bad_are_refused_while_training(
    tmp_path: Path, tokenizer: Path, ranks: int
) -> None:
    """The first block has more bad lines than the whole source may have."""
    (tmp_path / "d.jsonl").write_bytes(b"{oops\n" * 20 + json_lines(DOCUMENTS))
    fields = {"tokenizer": {"path": str(tokenizer)}, "tokenization": "Online"}
    data = open_data(data_config(tmp_path, tmp_path / "d.jsonl", **fields), SHARDS)
    with pytest.raises(
        UserError, match=r"d.jsonl: 20 of its .* cannot be used, more than 1%, the first: .*d.jsonl line"
    ):
        [rows(data, share(rank, ranks), range(400)) for rank in range(ranks)]
    allowed = open_data(data_config(tmp_path, tmp_path / "d.jsonl", max_bad_lines=10**6, **fields), SHARDS)
    assert len(rows(allowed, share(), range(400))) == 1600


def test_a_process_that_is_killed_is_an_error_of_the_step_that_needs_it(tmp_path: Path, tokenizer: Path) -> None:
    with closing(open_loader(open_online(tmp_path, tokenizer), share(), ahead=1)) as loader:
        loader.read_batch(0)
        loader._reader._workers.send(0, os.kill, 0, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            [loader.read_batch(step * SHARDS) for step in range(1, 10)]


def test_small_data_are_tokenised_ahead_unless_configured_otherwise(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(open_online(tmp_path, tokenizer, tokenization="Auto").training, Samples)
    monkeypatch.setattr(dataset, "_WORTH_STREAMS", 1000)
    assert isinstance(open_online(tmp_path, tokenizer, tokenization="Auto").training, Streams)
    assert isinstance(open_online(tmp_path, tokenizer, tokenization="Ahead").training, Samples)
    with pytest.raises(UserError, match="python-docs: cannot be tokenized while training"):
        open_data(
            data_config(tmp_path, "python-docs", tokenization="Online", tokenizer={"path": str(tokenizer)}), SHARDS
        )


def test_too_little_text_to_tokenise_while_training_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(UserError, match=r"d.jsonl: holds no text to train on: give a source with text in it"):
        rows(open_online(tmp_path, tokenizer, [""] * 5), share(), [0])
    with pytest.raises(UserError, match=r"d.jsonl: holds no text: give a source with text in it"):
        open_online(tmp_path, tokenizer, [])
    single = ["the only document " * 20]
    assert len(rows(open_online(tmp_path, tokenizer, single), share(), range(40))) == 160, "the document repeats"
    with pytest.raises(
        UserError, match=r"d.jsonl: is too small to hold back its end .* set data.tokenization to Ahead"
    ):
        open_online(tmp_path, tokenizer, single, validation={"fraction": 0.1, "split": "Tail"})
    with pytest.raises(UserError, match=r"d.jsonl has no document to hold back: raise data.validation.fraction"):
        open_online(tmp_path, tokenizer, single, validation={"fraction": 0.0001})
