"""Programs in workers over the exec WebSocket, with a minimal server."""

import base64
import contextlib
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.client import Configuration

from trainium_client import pod_exec
from trainium_client.api import Api
from trainium_client.pod_exec import parse_json_lines, read_curve_in_pod, run_in_pod
from trainium_contract.api_server.connection import Connection
from trainium_contract.api_server.errors import ClientError, ForbiddenError
from trainium_contract.api_server.kubeconfig import Access

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
SUCCESS = {"status": "Success"}


def websocket_frame(kind: int, data: bytes) -> bytes:
    length = bytes([len(data)]) if len(data) < 126 else struct.pack("!BH", 126, len(data))
    return bytes([0x80 | kind]) + length + data


def _send(client: socket.socket, frames: tuple[tuple[int, bytes], ...], status: Any) -> None:
    for channel, data in (*frames, (3, json.dumps(status).encode())):
        client.sendall(websocket_frame(2, bytes([channel]) + data))
    client.sendall(websocket_frame(8, struct.pack("!H", 1000)))
    client.recv(4096)


@contextlib.contextmanager
def worker(
    *frames: tuple[int, bytes],
    status: Any = SUCCESS,
    code: int = 101,
    impersonation: tuple[tuple[str, str], ...] = (),
) -> Iterator[Api]:
    """Serve one exec request whose program writes these (channel, data) frames."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(4096)
            if code != 101:
                client.sendall(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % code)
                return
            assert b"command=cat&command=/etc/hosts" in head
            assert all(f"{name}: {value}\r\n".encode() in head for name, value in impersonation)
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
            accept = base64.b64encode(hashlib.sha1(fields[b"Sec-WebSocket-Key"] + _MAGIC).digest())
            client.sendall(
                b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Protocol: v4.channel.k8s.io\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
            )
            # A client that disconnects once it has received enough.
            with contextlib.suppress(ConnectionError):
                _send(client, frames, status)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        configuration = Configuration(f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield Api(Connection(Access(configuration, impersonation=impersonation)), "team")
    finally:
        thread.join()
        listener.close()


def test_output_is_separated_by_channel() -> None:
    with worker((1, b'{"step": 1}\nnoise\n'), (2, b"warning"), (1, b'{"step": 2}\n')) as api:
        output = run_in_pod(api, "w-0", ("cat", "/etc/hosts"))

    assert output.error == b"warning"
    assert parse_json_lines(output) == [{"step": 1}, {"step": 2}]


def test_a_program_runs_as_the_user_of_the_kubeconfig() -> None:
    user = (("Impersonate-User", "eve"), ("Impersonate-Group", "a"), ("Impersonate-Group", "b"))
    with worker((1, b"[]"), impersonation=user) as api:
        assert run_in_pod(api, "w-0", ("cat", "/etc/hosts")).out == b"[]"


def test_a_failed_program_raises_its_last_line_unless_its_code_is_accepted() -> None:
    causes = [{"reason": "ExitCode", "message": "64"}]
    failed = {"status": "Failure", "message": "exit code 64", "details": {"causes": causes}}

    with (
        worker((2, b"first\nno such file\n"), status=failed) as api,
        pytest.raises(ClientError, match="w-0: no such file"),
    ):
        run_in_pod(api, "w-0", ("cat", "/etc/hosts"))
    with worker((1, b"[]"), status=failed) as api:
        assert run_in_pod(api, "w-0", ("cat", "/etc/hosts"), accepted_codes=(0, 64)).out == b"[]"


def test_a_failed_program_with_a_json_log_line_raises_its_message() -> None:
    stamp = "2026-11-24T08:09:10Z"
    line = {"time": stamp, "level": "error", "source": "trainer", "logger": "trainium.exit"}
    line |= {"message": "no such folder", "error": "Traceback"}
    failed = {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "64"}]}}
    failed_worker = worker((2, f"{json.dumps(line)}\n".encode()), status=failed)
    with failed_worker as api, pytest.raises(ClientError, match=r"^w-0: no such folder$"):
        run_in_pod(api, "w-0", ("cat", "/etc/hosts"))


def test_too_much_output_and_a_missing_permission_raise_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_exec, "MAX_OUTPUT_BYTES", 100)
    with worker((1, b"x" * 200)) as api, pytest.raises(ClientError, match="prints more than 100 bytes"):
        run_in_pod(api, "w-0", ("cat", "/etc/hosts"))
    with worker(code=403) as api, pytest.raises(ForbiddenError, match="create pods/exec in namespace team"):
        run_in_pod(api, "w-0", ("cat", "/etc/hosts"))


def test_a_loss_curve_is_read_from_a_worker_without_malformed_lines() -> None:
    with worker((1, b'{"step": 1, "loss": 5.5}\nnoise\n{"step": 2, "loss": 5.25, "tokensPerSecond": 10}\n')) as api:
        points = read_curve_in_pod(api, "w-0", "/etc/hosts")

    assert [(point.step, point.loss, point.tokens_per_second) for point in points] == [(1, 5.5, None), (2, 5.25, 10)]
