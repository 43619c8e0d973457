"""The model of memory: its table is that of docs/parallelism.md, and the tiers take what they allocate."""

from dataclasses import replace

import pytest

from trainium_contract.models.families import PRESETS
from trainium_contract.models.parameters import count_parameters
from trainium_contract.requirements.memory_estimate import (
    COPIES_OF_BUDDY,
    SNAPSHOTS_OF_SHARD,
    MemorySetting,
    TrainedParameters,
    WeightLayout,
    count_rank_parameters,
    estimate_memory,
    logits_chunk_tokens,
)
from trainium_contract.trainer.parallelism import DataParallelMode, Precision, Recompute
from trainium_trainer.checkpoint.memory import memory_tier

MODEL = PRESETS["Llama2-70B"]
N = 8
SETTING = MemorySetting(
    tensor=1,
    pipeline=1,
    data_parallel=N,
    processes_per_node=8,
    mode=DataParallelMode.REPLICATED,
    precision=Precision.FLOAT32,
    recompute=Recompute.FULL,
    sequence=False,
    micro_size=1,
    length=128,
    micro_batches=1,
    snapshots=True,
    buddies=True,
)
MODES = (DataParallelMode.REPLICATED, DataParallelMode.SHARDED_OPTIMIZER, DataParallelMode.FULLY_SHARDED)


@pytest.mark.parametrize(
    ("precision", "bytes_by_mode", "accumulating"),
    [
        (Precision.FLOAT32, (16, 4 + 16 / N, 16 / N), 8 + 16 / N),
        (Precision.BFLOAT16, (16, 2 + 16 / N, 16 / N), 6 + 16 / N),
        (Precision.BFLOAT16_STOCHASTIC, (10, 2 + 12 / N, 12 / N), 6 + 12 / N),
    ],
)
def test_the_bytes_of_a_parameter_are_those_of_the_documented_table(
    precision: Precision, bytes_by_mode: tuple[float, ...], accumulating: float
) -> None:
    number = count_rank_parameters(MODEL, SETTING)
    for mode, expected in zip(MODES, bytes_by_mode, strict=True):
        estimate = estimate_memory(MODEL, replace(SETTING, mode=mode, precision=precision))
        assert estimate.state / number == pytest.approx(expected, rel=1e-6), mode
    divided = replace(SETTING, mode=DataParallelMode.SHARDED_OPTIMIZER, precision=precision)
    for setting in (replace(divided, micro_batches=4), replace(divided, layout=WeightLayout.NXD)):
        assert estimate_memory(MODEL, setting).state / number == pytest.approx(accumulating, rel=1e-6)


def test_one_rank_holds_the_whole_model_and_repeated_heads_are_counted() -> None:
    assert count_rank_parameters(MODEL, SETTING) == count_parameters(MODEL)
    wide = count_rank_parameters(MODEL, replace(SETTING, tensor=32))
    without = replace(MODEL, num_key_value_heads=32)
    assert 32 * wide > count_parameters(MODEL)
    assert wide == count_rank_parameters(without, replace(SETTING, tensor=32)), "four copies of 8 heads are 32 heads"


def test_snapshots_take_three_files_of_each_shard_of_a_node_and_two_of_a_buddys() -> None:
    assert (SNAPSHOTS_OF_SHARD, COPIES_OF_BUDDY) == (memory_tier._OWN_FILES, memory_tier._KEPT_FILES)
    state = 12 * count_rank_parameters(MODEL, SETTING)
    assert estimate_memory(MODEL, SETTING).shared_memory == 3 * state, "replicas of a node share one shard"
    assert estimate_memory(MODEL, replace(SETTING, snapshots=False)).shared_memory == 0
    sharded = replace(SETTING, mode=DataParallelMode.FULLY_SHARDED)
    assert estimate_memory(MODEL, sharded).shared_memory == pytest.approx(3 * state, rel=1e-6), "one node has no buddy"
    two_nodes = replace(sharded, processes_per_node=4)
    assert estimate_memory(MODEL, two_nodes).shared_memory == pytest.approx(5 * state / 2, rel=1e-6)
    assert estimate_memory(MODEL, replace(two_nodes, buddies=False)).shared_memory == pytest.approx(
        3 * state / 2, rel=1e-6
    )


