"""Helpers of the tests of clusters: objects read without kubectl, and ports that stay free for a later listener."""

from __future__ import annotations

import socket

import pytest

from tests.testing.cluster.api_reader import path_of
from trainium_devcluster.ports import reserved_port


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("node/a",), None),
        (("nodes",), "/api/v1/nodes"),
        (("pod", "p", "-n", "x"), "/api/v1/namespaces/x/pods/p"),
        (("pods", "-n", "x", "-l", "app=a,b"), "/api/v1/namespaces/x/pods?labelSelector=app%3Da%2Cb"),
        (("trainingjob", "j", "-n", "x"), "/apis/trainium.dev/v1alpha1/namespaces/x/trainingjobs/j"),
        (("pods", "-A"), None),
        (("configmaps,services", "-n", "x"), None),
    ],
)
def test_what_is_read_is_what_kubectl_would_read_and_the_rest_is_left_to_it(
    arguments: tuple[str, ...], path: str | None
) -> None:
    assert path_of(arguments) == path


def test_a_reserved_port_is_given_to_nobody_else_and_may_be_listened_on() -> None:
    port = reserved_port()
    assert port != reserved_port()
    for taken in ("127.0.0.1", "127.0.0.2", "0.0.0.0"):  # a process node gives each pod its own address
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((taken, port))
    for listening in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((listening, port))
            server.listen()
