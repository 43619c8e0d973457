"""Choose the ranks of backend Nxd that have separate graphs, so that all are compiled ahead and none twice."""

from __future__ import annotations

from typing import Any

from trainium_contract.models.families import PRESETS
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.backends.nxd.extraction import data_ranks
from trainium_trainer.compile.graphs import describe_graphs
from trainium_trainer.compile.rehearsal import Place, launch_at, places, rank_of
from trainium_trainer.configuration.config import Settings
from trainium_trainer.tuning.choice import choose


def nxd_settings(tensor: int, data: int, **fields: Any) -> Settings:
    """Llama 2 70B, of 8 key/value heads, divided by NxD."""
    given = {"backend": "Nxd", "dataParallel": "FullySharded", "batch": {"globalSize": data}} | fields
    config = TrainingConfig.model_validate({"parallelism": {"tensor": tensor}} | given)
    shape = PRESETS["Llama2-70B"]
    return Settings(config=config, shape=shape, launch=launch_at(0, tensor * data), choice=choose(shape, config.tuning))


def test_ranks_that_count_repeated_heads_otherwise_are_rehearsed_too() -> None:
    # Of 512 rows of query, key and value the first half is on one rank, the other half on four each.
    assert data_ranks(nxd_settings(32, 128)) == (0, 64)
    assert data_ranks(nxd_settings(32, 5)) == (0, 2, 3), "the third has rows of both kinds, and a graph of its own"
    stochastic = nxd_settings(32, 5, precision="BFloat16Stochastic")
    assert data_ranks(stochastic) == (0, 2, 3, 4), "there keys and values are also made equal, in runs of rows"
    found = [rank_of(place, stochastic.config, 160) for place in places(stochastic.config, data_ranks(stochastic))]
    assert found == [data * 32 + part for part in range(32) for data in (0, 2, 3, 4)]


def test_where_no_head_is_repeated_or_nothing_is_divided_one_rank_stands_for_its_replicas() -> None:
    assert data_ranks(nxd_settings(8, 16)) == (0,)
    assert data_ranks(nxd_settings(32, 128, dataParallel="Replicated")) == (0,)
    assert data_ranks(nxd_settings(32, 1)) == (0,)


def test_an_adapter_of_fewer_rows_than_replicas_has_ranks_without_any_of_it() -> None:
    tuned = nxd_settings(2, 8, tuning={"method": "LoRA", "lora": {"rank": 4, "targets": ["gate_proj"]}})
    assert data_ranks(tuned) == (0, 4), "its first matrix is whole on both, and has a row for four of the eight"


def test_an_entry_that_was_made_for_one_kind_of_rank_is_not_taken_for_all() -> None:
    with_more, with_one = nxd_settings(32, 128), nxd_settings(8, 16)
    found = [describe_graphs(each, image="i", flags=()).compute for each in (with_more, with_one)]
    assert found[0]["dataRanks"] == (0, 64)
    assert "dataRanks" not in found[1], "what needs no more places keeps its key"


def test_a_rank_of_another_kind_is_found_where_groups_lie_in_each_other() -> None:
    config = nxd_settings(4, 16).config
    ranks = [rank_of(Place(0, part, data), config, 64, apart=8) for data in (0, 3, 9) for part in (0, 1)]
    assert ranks == [0, 8, 3, 11, 33, 41]