def test_recomputing_and_dividing_the_sequence_take_less_and_longer_samples_more() -> None:
    kept = replace(SETTING, recompute=Recompute.NONE, tensor=8)
    activations = estimate_memory(MODEL, kept).activations
    assert estimate_memory(MODEL, replace(kept, recompute=Recompute.FULL)).activations < activations
    assert estimate_memory(MODEL, replace(kept, sequence=True)).activations < activations
    assert estimate_memory(MODEL, replace(kept, length=256)).activations > activations


@pytest.mark.parametrize(
    ("precision", "weight_bytes", "trained_bytes"),
    [(Precision.FLOAT32, 4, 16), (Precision.BFLOAT16, 2, 16), (Precision.BFLOAT16_STOCHASTIC, 2, 10)],
)
def test_frozen_weights_have_no_gradient_and_no_moments_and_are_in_no_snapshot(
    precision: Precision, weight_bytes: int, trained_bytes: int
) -> None:
    number, tuned = count_rank_parameters(MODEL, SETTING), TrainedParameters(weights=1000, adapters=5000)
    setting = replace(SETTING, precision=precision, trained=tuned)
    estimate, kept = estimate_memory(MODEL, setting), 2 if precision.has_bfloat16_state else 4
    assert estimate.state == (number - 1000) * weight_bytes + 6000 * trained_bytes
    assert estimate.shared_memory == 3 * 3 * kept * 6000
    assert estimate.parameters == number + 5000
    divided = estimate_memory(MODEL, replace(setting, mode=DataParallelMode.FULLY_SHARDED))
    assert divided.state == pytest.approx(estimate.state / N, rel=1e-3)
    gathered = estimate_memory(MODEL, replace(setting, mode=DataParallelMode.SHARDED_OPTIMIZER))
    assert gathered.state == pytest.approx(number * weight_bytes * (1 + 1 / N), rel=1e-3)
    nxd = estimate_memory(MODEL, replace(setting, mode=DataParallelMode.FULLY_SHARDED, layout=WeightLayout.NXD))
    assert nxd.state == pytest.approx(number * weight_bytes, rel=1e-3), "NxD divides no frozen weight over the replicas"


def test_training_all_weights_by_name_needs_what_training_all_needs() -> None:
    number = count_rank_parameters(MODEL, SETTING)
    assert estimate_memory(MODEL, replace(SETTING, trained=TrainedParameters(number, 0))) == estimate_memory(
        MODEL, SETTING
    )


def test_a_divided_sequence_divides_activations_and_never_holds_the_logits_of_all_tokens() -> None:
    model = PRESETS["Llama3.1-8B"]
    whole = replace(SETTING, tensor=8, length=131_072, precision=Precision.BFLOAT16)
    divided = replace(whole, context=4)
    activations = estimate_memory(model, whole).activations
    assert estimate_memory(model, divided).activations < 0.4 * activations
    assert estimate_memory(model, divided).state == estimate_memory(model, whole).state
    logits = 10 * (131_072 - logits_chunk_tokens(model.vocab_size // 8)) * model.vocab_size // 8
    assert estimate_memory(model, replace(whole, whole_logits=True)).activations - activations == logits


def test_a_mask_on_nxd_costs_the_scores_of_one_layer_or_of_all_without_recompute() -> None:
    model = PRESETS["Llama3-8B"]
    plain = replace(SETTING, tensor=8, length=4096, layout=WeightLayout.NXD)
    for recompute, layers in ((Recompute.FULL, 1), (Recompute.NONE, model.num_layers)):
        without = replace(plain, recompute=recompute)
        scores = estimate_memory(model, replace(without, masked=True)).activations
        scores -= estimate_memory(model, without).activations
        assert scores == layers * 12 * 4096**2 * model.num_attention_heads // 8
    native = replace(plain, layout=WeightLayout.NATIVE)
    assert estimate_memory(model, replace(native, masked=True)) == estimate_memory(model, native)
