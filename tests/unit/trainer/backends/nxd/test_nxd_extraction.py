"""Choose the ranks of backend Nxd that have distinct graphs, to compile each graph once."""

from typing import Any

from trainium_contract.models.families import PRESETS
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.backends.nxd.extraction import find_ranks_with_distinct_graphs
from trainium_trainer.compile.dry_run import create_dry_run_launch, list_ranks_to_compile
from trainium_trainer.compile.graphs import describe_graphs
from trainium_trainer.configuration.config import Settings
from trainium_trainer.tuning.trainable import select_trainable


def nxd_settings(tensor: int, data: int, **fields: Any) -> Settings:
    """Return settings of Llama 2 70B, with 8 key/value heads, divided by NxD."""
    settings = {"backend": "Nxd", "dataParallel": "FullySharded", "batch": {"globalSize": data}} | fields
    config = TrainingConfig.model_validate({"parallelism": {"tensor": tensor}} | settings)
    shape = PRESETS["Llama2-70B"]
    return Settings(
        config=config,
        shape=shape,
        launch=create_dry_run_launch(0, tensor * data),
        trainable=select_trainable(shape, config.tuning),
    )


def test_data_ranks_with_a_different_layout_of_repeated_heads_are_compiled_too() -> None:
    # The first half of 512 rows is on one rank, the other half on four ranks each.
    assert find_ranks_with_distinct_graphs(nxd_settings(32, 128)) == (0, 64)
    assert find_ranks_with_distinct_graphs(nxd_settings(32, 5)) == (0, 2, 3), "the third rank has rows of both kinds"
    stochastic = nxd_settings(32, 5, precision="BFloat16Stochastic")
    assert find_ranks_with_distinct_graphs(stochastic) == (0, 2, 3, 4), (
        "keys and values are also synchronized, in runs of rows"
    )
    ranks = list_ranks_to_compile(stochastic.config, 160, data_ranks=find_ranks_with_distinct_graphs(stochastic))
    assert ranks == tuple(data * 32 + part for part in range(32) for data in (0, 2, 3, 4))


def test_one_rank_represents_its_replicas_without_repeated_heads_or_divisions() -> None:
    assert find_ranks_with_distinct_graphs(nxd_settings(8, 16)) == (0,)
    assert find_ranks_with_distinct_graphs(nxd_settings(32, 128, dataParallel="Replicated")) == (0,)
    assert find_ranks_with_distinct_graphs(nxd_settings(32, 1)) == (0,)


def test_an_adapter_of_fewer_rows_than_replicas_has_ranks_without_any_of_it() -> None:
    tuned = nxd_settings(2, 8, tuning={"method": "LoRA", "lora": {"rank": 4, "targets": ["gate_proj"]}})
    assert find_ranks_with_distinct_graphs(tuned) == (0, 4), "four of the eight ranks have a row of the first matrix"


def test_the_key_of_graphs_names_the_ranks_with_distinct_graphs() -> None:
    with_more, with_one = nxd_settings(32, 128), nxd_settings(8, 16)
    inputs = [describe_graphs(settings, image="i", flags=()).compute for settings in (with_more, with_one)]
    assert inputs[0]["dataRanks"] == (0, 64)
    assert "dataRanks" not in inputs[1]


def test_the_ranks_to_compile_are_found_in_interleaved_groups() -> None:
    ranks = list_ranks_to_compile(nxd_settings(4, 16).config, 64, data_ranks=(0, 3, 9), tensor_stride=8)
    assert ranks == (0, 3, 33, 8, 11, 41, 16, 19, 49, 24, 27, 57)
