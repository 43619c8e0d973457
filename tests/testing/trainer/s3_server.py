"""An S3 that answers on loopback: objects in memory, lists in pages, multipart uploads, conditional writes, faults.

It speaks enough of the protocol for real clients (path-style addresses, AWS signatures by their form, not their value):
PutObject with `If-None-Match`, GetObject with ranges, HeadObject, ListObjectsV2, DeleteObject(s), multipart uploads.

    with S3Server(page_size=3) as server:
        server.make_bucket("bucket")
        environment = server.environment()              # what a client needs to find it and be let in
        server.fail(Fault(status=503, times=2, method="PUT"))
        ...
        assert server.objects["bucket"]["key"] == b"..."

Faults are tried in order for each request; the first that fits and is not used up acts. `requests` lists what came in.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from tests.testing.suite.loopback_http import LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Callable

ACCESS_KEY = "AKIDLOOPBACKTEST0000"
SECRET_KEY = "loopback/secret/that/must/never/be/logged"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came in."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    length: int


@dataclass(slots=True)
class Fault:
    """Something that goes wrong with the next `times` requests that fit."""

    status: int | None = None
    """Answer with this status instead of serving."""
    code: str = "InternalError"
    """S3's error code that goes with the status."""
    stall: threading.Event | None = None
    """Do not answer before this is set; a client that gives up earlier sees a timeout."""
    after: bool = False
    """Serve the request first, then let the client see the fault: the answer is lost, the effect is not."""
    cut: int | None = None
    """Close the connection after this many bytes of the answer's body."""
    method: str | None = None
    fits: Callable[[Request], bool] = lambda _: True
    times: float = 1

    def takes(self, request: Request) -> bool:
        """Return whether it acts on this request, and count it."""
        if self.times <= 0 or (self.method is not None and self.method != request.method) or not self.fits(request):
            return False
        self.times -= 1
        return True


@dataclass(slots=True)
class _Upload:
    bucket: str
    key: str
    parts: dict[int, bytes] = field(default_factory=dict)


