"""One process stands for any rank of a world that is not there, in the places that NxD gives its ranks."""

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
from trainium_trainer.compile.dry_run import DryRunRequest, MeshCoordinate, first_rank_at, launch_at
from trainium_trainer.configuration.config import resolve_settings

pytestmark = [pytest.mark.torch_xla, pytest.mark.timeout(600)]


def dry_run(
    config: dict[str, Any], rank: int, world: int, *, graphs: Path | None = None, **fields: Any
) -> dict[str, Any]:
    wire = TrainingConfig.model_validate(config | {"backend": "Nxd"} | fields).to_wire()
    environment = (
        os.environ | extraction.environment(rank, world, world) | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    )
    if graphs is not None:
        environment["XLA_SAVE_TENSORS_FILE"] = str(graphs)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dry_run_process.py"))],
        input=DryRunRequest(config=wire, rank=rank, world_size=world, local_world_size=world).model_dump_json(),
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("mode", ["Replicated", "FullySharded"])
def test_one_process_compiles_the_graphs_of_a_rank_of_eight(base_config: dict[str, Any], mode: str) -> None:
    settings = {"parallelism": {"tensor": 2, "sequence": True}, "dataParallel": mode, "batch": {"globalSize": 16}}
    found = dry_run(base_config, 1, 8, **settings)
    assert found["launched"] > 0
    assert found["groups"] == {
        "2": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "4": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "8": [list(range(8))],
    }


def test_the_third_place_of_a_trn1_node_is_rank_sixteen(base_config: dict[str, Any]) -> None:
    found = dry_run(base_config, 16, 32, parallelism={"tensor": 4}, batch={"globalSize": 16})
    assert [0, 8, 16, 24] in found["groups"]["4"]
    assert found["place"] == 2


@pytest.mark.parametrize("mode", ["Replicated", "ShardedOptimizer"])
def test_one_process_compiles_the_graphs_of_a_tuning(base_config: dict[str, Any], base: Path, mode: str) -> None:
    tuning = {"method": "LoRA", "lora": {"rank": 4, "dropout": 0.1, "targets": ["*_proj"]}}
    config = base_config | {"model": {"weights": str(base)}}
    settings = {"parallelism": {"tensor": 2, "sequence": True}, "dataParallel": mode, "batch": {"globalSize": 16}}
    found = dry_run(config, 1, 8, tuning=tuning, **settings)
    assert found["launched"] > 0
    assert found["groups"]["2"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


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
    world = 16
    config = TrainingConfig.model_validate(base_config | {"backend": "Nxd"} | fields)
    kinds = extraction.ranks_with_distinct_graphs(resolve_settings(config, launch_at(0, world, world)))
    made: dict[int, set[str]] = {}
    for number in range(world // 4):
        file = tmp_path / f"graphs-{number}"
        place = MeshCoordinate(pipeline=0, tensor=1, data=number)
        dry_run(base_config, first_rank_at(place, config, world, tensor_stride=4), world, graphs=file, **fields)
        texts = "".join(each.read_text() for each in tmp_path.glob(f"graphs-{number}*"))
        made[number] = set(re.findall(r"Graph Hash: (\w+)", texts))
        assert made[number]
    assert len(kinds) > 1
    for number, graphs in made.items():
        first = max(kind for kind in kinds if kind <= number)
        assert graphs == made[first], f"data-parallel rank {number} is not as {first}"
    for before, after in itertools.combinations(kinds, 2):
        assert made[before] != made[after], "an unused position is not compiled"
