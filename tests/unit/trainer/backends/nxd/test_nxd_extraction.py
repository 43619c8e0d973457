"""Choose the ranks of backend Nxd that have separate graphs, so that all are compiled ahead and none twice."""

from typing import Any

from trainium_contract.models.families import PRESETS
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.backends.nxd.extraction import ranks_with_distinct_graphs
from trainium_trainer.compile.dry_run import MeshCoordinate, first_rank_at, launch_at, mesh_coordinates
from trainium_trainer.compile.graphs import describe_graphs
from trainium_trainer.configuration.config import Settings
from trainium_trainer.tuning.trainable import select_trainable


def nxd_settings(tensor: int, data: int, **fields: Any) -> Settings:
    """Return settings of Llama 2 70B, with 8 key/value heads, divided by NxD."""
    given = {"backend": "Nxd", "dataParallel": "FullySharded", "batch": {"globalSize": data}} | fields
    config = TrainingConfig.model_validate({"parallelism": {"tensor": tensor}} | given)
    shape = PRESETS["Llama2-70B"]
    return Settings(
        config=config, shape=shape, launch=launch_at(0, tensor * data), trainable=select_trainable(shape, config.tuning)
    )


def test_data_ranks_with_a_different_layout_of_repeated_heads_are_compiled_too() -> None:
    # Of 512 rows of query, key and value the first half is on one rank, the other half on four each.
    assert ranks_with_distinct_graphs(nxd_settings(32, 128)) == (0, 64)
    assert ranks_with_distinct_graphs(nxd_settings(32, 5)) == (0, 2, 3), (
        "the third has rows of both kinds, so it needs a separate graph"
    )
    stochastic = nxd_settings(32, 5, precision="BFloat16Stochastic")
    assert ranks_with_distinct_graphs(stochastic) == (0, 2, 3, 4), (
        "there keys and values are also made equal, in runs of rows"
    )
    found = [
        first_rank_at(place, stochastic.config, 160)
        for place in mesh_coordinates(stochastic.config, ranks_with_distinct_graphs(stochastic))
    ]
    assert found == [data * 32 + part for part in range(32) for data in (0, 2, 3, 4)]


def test_one_rank_represents_its_replicas_without_repeated_heads_or_divisions() -> None:
    assert ranks_with_distinct_graphs(nxd_settings(8, 16)) == (0,)
    assert ranks_with_distinct_graphs(nxd_settings(32, 128, dataParallel="Replicated")) == (0,)
    assert ranks_with_distinct_graphs(nxd_settings(32, 1)) == (0,)


def test_an_adapter_of_fewer_rows_than_replicas_has_ranks_without_any_of_it() -> None:
    tuned = nxd_settings(2, 8, tuning={"method": "LoRA", "lora": {"rank": 4, "targets": ["gate_proj"]}})
    assert ranks_with_distinct_graphs(tuned) == (0, 4), (
        "its first matrix is whole on both, and has a row for four of the eight"
    )


def test_an_entry_that_was_made_for_one_kind_of_rank_is_not_taken_for_all() -> None:
    with_more, with_one = nxd_settings(32, 128), nxd_settings(8, 16)
    found = [describe_graphs(each, image="i", flags=()).compute for each in (with_more, with_one)]
    assert found[0]["dataRanks"] == (0, 64)
    assert "dataRanks" not in found[1], "what needs no more places keeps its key"


def test_a_rank_of_another_kind_is_found_where_groups_lie_in_each_other() -> None:
    config = nxd_settings(4, 16).config
    ranks = [
        first_rank_at(MeshCoordinate(0, part, data), config, 64, tensor_stride=8)
        for data in (0, 3, 9)
        for part in (0, 1)
    ]
    assert ranks == [0, 8, 3, 11, 33, 41]
