"""Process trees that are found, frozen and killed by a mark, and ports of killed nodes that time out."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.suite.processes import has_ended, process_state
from tests.testing.suite.timeouts import until
from trainium_devcluster.nodepool.unresponsive_ports import UnresponsivePorts, find_listening_addresses
from trainium_devcluster.processes.process_tree import (
    ProcessId,
    find_marked,
    freeze_tree,
    identify,
    kill_tree,
    list_tree,
    read_command_line,
    read_resident_bytes,
    spawn,
    thaw_tree,
)

VARIABLE = "TRAINIUM_TEST_MARK"


@pytest.fixture
def mark() -> Iterator[str]:
    value = f"/test/{os.getpid()}-{time.monotonic_ns()}"
    yield value
    kill_tree(None, VARIABLE, value)


def _count_sleeping(root: int) -> int:
    """Count the processes that run `sleep`; a shell that starts one by vfork cannot stop before it runs."""
    return [read_command_line(pid) for pid in list_tree([root])].count("sleep 300")


@pytest.fixture
def process_tree(tmp_path: Path, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """Return a process with a child, and a grandchild in a separate session, like a daemon."""
    command = ["sh", "-c", "sleep 300 & setsid sh -c 'sleep 300; :' & wait"]
    process = spawn(command, log=tmp_path / "log", environment={**os.environ, VARIABLE: mark}, folder=tmp_path)
    until(lambda: _count_sleeping(process.pid) == 2, "all processes have started", pause=0.01)
    yield process
    kill_tree(process.pid, VARIABLE, mark)
    process.wait()


def test_a_process_tree_includes_processes_of_other_sessions(process_tree: subprocess.Popen[bytes], mark: str) -> None:
    assert set(find_marked(VARIABLE, mark)) == set(list_tree([process_tree.pid]))


def test_a_killed_process_tree_has_no_process_left(process_tree: subprocess.Popen[bytes], mark: str) -> None:
    members = list_tree([process_tree.pid])
    kill_tree(process_tree.pid, VARIABLE, mark)
    assert all(has_ended(pid) for pid in members)


def test_orphans_are_found_by_their_mark(process_tree: subprocess.Popen[bytes], mark: str) -> None:
    _, *descendants = list_tree([process_tree.pid])
    process_tree.kill()
    process_tree.wait()
    kill_tree(None, VARIABLE, mark)
    assert all(has_ended(pid) for pid in descendants)


def test_a_mark_is_matched_exactly_or_by_prefix(process_tree: subprocess.Popen[bytes], mark: str) -> None:
    assert find_marked(VARIABLE, mark[:-1]) == []
    assert process_tree.pid in find_marked(VARIABLE, mark[:-1], prefix=True)


def test_a_process_tree_is_frozen_and_thawed(process_tree: subprocess.Popen[bytes], mark: str) -> None:
    members = list_tree([process_tree.pid])
    freeze_tree(process_tree.pid, VARIABLE, mark)
    until(lambda: all(process_state(pid) == "T" for pid in members), "all are frozen", pause=0.01)
    thaw_tree(process_tree.pid, VARIABLE, mark)
    until(lambda: all(process_state(pid) == "S" for pid in members), "all are thawed", pause=0.01)


def test_a_pid_file_of_an_earlier_process_is_not_alive(tmp_path: Path) -> None:
    process = identify(os.getpid())
    assert process is not None
    assert process.is_alive()
    earlier = ProcessId(process.pid, process.started - 1)
    earlier.write(tmp_path / "pid.json")
    assert ProcessId.read(tmp_path / "pid.json") == earlier
    assert not earlier.is_alive()
    assert earlier.signal(signal.SIGKILL) is False


def test_a_damaged_pid_file_is_no_process(tmp_path: Path) -> None:
    (tmp_path / "pid.json").write_text("{")
    assert ProcessId.read(tmp_path / "pid.json") is None
    assert ProcessId.read(tmp_path / "none.json") is None


def test_memory_is_that_of_the_process() -> None:
    assert read_resident_bytes(os.getpid()) > 5_000_000
    assert read_resident_bytes(2**22 + 1) == 0


def test_a_child_dies_with_its_supervisor(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys, time\n"
        "from trainium_devcluster.processes.process_tree import spawn\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "child = spawn(['sleep', '300'], log=folder / 'log', environment=os.environ, folder=folder)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert process_state(child) in {"S", "R", "D"}
        supervisor.kill()
    until(lambda: has_ended(child), "the child has ended", pause=0.01)


SERVER = """
import socket, sys, time
server = socket.create_server(("127.77.66.55", 0))
print(server.getsockname()[1], flush=True); time.sleep(60)
"""


def test_unresponsive_ports_of_a_killed_process_time_out() -> None:
    marker = f"cluster-{os.getpid()}/node-{time.monotonic_ns()}"
    environment = os.environ | {"TRAINIUM_TEST_MARKER": marker}
    with subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = ("127.77.66.55", int(server.stdout.readline()))
        addresses = find_listening_addresses("TRAINIUM_TEST_MARKER", marker)
        server.kill()
    assert addresses == [address]

    unresponsive_ports = UnresponsivePorts(addresses)
    try:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.3)
    finally:
        unresponsive_ports.release()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=0.3)


def test_a_port_in_use_is_not_unresponsive() -> None:
    with socket.create_server(("127.77.66.56", 0)) as server:
        unresponsive_ports = UnresponsivePorts([server.getsockname()])
        assert unresponsive_ports.missing == [server.getsockname()]
        socket.create_connection(server.getsockname(), timeout=1).close()
        unresponsive_ports.release()


def test_a_port_that_is_released_later_is_unresponsive() -> None:
    with socket.create_server(("127.77.66.57", 0)) as server:
        address = server.getsockname()
        unresponsive_ports = UnresponsivePorts([address])
    unresponsive_ports.retry()
    assert unresponsive_ports.missing == []
    with pytest.raises(TimeoutError):
        socket.create_connection(address, timeout=0.3)
    unresponsive_ports.release()
