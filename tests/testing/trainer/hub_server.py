"""A Hugging Face hub on loopback with models and data sets; tests can refuse access and truncate downloads.

    with HubServer() as hub:
        hub.add("owner/model", {"config.json": b"{}", "model.safetensors": b"..."}, token="hf_secret")
        hub.truncate_next_download("model.safetensors", after=1000)
        ...
        assert hub.requests[-1].range == "bytes=1000-"

It serves `huggingface_hub` and `datasets`: information, trees and paths of repositories, HEAD and GET of
files with ranges, error codes; and commits, to which safetensors and Parquet are uploaded by the batch API of Git LFS,
in parts where they are large. A data set is added as `datasets/owner/name`.
"""

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.testing.suite.loopback_http import LoopbackServer

COMMIT = "c0ffee" + "0" * 34
PARQUET = "refs/convert/parquet"
_LARGE = (".parquet", ".safetensors")
"""Files that Git LFS keeps."""
PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as received."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass(slots=True)
class _Repository:
    commits: dict[str, dict[str, bytes]]
    """Files by commit, the oldest first."""
    token: str | None
    """Needed to read files; None: no token is needed."""

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.commit(revision))

    def commit(self, revision: str) -> str:
        return [*self.commits][-1] if revision in ("main", PARQUET) else revision


class HubServer:
    """The server; a context manager. All state may be read by the test."""

    def __init__(self) -> None:
        self.repositories: dict[str, _Repository] = {}
        self.requests: list[Request] = []
        self.cuts: dict[str, int] = {}
        """Bytes after which the next download ends, by file."""
        self.refused: set[str] = set()
        """Files whose downloads are refused."""
        self.writer = ""
        """Token that may create repositories."""
        self.created: list[dict[str, Any]] = []
        """Requests for new repositories."""
        self.objects: dict[str, bytes] = {}
        """Contents of uploaded large files by SHA-256."""
        self.parts: dict[str, dict[int, bytes]] = {}
        """Uploaded parts of a large file by number."""
        self.status: int | None = None
        """Answer requests below `failing` with this."""
        self.moving = ""
        """Repository that gets a commit, of the same files, after each request for its branch."""
        self.failing = ""
        """Start of the paths that `status` is for, without the first slash."""
        self._http = LoopbackServer(type("Handler", (_Handler,), {"hub": self}))
        self._running = self._http.running()

    def __enter__(self) -> Self:
        self._running.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.__exit__(None, None, None)

    @property
    def url(self) -> str:
        """Return the address for clients: HF_ENDPOINT."""
        return self._http.url

    def add(self, name: str, files: dict[str, bytes], *, token: str | None = None) -> str:
        """Add a repository, or a commit to it, and return the commit; with `token` only that token reads files."""
        repository = self.repositories.setdefault(name, _Repository({}, token))
        commit = f"{COMMIT[:-1]}{len(repository.commits)}"
        repository.commits[commit] = files
        return commit

    def truncate_next_download(self, file: str, *, after: int) -> None:
        """Let the next download of a file end early."""
        self.cuts[file] = after

    def downloaded_files(self) -> list[str]:
        """Return the names of the files whose bytes were requested."""
        downloads = [item.path for item in self.requests if item.method == "GET" and "/api/" not in item.path]
        return [path.rpartition("/")[2] for path in downloads]