class S3Server:
    """The server; a context manager. All state may be read and changed by the test."""

    def __init__(self, *, page_size: int = 1000) -> None:
        self.page_size = page_size
        self.objects: dict[str, dict[str, bytes]] = {}
        self.written: dict[tuple[str, str], float] = {}
        """Unix seconds of each object's last write."""
        self.uploads: dict[str, _Upload] = {}
        """Multipart uploads that were neither completed nor aborted."""
        self.completed: set[str] = set()
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._http = LoopbackServer(type("Handler", (_Handler,), {"s3": self}))
        self._thread = threading.Thread(target=self._http.serve_forever, name="s3-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for fault in self.faults:
            if fault.stall is not None:
                fault.stall.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return self._http.url

    def environment(self) -> dict[str, str]:
        """The variables by which a client finds the server and its credentials."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def make_bucket(self, name: str) -> None:
        """A new, empty bucket."""
        self.objects.setdefault(name, {})

    def fail(self, fault: Fault) -> Fault:
        """Let something go wrong from now on."""
        with self.lock:
            self.faults.append(fault)
        return fault

    def count(self, method: str, **query: str) -> int:
        """Count the requests of a kind that came in; `query` gives parameters that must be there."""
        return sum(r.method == method and query.items() <= r.query.items() for r in list(self.requests))

    def new_upload(self, bucket: str, key: str) -> str:
        """Begin a multipart upload."""
        name = f"upload-{next(self._numbers)}"
        self.uploads[name] = _Upload(bucket, key)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object."""
        self.objects[bucket][key] = data
        self.written[bucket, key] = datetime.now(UTC).timestamp()


class _RefusedError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int = HTTPStatus.OK
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    """One connection; `s3` is the server it belongs to."""

    s3: S3Server
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet: else each answer waits for a delayed acknowledgement

    def log_message(self, *args: Any) -> None:
        """Tests are quiet."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        _, bucket, *rest = unquote(parts.path).split("/", 2)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        request = Request(self.command, bucket, rest[0] if rest else "", query, len(body))
        with self.s3.lock:
            self.s3.requests.append(request)
            fault = next((each for each in self.s3.faults if each.takes(request)), None)
        if fault is not None and fault.stall is not None:
            fault.stall.wait()
        answer = None
        if fault is None or fault.after or fault.status is None:
            answer = self._serve(request, body)
        if fault is not None and fault.status is not None:
            answer = _error(fault.status, fault.code)
        assert answer is not None
        self._send(answer, None if fault is None else fault.cut)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815 - the names that the library calls

    def _serve(self, request: Request, body: bytes) -> _Answer:
        try:
            with self.s3.lock:
                self._let_in(request)
                if request.key or (request.method == "POST" and "delete" in request.query):
                    return self._object(request, body)
                return self._list(request)
        except _RefusedError as refusal:
            return _error(refusal.status, refusal.code)

    def _let_in(self, request: Request) -> None:
        signature = self.headers.get("Authorization", "")
        match = re.match(r"AWS4-HMAC-SHA256 Credential=([^/]+)/", signature)
        if match is None:
            raise _RefusedError(403, "AccessDenied")
        if match.group(1) != ACCESS_KEY:
            raise _RefusedError(403, "InvalidAccessKeyId")
        if request.bucket not in self.s3.objects:
            raise _RefusedError(404, "NoSuchBucket")

    def _object(self, request: Request, body: bytes) -> _Answer:
        kind = (request.method, *sorted({"uploads", "uploadId", "partNumber", "delete"} & request.query.keys()))
        match kind:
            case ("PUT",):
                return self._put(request, body)
            case ("PUT", "partNumber", "uploadId"):
                self._upload(request).parts[int(request.query["partNumber"])] = body
                return _Answer(headers={"ETag": _tag(body)})
            case ("POST", "uploads"):
                name = self.s3.new_upload(request.bucket, request.key)
                return _xml(
                    f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
                )
            case ("POST", "uploadId"):
                return self._complete(request, body)
            case ("DELETE", "uploadId"):
                self._upload(request)
                del self.s3.uploads[request.query["uploadId"]]
                return _Answer(HTTPStatus.NO_CONTENT)
            case ("DELETE",):
                self.s3.objects[request.bucket].pop(request.key, None)
                return _Answer(HTTPStatus.NO_CONTENT)
            case ("POST", "delete"):
                keys = [entry.text or "" for entry in ET.fromstring(body).iter() if entry.tag.endswith("Key")]
                for key in keys:
                    self.s3.objects[request.bucket].pop(key, None)
                elements = (_element("Deleted", _element("Key", escape(key))) for key in keys)
                return _xml(_element("DeleteResult", "".join(elements)))
            case ("GET",) | ("HEAD",):
                return self._get(request)
        raise _RefusedError(501, "NotImplemented")

    def _upload(self, request: Request) -> _Upload:
        upload = self.s3.uploads.get(request.query["uploadId"])
        if upload is None or (upload.bucket, upload.key) != (request.bucket, request.key):
            raise _RefusedError(404, "NoSuchUpload")
        return upload

    def _put(self, request: Request, body: bytes) -> _Answer:
        if self.headers.get("If-None-Match") == "*" and request.key in self.s3.objects[request.bucket]:
            raise _RefusedError(412, "PreconditionFailed")
        self.s3.put(request.bucket, request.key, body)
        return _Answer(headers={"ETag": _tag(body)})

    def _complete(self, request: Request, body: bytes) -> _Answer:
        elements = _element("Key", escape(request.key))
        if request.query["uploadId"] in self.s3.completed:  # a repeated request is answered like the first
            return _xml(_element("CompleteMultipartUploadResult", elements + _element("ETag", '"again"')))
        upload = self._upload(request)
        numbers = [int(entry.text or 0) for entry in ET.fromstring(body).iter() if "PartNumber" in entry.tag]
        if numbers != sorted(upload.parts) or not numbers:
            raise _RefusedError(400, "InvalidPart")
        self.s3.put(request.bucket, request.key, b"".join(upload.parts[number] for number in numbers))
        del self.s3.uploads[request.query["uploadId"]]
        key, tag = escape(request.key), escape(_tag(body))
        return _xml(
            f"<CompleteMultipartUploadResult><Key>{key}</Key><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        )

    def _get(self, request: Request) -> _Answer:
        data = self.s3.objects[request.bucket].get(request.key)
        if data is None:
            raise _RefusedError(404, "NoSuchKey")
        when = datetime.fromtimestamp(self.s3.written.get((request.bucket, request.key), 0.0), UTC)
        headers = {"ETag": _tag(data), "Last-Modified": when.strftime("%a, %d %b %Y %H:%M:%S GMT")}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return _Answer(body=data, headers=headers)
        start, end = int(wanted.group(1)), min(int(wanted.group(2) or len(data)), len(data) - 1)
        if start >= len(data):
            raise _RefusedError(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        return _Answer(HTTPStatus.PARTIAL_CONTENT, data[start : end + 1], headers)

    def _list(self, request: Request) -> _Answer:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        rows: dict[str, str] = {}
        for key, data in sorted(self.s3.objects[request.bucket].items()):
            if not key.startswith(prefix):
                continue
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            if end >= 0:
                name = key[: end + len(delimiter)]
                rows[name] = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                continue
            when = datetime.fromtimestamp(self.s3.written.get((request.bucket, key), 0.0), UTC)
            rows[key] = (
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{escape(_tag(data))}</ETag>"
                f"<LastModified>{when.strftime('%Y-%m-%dT%H:%M:%S.000Z')}</LastModified></Contents>"
            )
        names = [name for name in sorted(rows) if name > after]
        page = names[: min(self.s3.page_size, int(query.get("max-keys", 1000)))]
        text = "".join(rows[name] for name in page) + f"<KeyCount>{len(page)}</KeyCount>"
        more = len(page) < len(names)
        text += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        return _xml(f"<ListBucketResult>{text}</ListBucketResult>")

    def _send(self, answer: _Answer, cut: int | None) -> None:
        try:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, quote(value, safe=' "/:,+-=*'))
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body if cut is None else answer.body[:cut])
            if cut is not None:
                self.close_connection = True
        except (BrokenPipeError, ConnectionResetError):  # the client has given up
            self.close_connection = True


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _element(name: str, content: str) -> str:
    return f"<{name}>{content}</{name}>"


def _xml(text: str) -> _Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
    return _Answer(body=body, headers={"Content-Type": "application/xml"})


def _error(status: int, code: str) -> _Answer:
    text = f"<Error><Code>{code}</Code><Message>{code} (from the test)</Message></Error>"
    return _Answer(status, text.encode(), {"Content-Type": "application/xml"})
