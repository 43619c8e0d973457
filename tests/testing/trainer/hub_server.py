"""A Hugging Face hub that answers on loopback: models with files, some gated, downloads that break off.

    with HubServer() as hub:
        hub.add("owner/model", {"config.json": b"{}", "model.safetensors": b"..."}, token="hf_secret")
        hub.cut("model.safetensors", after=1000)        # the next download of that file ends there
        ...
        assert hub.requests[-1].range == "bytes=1000-"

It speaks what `huggingface_hub` asks for: the model's information, HEAD and GET of files with ranges, error codes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from tests.testing.suite.loopback_http import LoopbackServer

COMMIT = "c0ffee" + "0" * 34


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came in."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass(slots=True)
class _Model:
    files: dict[str, bytes]
    token: str | None
    """Needed to read files; None: anybody may."""


class HubServer:
    """The server; a context manager. All state may be read by the test."""

    def __init__(self) -> None:
        self.models: dict[str, _Model] = {}
        self.requests: list[Request] = []
        self.cuts: dict[str, int] = {}
        """File -> bytes after which its next download breaks off."""
        self.refused: set[str] = set()
        """Files that nobody gets."""
        self.status: int | None = None
        """Answer everything with this."""
        self._http = LoopbackServer(type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._http.serve_forever, name="hub-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where clients find it: HF_ENDPOINT."""
        return self._http.url

    def add(self, name: str, files: dict[str, bytes], *, token: str | None = None) -> None:
        """A model; with `token` it is gated, and only that token opens it."""
        self.models[name] = _Model(files, token)

    def cut(self, file: str, *, after: int) -> None:
        """Let the next download of a file end early."""
        self.cuts[file] = after

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        return [
            each.path.rpartition("/")[2] for each in self.requests if each.method == "GET" and "/api/" not in each.path
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        self.hub.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        if self.hub.status is not None:
            self._error(self.hub.status, None)
            return
        information = path.startswith("/api/models/")
        name = "/".join(path.removeprefix("/api/models/").lstrip("/").split("/")[:2])
        model = self.hub.models.get(name)
        if model is None:
            self._error(404, "RepoNotFound")
            return
        rest = path.partition(name)[2].strip("/").split("/")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", COMMIT):
            self._error(404, "RevisionNotFound")
        elif information and rest[0] == "tree":
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in model.files.items()
            ]
            self._answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body=body)
        elif information:
            siblings = [{"rfilename": file, "size": len(data)} for file, data in model.files.items()]
            document = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self._answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"}, body=body)
        elif model.token is not None and token != f"Bearer {model.token}":
            self._error(401 if token is None else 403, "GatedRepo")
        else:
            self._file(model, "/".join(rest[2:]), body=body)

    def _file(self, model: _Model, file: str, *, body: bool) -> None:
        data = model.files.get(file)
        if data is None:
            self._error(404, "EntryNotFound")
            return
        if body and file in self.hub.refused:
            self._error(403, None)
            return
        tag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0] or 0)
        if self.headers.get("Range"):
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.hub.cuts.pop(file, None) if body else None
        self._answer(206 if self.headers.get("Range") else 200, data[start:], headers, body=body, cut=cut)

    def _answer(self, status: int, data: bytes, headers: dict[str, str], *, body: bool, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _error(self, status: int, code: str | None) -> None:
        self._answer(status, b"", {"X-Error-Code": code} if code else {}, body=True)
