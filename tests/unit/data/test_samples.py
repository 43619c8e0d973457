"""Select samples by their global position: shuffles, mixtures, masks, ranks, counted epochs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.testing.suite.trials import trials
from tests.testing.trainer.data_files import TokenRange, data_config, json_lines, read_batch
from trainium_trainer.data.batches.order import WINDOW, Mixture
from trainium_trainer.data.batches.samples import (
    RankSamples,
    SampleRules,
    Samples,
    Share,
    TextSampleSource,
    ValidationSet,
)
from trainium_trainer.data.dataset import open_data
from trainium_trainer.data.loader import Loader, iterate_validation_batches
from trainium_trainer.exits import UserError
from trainium_worker.data import Permutation

RULES = SampleRules(sequence_length=8, vocabulary=2**16)


def open_loader(data: Samples, *, ahead: int = 1, **share: int) -> Loader:
    rank_share = Share(**share)
    return Loader(RankSamples(data, rank_share), data.rules, rank_share, ahead=ahead)


def samples(
    *counts: int,
    weights: tuple[float, ...] = (),
    seed: int = 3,
    rules: SampleRules = RULES,
    batch: int | None = None,
) -> Samples:
    sources = [
        TextSampleSource(f"s{number}", TokenRange(count * 8 + 1, 10_000 * number))
        for number, count in enumerate(counts)
    ]
    return Samples(sources, weights or (1.0,) * len(counts), seed=seed, rules=rules, epoch_batch=batch)


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=trials(40))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)
    assert sorted(order[index] for index in range(size)) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(samples(50, seed=seed).list_numbers(start, 50)) for start in (0, 50) for seed in (0, 1)}
    assert len(orders) == 4


@given(
    count=st.integers(1, 60),
    plan=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4)), min_size=1, max_size=4),
)
@settings(max_examples=trials(30))
def test_every_sample_is_seen_once_per_epoch_whatever_the_sizes(count: int, plan: list[tuple[int, int]]) -> None:
    """The run restarts at each size of `plan`, a list of (data-parallel size, steps)."""
    data = samples(count)
    used = []
    position = 0
    for dp_size, steps in plan:
        loaders = [
            open_loader(data, global_size=12, micro_size=1, dp_rank=rank, dp_size=dp_size, ahead=3)
            for rank in range(dp_size)
        ]
        for _ in range(steps):
            for loader in loaders:
                used += loader.read_batch(position).samples
            position += 12
        for loader in loaders:
            loader.close()
    assert used == data.list_numbers(0, position)
    for start in range(0, len(used) - count + 1, count):
        assert sorted(used[start : start + count]) == list(range(count))


def test_a_loader_returns_the_batch_of_any_position() -> None:
    data = samples(100)
    loader = open_loader(data, global_size=4, micro_size=4, dp_rank=0, dp_size=1, ahead=2)
    for position in (0, 4, 8, 400, 404, 8, 8, 12):
        assert list(loader.read_batch(position).samples) == data.list_numbers(position, 4)
    loader.close()


def test_labels_are_the_next_tokens_and_the_rest_of_the_last_sample_is_kept() -> None:
    data = Samples([TextSampleSource("s", TokenRange(21))], [1], seed=0, rules=RULES)
    assert data.num_samples == 3
    (batch,) = read_batch(data, Share(global_size=3, micro_size=3, dp_rank=0, dp_size=1), 0).micro_batches
    assert batch.valid_tokens == 20
    assert batch.positions is None
    valid = batch.labels != -100
    assert int(valid.sum()) == 20
    assert (batch.labels[valid] == batch.inputs[valid] + 1).all()
    assert sorted(batch.labels[valid].tolist()) == list(range(1, 21))


def test_ids_beyond_the_vocabulary_are_refused_before_they_reach_a_device() -> None:
    data = samples(20, rules=SampleRules(sequence_length=8, vocabulary=40))
    with pytest.raises(UserError, match=r"data.source s0: holds token id .* but the vocabulary has 40 entries"):
        read_batch(data, Share(global_size=20, micro_size=20, dp_rank=0, dp_size=1), 0)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 3 * WINDOW))
@settings(max_examples=trials(25))
def test_a_mixture_keeps_its_shares_in_every_window_and_counts_each_source(
    weights: list[float], seed: int, number: int
) -> None:
    mixture = Mixture(weights, seed)
    window = number // WINDOW * WINDOW
    drawn = [mixture[position] for position in range(window, window + WINDOW)]
    for source, weight in enumerate(weights):
        indexes = [index for drawn_source, index in drawn if drawn_source == source]
        assert len(indexes) == mixture.quotas[source]
        assert abs(len(indexes) - weight / sum(weights) * WINDOW) <= len(weights)
        start = window // WINDOW * len(indexes)
        assert indexes == list(range(start, start + len(indexes)))
    assert mixture[number] == Mixture(weights, seed)[number]


def test_a_mixture_is_even_in_any_window() -> None:
    mixture = Mixture([0.7, 0.2, 0.1], 1)
    sources = [mixture[position][0] for position in range(WINDOW)]
    for start in range(0, WINDOW - 100, 100):
        stretch = sources[start : start + 100]
        assert [abs(stretch.count(source) - share) <= 2 for source, share in enumerate((70, 20, 10))] == [True] * 3


def test_each_source_of_a_mixture_has_separate_epochs() -> None:
    data = samples(30, 10, weights=(1.0, 1.0))
    numbers = data.list_numbers(0, 60)
    first = [number for number in numbers if number < 30]
    second = [number for number in numbers if number >= 30]
    assert sorted(first) == list(range(30))
    assert sorted(second) == sorted([*range(30, 40)] * 3)


def test_ranks_make_equally_many_validation_passes_and_each_sample_is_in_one() -> None:
    validation = ValidationSet(samples(30, 3), 7)
    assert validation.num_samples == 6  # the second source has only 3
    for dp_size in (1, 2, 4, 5, 8):
        ranks = [
            list(iterate_validation_batches(validation, dp_rank=rank, dp_size=dp_size, micro_size=2))
            for rank in range(dp_size)
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
    data = Samples([TextSampleSource("s", Fixed())], [1], seed=0, rules=rules)
    loader = open_loader(data, global_size=1, micro_size=1, dp_rank=0, dp_size=1)
    (batch,) = loader.read_batch(0).micro_batches
    loader.close()
    assert batch.inputs.tolist() == [[5, 6, 0, 7, 0, 0, 8, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert batch.labels.tolist() == [[6, 0, -100, 0, -100, -100, 9, 4]]
    assert batch.valid_tokens == 5


# ---- counted epochs ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from([4, 8, 12]))
@settings(max_examples=trials(40))
def test_each_epoch_has_each_sample_exactly_once_and_ends_with_a_full_batch(counts: list[int], batch: int) -> None:
    data = samples(*counts, batch=batch)
    length, total = data.epoch_samples, sum(counts)
    assert length % batch == 0
    assert total <= length < total + batch
    orders = []
    for epoch in range(3):
        rows = data.read_at(epoch * length, length)
        used = [row.number for row in rows if row is not None]
        assert sorted(used) == list(range(total))
        assert used == data.list_numbers(epoch * length, length)
        assert all(row is None for row in rows[total:])
        orders.append(used)
    assert total < 8 or orders[0] != orders[1], "each epoch has a different order"


def test_an_epoch_of_one_source_has_the_order_that_it_has_without_epochs() -> None:
    assert samples(12, batch=4).list_numbers(0, 24) == samples(12, batch=None).list_numbers(0, 24)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_padding_of_an_epoch_has_no_labels_and_no_sample_number_but_a_position(dp_size: int) -> None:
    data = samples(13, batch=8)
    sample_numbers, tokens, positions = [], 0, []
    for rank in range(dp_size):
        batch = read_batch(data, Share(global_size=8, micro_size=2, dp_rank=rank, dp_size=dp_size), 8)
        assert len(batch.micro_batches) == 8 // dp_size // 2
        sample_numbers += batch.samples
        tokens += sum(micro.valid_tokens for micro in batch.micro_batches)
        positions += [position for micro in batch.micro_batches for position in micro.sample_positions.tolist()]
    assert sample_numbers == data.list_numbers(8, 8)
    assert len(sample_numbers) == 5
    assert tokens == 5 * 8
    assert positions == list(range(8, 16))


def test_configured_epochs_of_text_are_part_of_its_identity(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(json_lines())
    settings = data_config(tmp_path, tmp_path / "d.jsonl")
    endless, counted = open_data(settings, 8), open_data(settings, 8, epochs=2)
    assert endless.epoch_samples is None
    assert counted.epoch_samples == -(-counted.training.num_samples // 8) * 8
    assert endless.identity != counted.identity
    assert counted.identity == open_data(settings, 8, epochs=3).identity, "a run may be given more epochs"


def test_epochs_of_text_that_is_tokenised_online_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(json_lines())
    settings = data_config(tmp_path, tmp_path / "d.jsonl", tokenization="Online")
    with pytest.raises(UserError, match=r"data.tokenization is Online, .* set it to Ahead"):
        open_data(settings, 8, epochs=1)


def test_weights_beside_epochs_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines())
    (tmp_path / "b.jsonl").write_bytes(json_lines())
    sources = [{"source": str(tmp_path / "a.jsonl"), "weight": 2}, {"source": str(tmp_path / "b.jsonl")}]
    with pytest.raises(UserError, match=r"data.sources: has the weights 2, 1, but with epochs"):
        open_data(data_config(tmp_path, "unused", sources=sources), 8, epochs=1)
