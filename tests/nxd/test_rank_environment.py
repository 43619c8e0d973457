"""The environment that the agent gives a rank, read by torch_xla's own code for Neuron devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.workload.test_program import build_program
from trainium_agent.workload.attempt import AttemptLayout
from trainium_agent.workload.master_port import MasterPort

pytestmark = pytest.mark.torch_xla

RECORD = """
import json, os, sys
from torch_xla._internal.neuron import configure_pjrt_environment
configure_pjrt_environment()
names = [name for name in os.environ if name.startswith(("NEURON", "PJRT_LOCAL", "RANK"))]
with open(sys.argv[1] + "-" + os.environ["RANK"], "w") as file:
    json.dump({name: os.environ[name] for name in names}, file)
"""


def read_by_torch_xla(
    tmp_path: Path, layout: AttemptLayout, local_rank: int, *command: str, **own: str
) -> dict[str, Any]:
    """Return, by rank, the variables that torch_xla derives in the processes that a rank's command starts."""
    (tmp_path / "record.py").write_text(RECORD)
    environment = build_program(tmp_path, {}, neuron_devices=16).request(layout, local_rank).environment
    records = tmp_path / "records"
    records.mkdir()
    subprocess.run(
        [sys.executable, *command, tmp_path / "record.py", records / "rank"],
        env={**os.environ, **own, **environment},
        check=True,
        timeout=120,
    )
    return {path.name: json.loads(path.read_text()) for path in records.iterdir()}


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "node", "local_rank"), [(2, 32, 1, 5), (1024, 64, 1023, 63), (2, 8, 1, 3), (1, 1, 0, 0)]
)
def test_torch_xla_gives_a_rank_its_core_and_its_place_in_the_world(
    tmp_path: Path, nodes: int, ranks_per_node: int, node: int, local_rank: int
) -> None:
    layout = AttemptLayout(1, 0, node, nodes, ranks_per_node, "10.0.0.1", MasterPort(29500))
    rank = node * ranks_per_node + local_rank
    variables = read_by_torch_xla(tmp_path, layout, local_rank)[f"rank-{rank}"]
    assert variables["NEURON_RT_VISIBLE_CORES"] == str(local_rank)
    assert variables["NEURON_PJRT_PROCESS_INDEX"] == str(rank)
    assert variables["NEURON_PJRT_WORLD_SIZE"] == str(nodes * ranks_per_node)
    assert variables["PJRT_LOCAL_PROCESS_COUNT"] == str(ranks_per_node)
    assert variables["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.1:62182"
    assert "NEURON_PJRT_PROCESSES_NUM_DEVICES" not in variables, "it grows with the world beyond the kernel's limit"


def test_torch_xla_shares_the_cores_of_the_job_among_the_ranks(tmp_path: Path) -> None:
    layout = AttemptLayout(1, 0, 0, 1, 4, "10.0.0.1", MasterPort(29500))
    variables = read_by_torch_xla(tmp_path, layout, 2, NEURON_RT_VISIBLE_CORES="4-7")["rank-2"]
    assert variables["NEURON_RT_VISIBLE_CORES"] == "6"


def test_torch_xla_brackets_the_address_of_a_cluster_with_ipv6(tmp_path: Path) -> None:
    layout = AttemptLayout(1, 0, 0, 1, 1, "fd00::1", MasterPort(29500))
    assert read_by_torch_xla(tmp_path, layout, 0)["rank-0"]["NEURON_RT_ROOT_COMM_ID"] == "[fd00::1]:62182"


def test_a_launcher_started_by_the_agent_gives_its_own_ranks_their_cores(tmp_path: Path) -> None:
    layout = AttemptLayout(1, 0, 0, 1, 1, "127.0.0.1", MasterPort(29500))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    records = read_by_torch_xla(tmp_path, layout, 0, *torchrun)
    assert {name: values["NEURON_RT_VISIBLE_CORES"] for name, values in records.items()} == {
        f"rank-{rank}": str(rank) for rank in range(4)
    }
    assert {values["NEURON_PJRT_WORLD_SIZE"] for values in records.values()} == {"4"}
