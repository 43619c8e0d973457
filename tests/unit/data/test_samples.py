"""Samples by global position: shuffles, mixtures, masks and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from trainium_trainer.data.batches.loader import Loader, SampleMaker, Share, validation_batches
from trainium_trainer.data.batches.order import WINDOW, Mixture, Permutation
from trainium_trainer.data.batches.samples import SampleRules, Samples, TextPart, ValidationSet
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Counting:
    """The run of tokens 0, 1, 2, ..."""

    def __init__(self, tokens: int, first: int = 0) -> None:
        self.tokens = tokens
        self.first = first

    def read(self, start: int, stop: int) -> NDArray[Any]:
        assert 0 <= start < stop <= self.tokens
        return np.arange(self.first + start, self.first + stop, dtype=np.uint16)


RULES = SampleRules(sequence_length=8, vocabulary=2**16)


def loader_of(data: Samples, *, ahead: int = 1, **share: int) -> Loader:
    return Loader(SampleMaker(data, Share(**share)), global_size=share["global_size"], ahead=ahead)


def samples(*counts: int, weights: tuple[float, ...] = (), seed: int = 3, rules: SampleRules = RULES) -> Samples:
    parts = [TextPart(f"s{number}", Counting(count * 8 + 1, 10_000 * number)) for number, count in enumerate(counts)]
    return Samples(parts, Mixture(weights or (1.0,) * len(counts), seed), seed=seed, rules=rules)


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=trials(40))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)
    assert sorted(order[index] for index in range(size)) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(samples(50, seed=seed).numbers(start, 50)) for start in (0, 50) for seed in (0, 1)}
    assert len(orders) == 4


@given(
    count=st.integers(1, 60),
    plan=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4)), min_size=1, max_size=4),
)
@settings(max_examples=trials(30))
def test_every_sample_is_seen_once_per_epoch_whatever_the_sizes(count: int, plan: list[tuple[int, int]]) -> None:
    """`plan` is a list of (data-parallel size, steps at that size): the run stops and goes on at the next size."""
    data = samples(count)
    seen = []
    position = 0
    for dp_size, steps in plan:
        loaders = [
            loader_of(data, global_size=12, micro_size=1, dp_rank=rank, dp_size=dp_size, ahead=3)
            for rank in range(dp_size)
        ]
        for _ in range(steps):
            for loader in loaders:
                seen += loader.batch_at(position).samples
            position += 12
        for loader in loaders:
            loader.close()
    assert seen == data.numbers(0, position)
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == list(range(count))


def test_a_loader_may_be_asked_for_any_position() -> None:
    data = samples(100)
    loader = loader_of(data, global_size=4, micro_size=4, dp_rank=0, dp_size=1, ahead=2)
    for position in (0, 4, 8, 400, 404, 8, 8, 12):
        assert list(loader.batch_at(position).samples) == data.numbers(position, 4)
    loader.close()


def test_labels_are_the_next_tokens_and_the_rest_of_the_last_sample_is_kept() -> None:
    data = Samples([TextPart("s", Counting(21))], Mixture([1], 0), seed=0, rules=RULES)
    assert data.num_samples == 3
    loader = loader_of(data, global_size=3, micro_size=3, dp_rank=0, dp_size=1)
    (batch,) = loader.batch_at(0).micro_batches
    loader.close()
    assert batch.valid_tokens == 20
    assert batch.positions is None
    valid = batch.labels != -100
    assert int(valid.sum()) == 20
    assert (batch.labels[valid] == batch.inputs[valid] + 1).all()
    assert sorted(batch.labels[valid].tolist()) == list(range(1, 21))


def test_ids_beyond_the_vocabulary_are_refused_before_they_reach_a_device() -> None:
    data = samples(20, rules=SampleRules(sequence_length=8, vocabulary=40))
    loader = loader_of(data, global_size=20, micro_size=20, dp_rank=0, dp_size=1)
    with pytest.raises(UserError, match=r"data.source s0: holds token id .* but the vocabulary has 40 entries"):
        loader.batch_at(0)
    loader.close()


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 3 * WINDOW))
@settings(max_examples=trials(25))
def test_a_mixture_keeps_its_shares_in_every_window_and_counts_each_source(
    weights: list[float], seed: int, number: int
) -> None:
    mixture = Mixture(weights, seed)
    window = number // WINDOW * WINDOW
    drawn = [mixture[place] for place in range(window, window + WINDOW)]
    for source, weight in enumerate(weights):
        own = [index for drawn_source, index in drawn if drawn_source == source]
        assert len(own) == mixture.quotas[source]
        assert abs(len(own) - weight / sum(weights) * WINDOW) <= len(weights)
        assert own == list(range(own[0], own[0] + len(own))) == list(range(window // WINDOW * len(own), own[-1] + 1))
    assert mixture[number] == Mixture(weights, seed)[number]


def test_a_mixture_is_even_in_any_stretch() -> None:
    mixture = Mixture([0.7, 0.2, 0.1], 1)
    sources = [mixture[place][0] for place in range(WINDOW)]
    for start in range(0, WINDOW - 100, 100):
        stretch = sources[start : start + 100]
        assert [abs(stretch.count(source) - share) <= 2 for source, share in enumerate((70, 20, 10))] == [True] * 3


def test_each_source_of_a_mixture_has_separate_epochs() -> None:
    data = samples(30, 10, weights=(1.0, 1.0))
    numbers = data.numbers(0, 60)
    first = [number for number in numbers if number < 30]
    second = [number for number in numbers if number >= 30]
    assert sorted(first) == list(range(30))
    assert sorted(second) == sorted([*range(30, 40)] * 3)


def test_every_rank_does_as_many_validation_passes_and_all_of_them_each_sample_once() -> None:
    chosen = ValidationSet(samples(30, 3), 7)
    assert chosen.num_samples == 6  # the second source ends
    for dp_size in (1, 2, 4, 5, 8):
        ranks = [
            list(validation_batches(chosen, dp_rank=rank, dp_size=dp_size, micro_size=2)) for rank in range(dp_size)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        assert sum(batch.valid_tokens for batches in ranks for batch in batches) == 6 * 8
        firsts = {int(row[0]) for batches in ranks for batch in batches for row in batch.labels if row[0] != -100}
        assert firsts == {1, 9, 17, 10_001, 10_009, 10_017}


def test_masked_documents_have_separate_positions_and_no_target_is_the_start_of_the_next() -> None:
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 9, 4], np.uint16)

    class Fixed:
        tokens = 9

        def read(self, start: int, stop: int) -> NDArray[Any]:
            return tokens[start:stop]

    rules = SampleRules(sequence_length=8, vocabulary=16, end_of_document=0)
    data = Samples([TextPart("s", Fixed())], Mixture([1], 0), seed=0, rules=rules)
    loader = loader_of(data, global_size=1, micro_size=1, dp_rank=0, dp_size=1)
    (batch,) = loader.batch_at(0).micro_batches
    loader.close()
    assert batch.positions is not None
    assert batch.inputs.tolist() == [[5, 6, 0, 7, 0, 0, 8, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert batch.labels.tolist() == [[6, 0, -100, 0, -100, -100, 9, 4]]
    assert batch.valid_tokens == 5
