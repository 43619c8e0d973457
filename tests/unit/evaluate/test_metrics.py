"""Compute figures of answers, and compare with figures computed by hand."""

import math

import pytest

from trainium_trainer.evaluate import metrics
from trainium_trainer.evaluate.answering.generation import draw_seeds, group_by_length


def test_only_surrounding_white_space_of_an_answer_is_ignored() -> None:
    assert metrics.is_exact_match(" Paris\n", "Paris")
    assert not metrics.is_exact_match("paris", "Paris")
    assert not metrics.is_exact_match("Paris, France", "Paris")


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence() -> None:
    # "the cat mat" is common: precision 3 / 4, recall 3 / 6.
    assert metrics.compute_rouge_l("the cat mat dog", "the cat sat on the mat") == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert metrics.compute_rouge_l("", "the cat") == 0
    assert metrics.compute_rouge_l("答え", "答え") is None


def test_perplexity_is_the_exponential_of_the_mean_loss_of_a_token() -> None:
    assert metrics.compute_perplexity(4 * math.log(0.25), 4) == pytest.approx(4)
    assert metrics.compute_perplexity(-1e6, 1) == math.inf


def test_the_likeliest_label_is_the_first_of_equal_ones() -> None:
    assert metrics.find_likeliest([-3.0, -1.0, -1.0]) == 1


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("entailment", 0),
        ("  not_entailment.\nand more", 1),
        ("entailments", None),
        ("not_entailment_at_all", None),
        ("it is entailment", None),
        ("", None),
    ],
)
def test_the_label_that_an_answer_begins_with_counts(answer: str, label: int | None) -> None:
    assert metrics.label_in(answer, ("entailment", "not_entailment")) == label


def test_the_longer_of_two_matching_labels_counts() -> None:
    assert metrics.label_in("very good", ("very", "very good")) == 1


def test_means_leave_out_unknown_values() -> None:
    assert metrics.compute_mean([True, None, False, True]) == pytest.approx(2 / 3)
    assert metrics.compute_mean([None]) is None


def test_batches_hold_each_number_once_with_the_longest_first() -> None:
    assert group_by_length([3, 9, 4, 9, 1], 2) == [[1, 3], [2, 0], [4]]


def test_the_seed_of_a_draw_depends_on_the_prompt_and_its_number_of_occurrences() -> None:
    seeds = draw_seeds([[1, 2], [3], [1, 2]], 7)
    assert len(set(seeds)) == 3
    assert draw_seeds([[3], [1, 2], [1, 2]], 7) == [seeds[1], seeds[0], seeds[2]]
    assert not set(draw_seeds([[1, 2], [3]], 8)) & set(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
