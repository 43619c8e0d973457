"""Requests over the control socket: replies, errors and timeouts."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainium_devcluster.control_socket import accepts_requests, request, serve
from trainium_devcluster.errors import ClusterError


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[socket.socket, Path]]:
    """Return a socket that is bound but does not listen yet."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        yield server, path


def serve_once(server: socket.socket, answer: bytes, received: list[object]) -> threading.Thread:
    server.listen()

    def work() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as lines:
            received.append(json.loads(lines.readline()))
            connection.sendall(answer)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_socket_file_without_a_listener_does_not_answer(listener: tuple[socket.socket, Path]) -> None:
    server, path = listener
    assert path.exists()
    assert not accepts_requests(path)
    server.listen()
    assert accepts_requests(path)


def test_a_request_returns_its_reply(listener: tuple[socket.socket, Path]) -> None:
    received: list[object] = []
    thread = serve_once(listener[0], b'{"ok": true, "pid": 7}\n', received)
    assert request(listener[1], {"op": "status"}) == {"ok": True, "pid": 7}
    thread.join()
    assert received == [{"op": "status"}]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b'{"ok": false, "error": "There is no such node."}\n', r"^There is no such node\.$"),
        (b'{"ok": false}\n', "refused without a reason"),
        (b"", "closed the connection without an answer"),
        (b"rubbish\n", "closed the connection without an answer"),
        (b"[]\n", "refused without a reason"),
    ],
)
def test_a_refused_request_raises_its_error(listener: tuple[socket.socket, Path], answer: bytes, sentence: str) -> None:
    thread = serve_once(listener[0], answer, [])
    with pytest.raises(ClusterError, match=sentence):
        request(listener[1], {"op": "status"})
    thread.join()


def test_an_unanswered_request_times_out(listener: tuple[socket.socket, Path]) -> None:
    listener[0].listen()
    with pytest.raises(ClusterError, match=r"no answer from .* within 0 s"):
        request(listener[1], {"op": "status"}, timeout=0.1)


def test_a_missing_socket_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"no process listens at .*is it running"):
        request(tmp_path / "none", {"op": "status"})


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b'{"op": "x"}', {"ok": True, "got": "x"}),
        (b'{"op": "bad"}', {"ok": False, "error": "That does not exist."}),
        (b"{}", {"ok": False, "error": "The request is malformed: KeyError('op')."}),
        (b"[1]", {"ok": False, "error": "A request is a JSON object with the key op."}),
        (b"not json", {"ok": False, "error": "The request is malformed: JSONDecodeError("}),
    ],
)
async def test_a_malformed_request_has_an_error_in_its_reply(
    tmp_path: Path, line: bytes, answer: dict[str, Any]
) -> None:
    async def handle(message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "bad":
            raise ClusterError("That does not exist.")
        return {"got": message["op"]}

    path = tmp_path / "control.sock"
    server = await serve(path, handle)
    assert path.stat().st_mode & 0o777 == 0o600
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(line + b"\n")
    reply = json.loads(await reader.readline())
    if "error" in reply:
        reply["error"] = reply["error"][: len(answer["error"])]
    assert reply == answer
    writer.close()
    await writer.wait_closed()
    server.close()


async def test_a_client_that_disconnects_or_sends_too_much_affects_no_other(tmp_path: Path) -> None:
    async def handle(_: dict[str, Any]) -> dict[str, Any]:
        return {}

    path = tmp_path / "control.sock"
    server = await serve(path, handle)
    for sent in (b"", b"x" * (2 << 20)):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        writer.write_eof()
        with contextlib.suppress(ConnectionResetError):  # of a connection closed with unread bytes
            assert await reader.read() == b""
        writer.close()
    assert await asyncio.to_thread(request, path, {"op": "x"}) == {"ok": True}
    server.close()
