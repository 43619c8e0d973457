"""Epochs that are counted: each sample once in each, the last batch filled up with what does not count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from tests.testing.trainer.data_files import config, json_lines
from trainium_trainer.data.batches.loader import Loader, SampleMaker, Share
from trainium_trainer.data.batches.order import Mixture
from trainium_trainer.data.batches.samples import SampleRules, Samples, TextPart
from trainium_trainer.data.opening import open_data
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

RULES = SampleRules(sequence_length=8, vocabulary=2**16)


class Counting:
    """The run of tokens first, first + 1, ..."""

    def __init__(self, tokens: int, first: int) -> None:
        self.tokens = tokens
        self.first = first

    def read(self, start: int, stop: int) -> NDArray[Any]:
        return np.arange(self.first + start, self.first + stop, dtype=np.uint16)


def samples(*counts: int, batch: int | None) -> Samples:
    parts = [TextPart(f"s{number}", Counting(count * 8 + 1, 10_000 * number)) for number, count in enumerate(counts)]
    return Samples(parts, Mixture([1.0] * len(counts), 3), seed=3, rules=RULES, epoch_batch=batch)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from([4, 8, 12]))
@settings(max_examples=trials(40))
def test_each_epoch_has_each_sample_exactly_once_and_ends_with_a_full_batch(counts: list[int], batch: int) -> None:
    data = samples(*counts, batch=batch)
    length, total = data.epoch_samples, sum(counts)
    assert length is not None
    assert length % batch == 0
    assert total <= length < total + batch
    orders = []
    for epoch in range(3):
        rows = data.at(epoch * length, length)
        seen = [row.number for row in rows if row is not None]
        assert sorted(seen) == list(range(total))
        assert seen == data.numbers(epoch * length, length)
        assert all(row is None for row in rows[total:])
        orders.append(seen)
    assert total < 8 or orders[0] != orders[1], "each epoch has an order of its own"


def test_an_epoch_of_one_source_has_the_order_that_it_has_without_epochs() -> None:
    assert samples(12, batch=4).numbers(0, 24) == samples(12, batch=None).numbers(0, 24)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_what_fills_up_an_epoch_has_no_labels_and_no_name_but_every_row_has_its_place(dp_size: int) -> None:
    data = samples(13, batch=8)
    names, tokens, places = [], 0, []
    for rank in range(dp_size):
        share = Share(global_size=8, micro_size=2, dp_rank=rank, dp_size=dp_size)
        loader = Loader(SampleMaker(data, share), global_size=8)
        batch = loader.batch_at(8)
        loader.close()
        assert len(batch.micro_batches) == 8 // dp_size // 2
        names += batch.samples
        tokens += sum(micro.valid_tokens for micro in batch.micro_batches)
        places += [place for micro in batch.micro_batches for place in micro.places.tolist()]
    assert names == data.numbers(8, 8)
    assert len(names) == 5
    assert tokens == 5 * 8
    assert places == list(range(8, 16))


def test_text_has_epochs_when_they_are_asked_for_and_they_are_part_of_its_identity(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(json_lines())
    settings = config(tmp_path, tmp_path / "d.jsonl")
    endless, counted = open_data(settings, 8), open_data(settings, 8, epochs=2)
    assert endless.epoch_samples is None
    assert counted.epoch_samples == -(-counted.training.num_samples // 8) * 8
    assert endless.identity != counted.identity
    assert counted.identity == open_data(settings, 8, epochs=3).identity, "a run may be given more epochs"


def test_epochs_of_text_that_is_tokenised_online_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(json_lines())
    settings = config(tmp_path, tmp_path / "d.jsonl", tokenization="Online")
    with pytest.raises(UserError, match=r"data.tokenization is Online, .* set it to Ahead"):
        open_data(settings, 8, epochs=1)


def test_weights_beside_epochs_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines())
    (tmp_path / "b.jsonl").write_bytes(json_lines())
    sources = [{"source": str(tmp_path / "a.jsonl"), "weight": 2}, {"source": str(tmp_path / "b.jsonl")}]
    with pytest.raises(UserError, match=r"data.sources: has the weights 2, 1, but with epochs"):
        open_data(config(tmp_path, "unused", sources=sources), 8, epochs=1)
