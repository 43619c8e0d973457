"""A machine without power does not refuse connections: it does not answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from trainium_devcluster.nodepool.silence import Silence, listening

SERVER = """
import socket, sys, time
one = socket.socket(); one.bind(("127.77.66.55", 0)); one.listen(5)
print(one.getsockname()[1], flush=True); time.sleep(60)
"""


def test_ports_of_a_killed_process_time_out_while_they_are_silenced_and_refuse_afterwards() -> None:
    marker = f"cluster-{os.getpid()}/node-{time.monotonic_ns()}"
    environment = os.environ | {"TRAINIUM_TEST_MARKER": marker}
    with subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = ("127.77.66.55", int(server.stdout.readline()))
        found = listening("TRAINIUM_TEST_MARKER", marker)
        server.kill()
    assert found == [address]

    silence = Silence(found)
    try:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.3)
    finally:
        silence.end()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=0.3)


def test_a_port_that_cannot_be_held_is_left_alone() -> None:
    with socket.create_server(("127.77.66.56", 0)) as server:
        silence = Silence([server.getsockname()])
        assert silence.missing == [server.getsockname()]
        socket.create_connection(server.getsockname(), timeout=1).close()
        silence.end()


def test_a_port_that_is_let_go_a_moment_later_is_held_then() -> None:
    with socket.create_server(("127.77.66.57", 0)) as server:
        address = server.getsockname()
        silence = Silence([address])
    silence.try_again()
    assert silence.missing == []
    with pytest.raises(TimeoutError):
        socket.create_connection(address, timeout=0.3)
    silence.end()
