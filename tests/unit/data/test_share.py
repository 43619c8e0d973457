"""Assign samples to ranks and passes, at even and at uneven sizes."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from tests.testing.trainer.data_files import TokenRange, read_batch
from trainium_contract.sizes import (
    BatchShape,
    SizeRule,
    compute_step_batch_size,
    count_micro_batches,
    order_by_likelihood,
)
from trainium_trainer.checkpoint.sharding import Grid
from trainium_trainer.data.batches.samples import RankSamples, SampleRules, Samples, Share, TextSampleSource
from trainium_trainer.data.loader import Loader
from trainium_trainer.models.loss import IGNORED_LABEL

LENGTH = 4
RULES = SampleRules(sequence_length=LENGTH, vocabulary=2**16)
BATCHES = st.integers(1, 70)
DEGREES = st.integers(1, 24)


def shares(global_size: int, micro_size: int, dp_size: int) -> list[Share]:
    return [
        Share(global_size=global_size, micro_size=micro_size, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)
    ]


def samples(count: int) -> Samples:
    return Samples([TextSampleSource("s", TokenRange(count * LENGTH + 1))], [1.0], seed=3, rules=RULES)


@given(BATCHES, st.integers(1, 8), DEGREES)
def test_the_ranks_have_every_sample_of_a_step_once_and_differ_by_one_at_most(
    global_size: int, micro_size: int, dp_size: int
) -> None:
    ranks = shares(global_size, micro_size, dp_size)
    sample_numbers = [number for share in ranks for number in range(share.offset, share.offset + share.size)]
    assert sample_numbers == list(range(global_size))
    sizes = [share.size for share in ranks]
    assert max(sizes) - min(sizes) <= 1


@given(BATCHES, st.integers(1, 8), DEGREES)
def test_all_ranks_make_as_many_passes_and_no_fewer_would_hold_the_batch(
    global_size: int, micro_size: int, dp_size: int
) -> None:
    ranks = shares(global_size, micro_size, dp_size)
    (count,) = {share.passes for share in ranks}
    assert count * micro_size * dp_size >= global_size > (count - 1) * micro_size * dp_size
    assert all(share.size <= count * micro_size for share in ranks)


@given(
    global_size=st.integers(1, 24),
    micro_size=st.integers(1, 4),
    dp_size=st.integers(1, 12),
    step=st.integers(0, 50),
    count=st.integers(1, 60),
)
@settings(max_examples=trials(60))
def test_micro_batches_have_one_shape_and_padding_rows_add_no_tokens(
    global_size: int, micro_size: int, dp_size: int, step: int, count: int
) -> None:
    data, position = samples(count), step * global_size
    batches = [read_batch(data, share, position) for share in shares(global_size, micro_size, dp_size)]
    assert [number for batch in batches for number in batch.samples] == data.list_numbers(position, global_size)
    micros = [micro for batch in batches for micro in batch.micro_batches]
    assert len(micros) == dp_size * count_micro_batches(global_size, micro_size, dp_size)
    assert {tuple(tensor.shape) for micro in micros for tensor in (micro.inputs, micro.labels)} == {
        (micro_size, LENGTH)
    }
    assert sum(micro.valid_tokens for micro in micros) == global_size * LENGTH
    rows = [row for micro in micros for row in micro.labels if (row != IGNORED_LABEL).any()]
    assert len(rows) == global_size
    positions = [
        int(sample_position)
        for micro in micros
        for sample_position, row in zip(micro.sample_positions, micro.labels, strict=True)
        if (row != IGNORED_LABEL).any()
    ]
    assert positions == list(range(position, position + global_size)), "dropout depends on them"
    for micro in micros:
        is_empty = (micro.labels == IGNORED_LABEL).all(dim=1)
        assert (micro.inputs[is_empty] == RULES.padding).all(), "padding has valid token ids"


@given(
    global_size=st.integers(1, 40),
    micro_size=st.integers(1, 4),
    dp_size=st.integers(1, 8),
    tp_size=st.integers(1, 5),
    pp_size=st.integers(1, 4),
    position=st.integers(0, 10_000),
)
def test_all_tensor_and_pipeline_ranks_of_a_data_parallel_rank_have_its_samples_and_each_sample_is_in_one_group(
    global_size: int, micro_size: int, dp_size: int, tp_size: int, pp_size: int, position: int
) -> None:
    samples_by_column: dict[tuple[int, int], list[int]] = {}
    shares_by_dp_rank: dict[int, set[Share]] = {}
    for rank in range(dp_size * tp_size * pp_size):
        pp_rank, dp_rank, tp_rank = Grid(pp_size, dp_size, tp_size).find_coordinates(rank)
        share = Share(global_size=global_size, micro_size=micro_size, dp_rank=dp_rank, dp_size=dp_size)
        samples_by_column.setdefault((pp_rank, tp_rank), []).extend(share.list_positions(position))
        shares_by_dp_rank.setdefault(dp_rank, set()).add(share)
    step = list(range(position, position + global_size))
    assert samples_by_column == {(pp, tp): step for pp in range(pp_size) for tp in range(tp_size)}
    assert {rank: len(distinct) for rank, distinct in shares_by_dp_rank.items()} == dict.fromkeys(range(dp_size), 1)
    shape = BatchShape(
        cores_per_node=dp_size * tp_size * pp_size,
        tensor=tp_size,
        pipeline=pp_size,
        global_batch_size=max(global_size, micro_size),
        micro_batch_size=micro_size,
    )
    assert shape.data_parallel(1) == dp_size, "operator and trainer agree"
    assert shape.micro_batches(1) == count_micro_batches(shape.global_batch_size, micro_size, dp_size)
    idle = sum(share.size == 0 for share in shares(shape.global_batch_size, micro_size, dp_size))
    assert shape.idle_ranks(1) == idle, "ranks that never have work are reported"


def test_the_batch_of_an_empty_pass_is_built_once() -> None:
    share = Share(global_size=4, micro_size=1, dp_rank=0, dp_size=3)
    loader = Loader(RankSamples(samples(40), share), RULES, share)
    first, second = loader.read_batch(0), loader.read_batch(4)
    loader.close()
    assert [micro.valid_tokens for micro in first.micro_batches] == [LENGTH, 0]
    assert first.micro_batches[-1] is second.micro_batches[-1]


# ---- sizes ----------------------------------------------------------------------------------------------------------


def batch_shape(
    global_size: int, micro: int = 1, cores: int = 1, tensor: int = 1, rule: SizeRule = SizeRule.ANY
) -> Any:
    return BatchShape(
        cores_per_node=cores,
        tensor=tensor,
        pipeline=1,
        global_batch_size=global_size,
        micro_batch_size=micro,
        rule=rule,
    )


SHAPES = st.builds(
    BatchShape,
    cores_per_node=st.sampled_from([1, 2, 3, 4, 32]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 3]),
    global_batch_size=st.integers(1, 300),
    micro_batch_size=st.integers(1, 4),
    rule=st.sampled_from(SizeRule),
    tolerance=st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.29, 0.5]),
)


@given(SHAPES, st.integers(1, 60), st.integers(1, 60))
def test_the_best_size_has_the_most_samples_a_pass_and_of_those_the_fewest_nodes(
    shape: BatchShape, nodes: int, smallest: int
) -> None:
    legal = shape.legal_sizes(smallest, nodes)
    best = min(legal, key=lambda size: (-Fraction(shape.batch(size), shape.micro_batches(size)), size), default=0)
    assert shape.best(nodes, smallest) == best
    assert shape.floor(nodes, smallest) == max(legal, default=0)


@given(SHAPES, st.integers(1, 60), st.integers(1, 60))
def test_the_useful_sizes_are_those_that_are_best_for_some_number_of_nodes(
    shape: BatchShape, largest: int, smallest: int
) -> None:
    best = {shape.best(nodes, smallest) for nodes in range(smallest, largest + 1)} - {0}
    assert shape.useful_sizes(smallest, largest) == tuple(sorted(best))


@given(BATCHES, st.integers(1, 8), DEGREES, st.floats(0, 0.5))
def test_a_step_has_the_nearest_divisible_batch_within_the_tolerance_else_the_global_batch(
    global_size: int, micro_size: int, dp_size: int, tolerance: float
) -> None:
    rows = micro_size * dp_size
    batch = compute_step_batch_size(global_size, micro_size, dp_size, tolerance)
    even = range(rows, 2 * global_size + rows + 1, rows)
    nearest = min(even, key=lambda count: abs(count - global_size))
    difference = Fraction(abs(nearest - global_size), global_size)
    assert batch in (nearest, global_size)
    if batch != global_size:
        assert difference <= Fraction(round(tolerance * 10**6), 10**6)
    elif nearest != global_size:
        assert difference > Fraction(round(tolerance * 10**6), 10**6)
    assert compute_step_batch_size(global_size, micro_size, dp_size) == global_size


@given(SHAPES)
def test_a_size_that_divides_the_global_batch_uses_it_at_any_tolerance(batch_shape: BatchShape) -> None:
    for nodes in replace(batch_shape, rule=SizeRule.EVEN).legal_sizes(1, 60):
        assert batch_shape.batch(nodes) == batch_shape.global_batch_size
        assert batch_shape.fill_ratio(nodes) == 1.0


@given(SHAPES)
def test_an_even_size_is_its_own_best(batch_shape: BatchShape) -> None:
    any_size = replace(batch_shape, rule=SizeRule.ANY, tolerance=0.0)
    for nodes in replace(batch_shape, rule=SizeRule.EVEN).legal_sizes(1, 60):
        assert any_size.best(nodes) == nodes
        assert any_size.fill_ratio(nodes) == 1.0


@pytest.mark.parametrize(
    ("nodes", "count", "speed"), [(128, 2, 1.0), (127, 3, 2 / 3), (86, 3, 2 / 3), (85, 4, 0.5), (64, 4, 0.5)]
)
def test_hlat_without_a_spare_keeps_two_thirds_of_its_speed(nodes: int, count: int, speed: float) -> None:
    hlat = batch_shape(1024, cores=32, tensor=8)
    assert hlat.micro_batches(nodes) == count
    assert hlat.speed(nodes, 128) == pytest.approx(speed)
    assert hlat.useful_sizes(64, 128) == (64, 86, 128)


@pytest.mark.parametrize(
    ("nodes", "batch", "count", "speed"), [(128, 1024, 2, 1.0), (127, 1016, 2, 0.992), (126, 1024, 3, 2 / 3)]
)
def test_hlat_with_a_hundredth_of_tolerance_keeps_nearly_all_of_its_speed(
    nodes: int, batch: int, count: int, speed: float
) -> None:
    hlat = replace(batch_shape(1024, cores=32, tensor=8), tolerance=0.01)
    assert (hlat.batch(nodes), hlat.micro_batches(nodes)) == (batch, count)
    assert hlat.speed(nodes, 128) == pytest.approx(speed, rel=1e-3)
    assert hlat.best(nodes) == (nodes if count == 2 else 86)
    assert hlat.useful_sizes(64, 128) == (64, 85, 86, 127, 128)


def test_the_sizes_after_losses_of_one_two_or_four_nodes_are_compiled_first() -> None:
    assert order_by_likelihood(range(90, 130), 128)[:8] == (127, 126, 124, 120, 112, 96, 128, 129)
    assert order_by_likelihood((64, 86, 128), 128) == (86, 64, 128), (
        "86 is the best size after a loss of up to 42 nodes"
    )
    assert order_by_likelihood((64, 128, 160), 86) == (64, 128, 160)
    assert order_by_likelihood((), 4) == ()


@given(st.sets(st.integers(1, 60), max_size=20), st.integers(1, 60))
def test_every_size_is_compiled_once_and_first_the_one_for_the_loss_of_a_node(sizes: set[int], present: int) -> None:
    order = order_by_likelihood(sizes, present)
    assert sorted(order) == sorted(sizes)
    if smaller := [size for size in sizes if size < present]:
        assert order[0] == max(smaller)


def test_a_llama_3_8b_job_keeps_eight_ninths_on_fifteen_of_sixteen_nodes() -> None:
    llama = batch_shape(16 * 16 * 4, cores=32, tensor=8)
    assert (llama.micro_batches(16), llama.micro_batches(15)) == (16, 18)
    assert llama.speed(15, 16) == pytest.approx(8 / 9)
    assert batch_shape(16 * 16 * 4, cores=32, tensor=8, rule=SizeRule.EVEN).best(15) == 8
