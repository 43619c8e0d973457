"""A cluster whose name server records the queries of workers and answers none."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.timeouts import until
from trainium_devcluster.jobs.metrics import has_every_sample_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(300)]

ADDRESS = ("127.83.82.53", 53)
REVERSE_QUERY_SUFFIX = b"\x07in-addr\x04arpa\x00"
"""Last bytes of each reverse query for an IPv4 address."""
REVERSE_LOOKUP = "import socket; socket.getnameinfo(('127.83.82.82', 1), 0)"


class NameServer:
    """A silent name server that records queries."""

    def __init__(self) -> None:
        self.queries: list[bytes] = []

    def reverse_queries(self) -> list[bytes]:
        return [query for query in self.queries if REVERSE_QUERY_SUFFIX in query]

    @contextlib.contextmanager
    def running(self) -> Iterator[NameServer]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
            try:
                listener.bind(ADDRESS)
            except PermissionError:
                pytest.skip("a name server's port is root's")
            thread = threading.Thread(target=self._listen, args=(listener,))
            thread.start()
            try:
                yield self
            finally:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
                    waker.sendto(b"", ADDRESS)
                thread.join()

    def _listen(self, listener: socket.socket) -> None:
        while query := listener.recv(512):
            self.queries.append(query)


@pytest.fixture
def name_server(operator: SharedCluster) -> Iterator[NameServer]:
    if operator.devcluster is None:
        pytest.skip("only the development cluster's pods are on this machine's loopback network")
    with NameServer().running() as server:
        yield server


def name_server_spec(folder: Path, cache: Path) -> str:
    """Return a fragment of a spec whose pods use this name server; each job has the volume of the cache."""
    configuration = folder / "resolv.conf"
    configuration.write_text(f"nameserver {ADDRESS[0]}\n", encoding="ascii")
    configuration.chmod(0o644)
    volumes: list[dict[str, Any]] = [
        {"name": "shared-cache", "hostPath": {"path": str(cache), "type": "Directory"}},
        {"name": "names", "hostPath": {"path": str(configuration), "type": "File"}},
    ]
    mounts = [
        {"name": "shared-cache", "mountPath": "/cache"},
        {"name": "names", "mountPath": "/etc/resolv.conf", "readOnly": True},
    ]
    worker = {"name": "worker", "volumeMounts": mounts}
    return json.dumps({"workers": {"template": {"spec": {"volumes": volumes, "containers": [worker]}}}})


def test_recovery_does_not_wait_for_a_silent_name_server(
    new_job: Callable[..., Job], reference: dict[int, float], name_server: NameServer, operator: SharedCluster
) -> None:
    job = new_job(change=name_server_spec(operator.shared, operator.shared / "cache"))
    job.wait_for_step(10)
    job.kill_rank(1)

    entry = job.wait_for_recovery()

    assert (entry["response"], entry["podsReplaced"]) == ("InPlace", 0)
    assert name_server.reverse_queries() == []
    # The name server would record a query.
    pod = job.list_members()[0]["podName"]
    lookup_command = ("env", "RES_OPTIONS=timeout:1 attempts:1", "python3", "-c", REVERSE_LOOKUP)
    job.cluster.run("kubectl", "exec", pod, "-n", job.namespace, "--", *lookup_command)
    until(name_server.reverse_queries, "the query of a process in a worker arrives")
    job.wait_for_phase("Completed")
    assert job.read_losses() == reference
    assert has_every_sample_once(job.folder, 60, 12)
