"""One process stands for any rank of a world that is not there, in the places that NxD gives its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainium_contract.trainer import TrainingConfig
from trainium_trainer.compile.command import _xla_environment
from trainium_trainer.compile.rehearsal import Request

pytestmark = [pytest.mark.torch_xla, pytest.mark.timeout(600)]


def rehearse(config: dict[str, Any], rank: int, world: int, **fields: Any) -> dict[str, Any]:
    wire = TrainingConfig.model_validate(config | {"backend": "Nxd"} | fields).to_wire()
    environment = os.environ | _xla_environment(rank, world, world) | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rehearsed.py"))],
        input=Request(config=wire, rank=rank, world_size=world, local_world_size=world).model_dump_json(),
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
def test_a_rank_of_eight_makes_its_graphs_alone(base_config: dict[str, Any], mode: str) -> None:
    settings = {"parallelism": {"tensor": 2, "sequence": True}, "dataParallel": mode, "batch": {"globalSize": 16}}
    found = rehearse(base_config, 1, 8, **settings)
    assert found["launched"] > 0
    assert found["groups"] == {
        "2": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "4": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "8": [list(range(8))],
    }


def test_the_third_of_four_places_of_a_node_of_trn1_is_rank_sixteen(base_config: dict[str, Any]) -> None:
    found = rehearse(base_config, 16, 32, parallelism={"tensor": 4}, batch={"globalSize": 16})
    assert [0, 8, 16, 24] in found["groups"]["4"]
    assert found["place"] == 2
