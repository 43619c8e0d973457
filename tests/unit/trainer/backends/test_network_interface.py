"""Which network interface Gloo uses for an address."""

import os
import socket

import pytest

from tests.testing.trainer.fork_server import run_python
from trainium_contract.wire.worker_env import ENV_POD_IP
from trainium_trainer.network_interface import ENV_INTERFACE, LOOPBACK, find_interface, use_interface

JOIN_GROUP = """
import os, sys
from torch import distributed as dist
from trainium_trainer.network_interface import use_interface
use_interface("localhost")
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
print(os.environ["GLOO_SOCKET_IFNAME"])
dist.destroy_process_group()
"""


def find_own_address() -> str:
    """Return the address from which this host reaches others, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no route to other networks")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("address", ["127.0.0.1", "127.83.1.2", "localhost", "::1"])
def test_any_loopback_address_uses_loopback(address: str) -> None:
    assert find_interface(address) == LOOPBACK


def test_an_address_of_this_host_uses_its_interface() -> None:
    name = find_interface(find_own_address())
    assert name in {name for _, name in socket.if_nameindex()} - {LOOPBACK}


@pytest.mark.parametrize("address", ["192.0.2.1", "fd00::1", "coordinator.svc", ""])
def test_gloo_chooses_the_interface_of_another_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_INTERFACE, raising=False)
    monkeypatch.delenv(ENV_POD_IP, raising=False)
    use_interface(address)
    assert ENV_INTERFACE not in os.environ


def test_the_users_choice_precedes_the_address_of_the_pod_and_that_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ENV_INTERFACE, raising=False)
    monkeypatch.setenv(ENV_POD_IP, "127.0.0.1")
    monkeypatch.setenv(ENV_INTERFACE, "mine")
    use_interface("192.0.2.1")
    assert os.environ[ENV_INTERFACE] == "mine"
    monkeypatch.delenv(ENV_INTERFACE)
    use_interface("192.0.2.1")
    assert os.environ[ENV_INTERFACE] == LOOPBACK


def test_gloo_uses_the_interface_of_the_address_of_this_host(tmp_path_factory: pytest.TempPathFactory) -> None:
    address = find_own_address()
    environment = {name: text for name, text in os.environ.items() if name != ENV_INTERFACE}
    file = str(tmp_path_factory.mktemp("store") / "file")
    completed = run_python("-c", JOIN_GROUP, file, env={**environment, ENV_POD_IP: address})
    assert (completed.returncode, completed.stdout) == (0, f"{find_interface(address)}\n"), completed.stderr