@contextlib.contextmanager
def run_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Run a hub, and set the environment of this process to use it without progress bars."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self.command != "HEAD"
        url = urlsplit(self.path)
        path = unquote(url.path).lstrip("/")
        token = self.headers.get("Authorization")
        self.hub.requests.append(Request(self.command, f"/{path}", self.headers.get("Range"), token))
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.status is not None and path.startswith(self.hub.failing):
            self._error(self.hub.status, None)
            return
        if self.command == "POST" and path in ("api/repos/create", "api/validate-yaml"):
            self._create(json.loads(content)) if path.endswith("create") else self._json({"errors": [], "warnings": []})
            return
        if path.startswith("lfs/"):
            self._receive(content, *path.split("/")[1:])
            return
        if path.endswith(".git/info/lfs/objects/batch"):
            self._json({"objects": [self._upload_action(large_file) for large_file in json.loads(content)["objects"]]})
            return
        is_api = path.startswith("api/")
        repository_path = path.removeprefix("api/").removeprefix("models/")
        name = "/".join(repository_path.split("/")[: 3 if repository_path.startswith("datasets/") else 2])
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._error(404, "RepoNotFound")
            return
        endpoint, _, rest = repository_path.removeprefix(name).strip("/").partition("/")
        revision, _, file = rest.replace(PARQUET, "main", 1).partition("/") if rest else ("main", "", "")
        files = repository.files(revision)
        allowed = repository.token is None or token == f"Bearer {repository.token}"
        if not allowed and (endpoint == "auth-check" or not is_api):
            self._error(401 if token is None else 403, "GatedRepo")
        elif files is None:
            self._error(404, "RevisionNotFound")
        elif endpoint == "tree":
            self._json(_list_folder(files, file, recursive="recursive=true" in url.query.lower()))
        elif endpoint == "paths-info":
            wanted = parse_qs(content.decode())["paths"]
            self._json([entry for entry in _list_folder(files, "", recursive=True) if entry["path"] in wanted])
        elif endpoint in ("preupload", "commit"):
            if endpoint == "commit":
                self.hub.add(name, files | dict(map(self._parse_added_file, content.decode().splitlines()[1:])))
                self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{repository.commit('main')}", "commitOid": "x"})
                return
            entries = {entry["path"]: entry for entry in _list_folder(files, "", recursive=True)}
            modes = [_upload_mode(file["path"], entries.get(file["path"])) for file in json.loads(content)["files"]]
            self._json({"files": modes})
        elif is_api:
            siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
            about = {"id": name.removeprefix("datasets/"), "sha": repository.commit(revision), "siblings": siblings}
            self._json(about | {"private": False, "tags": []})
            if name == self.hub.moving and revision == "main":
                self.hub.add(name, files)
        else:
            self._file(files, file, repository.commit(revision), body=body)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815 - the names that the library calls

    def _create(self, repository: dict[str, Any]) -> None:
        name = f"{repository['organization']}/{repository['name']}"
        if self.headers.get("Authorization") != f"Bearer {self.hub.writer}":
            self._error(403, None)
        elif name in self.hub.repositories:
            self._json({"url": f"{self.hub.url}/{name}"}, 409)
        else:
            self.hub.add(name, {})
            self.hub.created.append(repository)
            self._json({"url": f"{self.hub.url}/{name}"})

    def _upload_action(self, large_file: dict[str, Any]) -> dict[str, Any]:
        """Return the upload action of a Git LFS object, or none if the object exists."""
        oid, size = large_file["oid"], large_file["size"]
        if oid in self.hub.objects:
            return {"oid": oid, "size": size}
        address = f"{self.hub.url}/lfs/{oid}"
        upload: dict[str, Any] = {"href": address}
        if size > PART_BYTES:
            numbers = range(1, -(-size // PART_BYTES) + 1)
            upload["header"] = {"chunk_size": str(PART_BYTES)} | {str(n): f"{address}/{n}" for n in numbers}
        actions = {"upload": upload, "verify": {"href": f"{address}/verify"}}
        return {"oid": oid, "size": size, "actions": actions}

    def _receive(self, content: bytes, oid: str, part: str = "whole") -> None:
        """Store a large file or a part of it, join the parts, or verify the digest."""
        if part == "verify":
            self._json({}) if oid in self.hub.objects else self._error(404, None)
        elif part == "whole":
            parts = self.hub.parts.pop(oid, {})
            data = b"".join(parts[number] for number in sorted(parts)) if self.command == "POST" else content
            if hashlib.sha256(data).hexdigest() == oid:
                self.hub.objects[oid] = data
            self._json({}) if oid in self.hub.objects else self._error(422, None)
        else:
            self.hub.parts.setdefault(oid, {})[int(part)] = content
            self._answer(200, b"", {"ETag": f'"{part}"'}, body=True)

    def _parse_added_file(self, line: str) -> tuple[str, bytes]:
        """Return path and contents of a file in a commit."""
        entry = json.loads(line)
        value = entry["value"]
        large = entry["key"] == "lfsFile"
        return value["path"], self.hub.objects[value["oid"]] if large else base64.b64decode(value["content"])

    def _json(self, document: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(document).encode(), {"Content-Type": "application/json"}, body=True)

    def _file(self, files: dict[str, bytes], file: str, commit: str, *, body: bool) -> None:
        data = files.get(file)
        if data is None:
            self._error(404, "EntryNotFound")
            return
        if body and file in self.hub.refused:
            self._error(403, None)
            return
        tag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first or 0), min(int(last or len(data)) + 1, len(data))
        if self.headers.get("Range"):
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        cut = self.hub.cuts.pop(file, None) if body else None
        self._answer(206 if self.headers.get("Range") else 200, data[start:end], headers, body=body, cut=cut)

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


def _upload_mode(path: str, entry: dict[str, Any] | None) -> dict[str, Any]:
    """Return how a file is uploaded, and what the repository has under its name."""
    mode = "lfs" if path.endswith(_LARGE) else "regular"
    answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
    return answer | ({"oid": entry.get("lfs", entry)["oid"]} if entry else {})


def _list_folder(files: dict[str, bytes], folder: str, *, recursive: bool = False) -> list[dict[str, Any]]:
    """Return the entries of a folder as the hub lists them."""
    entries: dict[str, dict[str, Any]] = {}
    for path, data in files.items():
        below = path.removeprefix(f"{folder}/") if folder else path
        if folder and below == path:
            continue
        head, _, deeper = below.partition("/")
        if deeper and not recursive:
            name = f"{folder}/{head}".lstrip("/")
            entries[name] = {
                "type": "directory",
                "path": name,
                "size": 0,
                "oid": hashlib.sha1(name.encode()).hexdigest(),
            }
        else:
            blob = hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()
            entries[path] = {"type": "file", "path": path, "size": len(data), "oid": blob}
            if path.endswith(_LARGE):
                digest = hashlib.sha256(data).hexdigest()
                entries[path]["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    return [*entries.values()]
