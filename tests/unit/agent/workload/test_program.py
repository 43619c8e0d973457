"""The start of a program's rank: its environment, its port, and Python commands in a warm standby."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.pod_environment import environment
from trainium_agent.settings import SettingsError, parse_settings
from trainium_agent.workload import rank_port, rank_spec
from trainium_agent.workload.attempt import AttemptLayout
from trainium_agent.workload.master_port import MasterPort
from trainium_agent.workload.rank_port import reserve_port
from trainium_agent.workload.rank_spec import build_network_environment
from trainium_agent.workload.workload import Workload
from trainium_contract.faults.causes import Cause
from trainium_trainer.configuration.config import read_launch

LAYOUT = AttemptLayout(3, 1, 1, 2, 4, "10.0.0.1", MasterPort(29500), accumulation=8)


def build_program(
    tmp_path: Path, container_environment: dict[str, str], neuron_devices: int = 0, **spec: Any
) -> Workload:
    text = json.dumps({"image": "team/train:1", "command": ["python", "train.py"], "args": ["--x"], **spec})
    settings = parse_settings(environment(tmp_path, TRAINIUM_PROGRAM=text))
    return Workload(replace(settings, neuron_devices=neuron_devices), container_environment)


def test_a_rank_has_the_environment_of_torchrun_and_of_the_job(tmp_path: Path) -> None:
    program = build_program(tmp_path, {"OMP_NUM_THREADS": "7", "RANK": "99"}, workingDirectory="/work")
    request = program.request(LAYOUT, 2)
    assert (request.argv, request.directory, request.image) == (("python", "train.py", "--x"), "/work", "team/train:1")
    env = request.environment
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("6", "2", "8", "4")
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"], env["MASTER_ADDR"]) == ("1", "2", "10.0.0.1")
    assert (env["MASTER_PORT"], env["TORCHELASTIC_USE_AGENT_STORE"]) == ("29500", "False")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TRAINIUM_GENERATION"]) == ("1", "3")
    assert env["TRAINIUM_ACCUMULATION"] == "8"
    assert env["TRAINIUM_WORLD_SIZE"] == env["WORLD_SIZE"], "a launcher changes the second one"
    assert "OMP_NUM_THREADS" not in env, "the job has set it"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert not [name for name in env if name.startswith("NEURON")], "the node has no device"


def test_a_restarted_rank_has_the_cause_of_its_interruption(tmp_path: Path) -> None:
    program = build_program(tmp_path, {})
    assert "TRAINIUM_CAUSE" not in program.request(LAYOUT, 0).environment
    later = program.request(replace(LAYOUT, cause=Cause.NODE_LOST), 0).environment
    assert read_launch(later).cause == "NodeLost"


def test_the_worker_library_is_appended_to_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_spec, "_LIBRARY", tmp_path)
    assert build_program(tmp_path, {}).request(LAYOUT, 0).environment["PYTHONPATH"] == str(tmp_path)
    program = build_program(tmp_path, {"PYTHONPATH": "/app"})
    assert program.request(LAYOUT, 0).environment["PYTHONPATH"] == f"/app:{tmp_path}"
    assert program.ranks.plan.environment["PYTHONPATH"] == f"/app:{tmp_path}", (
        "a fork of the standby does not read its own PYTHONPATH"
    )


def test_a_rank_has_variables_of_efa_and_none_of_the_neuron_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_spec, "_INFINIBAND", tmp_path)
    efa = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    assert build_network_environment(16) == efa
    assert build_network_environment(0) == {}
    env = build_program(tmp_path, {"FI_PROVIDER": "tcp"}, neuron_devices=16).request(LAYOUT, 2).environment
    assert {name for name in efa if name in env} == {"FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE"}
    assert not [name for name in env if name.startswith(("NEURON", "PJRT"))], "torch_xla and TorchNeuron derive them"


@pytest.mark.parametrize(
    ("command", "processes", "is_served"),
    [
        ("python train.py", None, True),
        ("python -m train", 2, True),
        ("sh -c", None, True),
        ("python train.py", 1, False),
        ("python -m torch.distributed.run train.py", None, False),
        ("python -u -m accelerate.commands.launch train.py", None, False),
        ("./train", None, False),
    ],
)
def test_the_agent_serves_the_store_of_python_programs_that_start_no_ranks_themselves(
    tmp_path: Path, command: str, processes: int | None, is_served: bool
) -> None:
    words = [*command.split(), *(["exec python train.py"] if command == "sh -c" else [])]
    spec = {} if processes is None else {"processesPerNode": processes}
    assert build_program(tmp_path, {}, command=words, **spec).ranks.uses_agent_store is is_served


def test_a_port_can_be_bound_by_rank_0_with_and_without_reuse_of_addresses() -> None:
    for reuse in (0, 1):
        for address in ("127.0.0.1", "0.0.0.0"):
            free = reserve_port("127.0.0.1").master
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                server.bind((address, free.port))
                server.listen()
                socket.create_connection(("127.0.0.1", free.port), timeout=5).close()


def test_no_process_gets_the_port_of_rank_0_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_assigned = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(10_000 <= reserve_port("127.0.0.1").master.port < min(30_000, first_assigned) for _ in range(20))
    monkeypatch.setattr(rank_port, "_PORT_RANGE", tmp_path / "range")
    (tmp_path / "range").write_text("15000\t65000\n")
    assert all(10_000 <= reserve_port("127.0.0.1").master.port < 15_000 for _ in range(20))
    monkeypatch.setattr(rank_port, "_list_unassigned_ports", lambda: [port] * 64)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert reserve_port("127.0.0.1").master.port != port, "another one if all are taken"


@pytest.mark.parametrize("text", ["{", "[]", '{"image": "i"}', '{"image": "i", "command": []}'])
def test_an_invalid_program_in_the_environment_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"TRAINIUM_PROGRAM must be spec.program as JSON: "):
        parse_settings(environment(tmp_path, TRAINIUM_PROGRAM=text))


FORK_MAIN = "from trainium_agent.ranks.python_command import run_python; import sys; run_python(sys.argv[1:])"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import sys; print(sys.argv, __name__)", "a"],
        ["-u", "-X", "utf8", "SCRIPT", "--x", "1"],
        ["-m", "pack", "b"],
    ],
    ids=["text", "script", "module"],
)
def test_a_python_command_behaves_the_same_in_a_fork(tmp_path: Path, arguments: list[str]) -> None:
    show = "import sys, os; print(sys.argv, __name__, sys.path[0] or os.getcwd(), file_of())\n"
    show = f"def file_of(): return globals().get('__file__')\n{show}import helper; print(helper.__name__)\n"
    for name in ("script.py", "pack.py"):
        (tmp_path / name).write_text(show)
    (tmp_path / "helper.py").touch()
    command = [str(tmp_path / "script.py") if argument == "SCRIPT" else argument for argument in arguments]
    alone, forked = (
        subprocess.run([sys.executable, *start], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for start in (command, ["-c", FORK_MAIN, *command])
    )
    assert forked == alone
    assert "__main__" in alone


def test_a_python_command_without_a_script_is_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", FORK_MAIN, "-u"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        64,
        "program.command starts python without a script: add a script, or -m and a module\n",
    )


def test_the_agent_of_a_program_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, trainium_agent.bootstrap, trainium_agent.supervisor\n"
        "print([name for name in ('torch', 'numpy', 'trainium_trainer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout == "[]\n"
