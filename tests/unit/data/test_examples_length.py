"""Drop, cut and pack examples."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from tests.testing.trainer.example_files import BOS, EOS, decode, encode, make_records
from trainium_contract.trainer.examples import TooLong
from trainium_trainer.data.examples.encoding import EncodedExample, fit_length
from trainium_trainer.data.examples.sample_sources import pack_examples
from trainium_trainer.data.loader import build_micro_batch


@st.composite
def examples(draw: st.DrawFn) -> EncodedExample:
    prefix, prompt, answer = draw(st.integers(0, 1)), draw(st.integers(0, 30)), draw(st.integers(1, 30))
    length = prefix + prompt + answer
    return EncodedExample(np.arange(length), np.arange(length) >= prefix + prompt, prefix + prompt, prefix)


@given(examples(), st.integers(2, 40), st.sampled_from(TooLong))
@settings(max_examples=trials(100))
def test_a_shortened_example_fits_and_keeps_the_part_that_the_rule_names(
    example: EncodedExample, max_tokens: int, rule: TooLong
) -> None:
    kept = fit_length(example, max_tokens, rule)
    if len(example.ids) <= max_tokens:
        assert kept is example
        return
    answer = example.ids[example.answer :].tolist()
    if kept is None:
        space = max_tokens - example.prefix - len(answer)
        reasons = {
            TooLong.DROP: True,
            TooLong.CUT_LEFT: space < 1,
            TooLong.CUT_RIGHT: not example.loss_mask[1:max_tokens].any(),
        }
        assert reasons[rule]
        return
    assert len(kept.ids) == len(kept.loss_mask) == max_tokens
    assert kept.loss_mask[1:].any()
    assert (kept.loss_mask == example.loss_mask[kept.ids]).all(), "the loss mask of each token is unchanged"
    if rule is TooLong.CUT_LEFT:
        assert kept.ids[kept.answer :].tolist() == answer
        assert kept.ids[: example.prefix].tolist() == example.ids[: example.prefix].tolist()
        assert kept.answer > example.prefix
    else:
        assert kept.ids.tolist() == example.ids[:max_tokens].tolist()


@given(st.lists(st.integers(1, 50), max_size=200))
@settings(max_examples=trials(100))
def test_each_example_is_in_one_sequence_and_all_sequences_fit(lengths: list[int]) -> None:
    values = np.array(lengths, np.int64)
    members, starts = pack_examples(values, 50)
    assert sorted(members.tolist()) == list(range(len(lengths)))
    sums = [int(values[members[a:b]].sum()) for a, b in itertools.pairwise(starts)]
    assert all(0 < total <= 50 for total in sums)
    assert len(sums) <= 2 * -(-sum(lengths) // 50), "at most half of the space is unused"


@pytest.mark.parametrize("capacity", [1024, 2048])
def test_lengths_like_those_of_dolly_use_95_of_100_positions(capacity: int) -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(110), 0.95, 15_000).astype(np.int64) + 10
    lengths = np.minimum(drawn, capacity)
    assert 160 < lengths.mean() < 200
    _, starts = pack_examples(lengths, capacity)
    assert lengths.sum() / ((len(starts) - 1) * capacity) >= 0.95


@pytest.mark.parametrize(("rule", "cut", "dropped"), [("Drop", 0, 2), ("CutLeft", 1, 1), ("CutRight", 1, 1)])
def test_too_long_examples_are_always_counted(tmp_path: Path, rule: str, cut: int, dropped: int) -> None:
    # Each of these letters is one token: the tokenizer was trained without capital letters.
    rows = [
        {"q": "X", "a": "Y"},
        {"q": "X" * (10 if rule == "CutRight" else 40), "a": "Y" * (40 if rule == "CutRight" else 10)},
        {"q": "X" * (40 if rule == "CutRight" else 10), "a": "Y" * (10 if rule == "CutRight" else 40)},
    ]
    template = {"prompt": "{q}", "completion": "{a}"}
    data = encode(tmp_path, rows, sequence_length=24, examples={"template": template, "tooLong": rule})
    assert (data.report.counts.cut, data.report.counts.dropped, data.report.examples) == (cut, dropped, 3 - dropped)
    assert sorted(data.report.lengths.tolist()) == [4, 52, 52], "the lengths before cuts"
    if rule == "CutLeft":
        assert decode(data)[1] == (BOS + "X" * 13 + "Y" * 10 + EOS, "Y" * 10 + EOS)
    if rule == "CutRight":
        assert decode(data)[1] == (BOS + "X" * 10 + "Y" * 14, "Y" * 14)


def first_batch(data: Any, count: int) -> Any:
    return build_micro_batch(data.training.read_at(0, count), data.training.rules, 0)


def test_an_example_without_packing_is_padded_without_labels(tmp_path: Path) -> None:
    data = encode(tmp_path, make_records(6), sequence_length=96)
    batch = first_batch(data, 6)
    assert batch.positions is None
    stored = data.sources[0].stored
    for row, number in enumerate(data.training.list_numbers(0, 6)):
        ids, loss_mask = stored.read_example(number)
        count = len(ids) - 1
        assert batch.inputs[row, :count].tolist() == ids[:-1].tolist()
        assert batch.inputs[row, count:].tolist() == [data.training.rules.padding] * (96 - count)
        assert batch.labels[row, :count].tolist() == np.where(loss_mask[1:], ids[1:].astype(np.int64), -100).tolist()
        assert (batch.labels[row, count:] == -100).all()
    assert batch.valid_tokens == int((batch.labels != -100).sum())


def test_packed_examples_begin_at_position_0_and_have_their_own_labels(tmp_path: Path) -> None:
    data = encode(tmp_path, make_records(40), sequence_length=160, examples={"packing": True})
    stored = data.sources[0].stored
    count = data.training.num_samples
    assert count < 25
    batch = first_batch(data, count)
    packed_members, tokens = [], 0
    for row, number in enumerate(data.training.list_numbers(0, count)):
        starts = np.flatnonzero(batch.positions[row].numpy() == 0).tolist()
        members = data.training.sources[0].list_members(number)
        packed_members += members
        for start, member in zip(starts, members, strict=False):
            ids, loss_mask = stored.read_example(member)
            end = start + len(ids) - 1
            tokens += end - start
            assert batch.inputs[row, start:end].tolist() == ids[:-1].tolist()
            assert batch.positions[row, start:end].tolist() == list(range(end - start))
            expected = np.where(loss_mask[1:], ids[1:].astype(np.int64), -100)
            assert batch.labels[row, start:end].tolist() == expected.tolist()
        assert (batch.labels[row, end:] == -100).all()
        assert batch.positions[row, end:].tolist() == list(range(160 - end))
    assert sorted(packed_members) == list(range(40)), "each example exactly once"
    assert data.report.occupancy == tokens / (count * 160) > 0.9


def test_examples_joined_without_a_mask_keep_their_end_tokens_and_labels(tmp_path: Path) -> None:
    joined = {"packing": True, "maskExamples": False, "loss": "All"}
    data = encode(tmp_path, make_records(40), sequence_length=160, examples=joined)
    stored = data.sources[0].stored
    count = data.training.num_samples
    batch = first_batch(data, count)
    assert batch.positions is None
    packed_members: list[int] = []
    for row, number in enumerate(data.training.list_numbers(0, count)):
        members = data.training.sources[0].list_members(number)
        packed_members += members
        examples = [stored.read_example(member) for member in members]
        tokens = [int(token) for ids, _ in examples for token in ids]
        # The first token of an example is not learned: the one before does not predict it.
        learned = [index > 0 and bool(masked) for _, loss_mask in examples for index, masked in enumerate(loss_mask)]
        assert len(tokens) <= 161
        assert batch.inputs[row, : len(tokens) - 1].tolist() == tokens[:-1]
        expected = [token if is_learned else -100 for token, is_learned in zip(tokens[1:], learned[1:], strict=True)]
        assert batch.labels[row].tolist() == expected + [-100] * (161 - len(tokens))
    assert sorted(packed_members) == list(range(40)), "each example exactly once"
    assert any(len(data.training.sources[0].list_members(number)) > 1 for number in range(count))


def test_packing_and_samples_are_a_function_of_data_and_seed(tmp_path: Path) -> None:
    rows = make_records(60)

    def inputs(rows: list[dict[str, Any]], **settings: Any) -> list[list[int]]:
        return first_batch(encode(tmp_path, rows, examples={"packing": True}, **settings), 12).inputs.tolist()

    first = inputs(rows)
    assert inputs(rows) == first
    assert inputs(rows, seed=1) != first
    assert inputs(random.Random(1).sample(rows, 60)) != first
