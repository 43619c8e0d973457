"""Compile in one process for any rank, in the order of ranks of NxD."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.backends.nxd import extraction
from trainium_trainer.compile.dry_run import DryRunRequest, create_dry_run_launch, list_ranks_to_compile
from trainium_trainer.configuration.config import resolve_settings

pytestmark = [pytest.mark.torch_xla, pytest.mark.timeout(600)]


def dry_run(
    config: dict[str, Any], rank: int, world_size: int, *, graphs: Path | None = None, **fields: Any
) -> dict[str, Any]:
    wire = TrainingConfig.model_validate(config | {"backend": "Nxd"} | fields).to_wire()
    environment = (
        os.environ
        | extraction.build_environment(rank, world_size, world_size)
        | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    )
    if graphs is not None:
        environment["XLA_SAVE_TENSORS_FILE"] = str(graphs)
    completed = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dry_run_process.py"))],
        input=DryRunRequest(
            config=wire, rank=rank, world_size=world_size, local_world_size=world_size
        ).model_dump_json(),
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("mode", ["Replicated", "FullySharded"])
def test_one_process_compiles_the_graphs_of_a_rank_of_eight(base_config: dict[str, Any], mode: str) -> None:
    settings = {"parallelism": {"tensor": 2, "sequence": True}, "dataParallel": mode, "batch": {"globalSize": 16}}
    result = dry_run(base_config, 1, 8, **settings)
    assert result["launched"] > 0
    assert result["groups"] == {
        "2": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "4": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "8": [list(range(8))],
    }


def test_the_third_tensor_rank_of_a_trn1_node_is_rank_sixteen(base_config: dict[str, Any]) -> None:
    result = dry_run(base_config, 16, 32, parallelism={"tensor": 4}, batch={"globalSize": 16})
    assert [0, 8, 16, 24] in result["groups"]["4"]
    assert result["tpRank"] == 2


@pytest.mark.parametrize("mode", ["Replicated", "ShardedOptimizer"])
def test_one_process_compiles_the_graphs_of_a_tuning(base_config: dict[str, Any], base: Path, mode: str) -> None:
    tuning = {"method": "LoRA", "lora": {"rank": 4, "dropout": 0.1, "targets": ["*_proj"]}}
    config = base_config | {"model": {"weights": str(base)}}
    settings = {"parallelism": {"tensor": 2, "sequence": True}, "dataParallel": mode, "batch": {"globalSize": 16}}
    result = dry_run(config, 1, 8, tuning=tuning, **settings)
    assert result["launched"] > 0
    assert result["groups"]["2"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("precision", ["Float32", "BFloat16Stochastic"])
def test_replicas_of_repeated_heads_have_dry_run_graphs(
    base_config: dict[str, Any], tmp_path: Path, precision: str
) -> None:
    fields = {
        "model": {"numKeyValueHeads": 2},
        "parallelism": {"tensor": 4},
        "dataParallel": "FullySharded",
        "precision": precision,
        "batch": {"globalSize": 16},
    }
    world_size = 16
    config = TrainingConfig.model_validate(base_config | {"backend": "Nxd"} | fields)
    distinct_ranks = extraction.find_ranks_with_distinct_graphs(
        resolve_settings(config, create_dry_run_launch(0, world_size, world_size))
    )
    hashes: dict[int, set[str]] = {}
    for number in range(world_size // 4):
        file = tmp_path / f"graphs-{number}"
        rank = list_ranks_to_compile(config, world_size, data_ranks=(number,), tensor_stride=4)[1]
        dry_run(base_config, rank, world_size, graphs=file, **fields)
        texts = "".join(path.read_text() for path in tmp_path.glob(f"graphs-{number}*"))
        hashes[number] = set(re.findall(r"Graph Hash: (\w+)", texts))
        assert hashes[number]
    assert len(distinct_ranks) > 1
    for number, graphs in hashes.items():
        first = max(rank for rank in distinct_ranks if rank <= number)
        assert graphs == hashes[first], f"data-parallel rank {number} differs from {first}"
    for before, after in itertools.combinations(distinct_ranks, 2):
        assert hashes[before] != hashes[after], "no graph is compiled twice"
