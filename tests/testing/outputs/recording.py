"""Record the requests of a `kubectl trn` command and their responses, and replay the command on them.

Invariant: a replayed command sends only recorded requests, with the recorded bodies, and sees the recorded time.
"""

import base64
import contextlib
import gzip
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from unittest import mock

from tests.testing.api.recorded_jobs import RecordedApiServer
from trainium_client import pod_exec
from trainium_client.api import Api
from trainium_client.commands import inspect, logs, profile
from trainium_client.commands.main import main
from trainium_client.pod_exec import ExecOutput
from trainium_contract.api_server.connection import Connection, HttpResponse, LineStream

WIDTH = 110
"""Columns of the terminal that a page shows."""
_DROPPED = ("fieldsV1", "description", "nodeInfo")
_PORTABLE_TEXTS = {
    str(Path(__file__).parents[3]): "/opt/trainium",
    sys.base_prefix: "/usr/local",
    os.uname().release: "6.1.0",
}
"""Replacements of machine-specific texts."""
_GZIP, _PACKED = b"\x1f\x8b", "base64:"
"""Magic bytes of a compressed file, and the prefix under which it is recorded."""
_SPAN = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests and responses of one command."""

    now: float
    """Unix time of the last response."""
    namespace: str
    """Namespace of the command; empty without one."""
    answers: dict[str, list[Any]]
    """Responses of the API server by path (of a write: `METHOD PATH`), in order: an object, a Status or a text."""
    inside: dict[str, str]
    """Output of programs in workers, by `POD: PROGRAM`; compressed files in base64."""
    sent: dict[str, list[Any]] = field(default_factory=dict)
    """Bodies that the command wrote, by `METHOD PATH`, in order."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recording."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write the recording."""
        path.parent.mkdir(exist_ok=True)
        text = json.dumps(asdict(self), indent=1, sort_keys=True)
        for local, portable in _PORTABLE_TEXTS.items():
            text = text.replace(local, portable)
        path.write_text(f"{text}\n", encoding="utf-8")


class _AnswerQueue(dict[str, Any]):
    """Responses for `RecordedApiServer`: those of a path in order, and the last one repeatedly."""

    def get(self, path: str, default: Any = None) -> Any:
        """Return the next response of a path."""
        remaining = super().get(path)
        if not remaining:
            return default
        return _as_server_answer(remaining.pop(0) if len(remaining) > 1 else remaining[0])


def _as_server_answer(answer: Any) -> Any:
    """Convert a response for `RecordedApiServer`, where bytes stand for status 404."""
    is_missing = isinstance(answer, dict) and answer.get("kind") == "Status" and answer.get("code") == 404
    return json.dumps(answer).encode() if is_missing else answer


class FirstFrameTerminal(io.StringIO):
    """A terminal that raises KeyboardInterrupt after the first frame."""

    def __init__(self) -> None:
        super().__init__()
        self._is_drawn = False

    def isatty(self) -> bool:
        """Return True, as a terminal does."""
        return True

    def flush(self) -> None:
        """Interrupt the command at the first frame."""
        if not self._is_drawn:
            self._is_drawn = True
            raise KeyboardInterrupt


def replay(
    recording: Recording, arguments: Sequence[str], *, width: int = WIDTH, out: io.StringIO | None = None
) -> str:
    """Replay a command in an empty folder; return its output on both streams.

    Raises LookupError for a request or a body that was not recorded.
    """

    def run_recorded(_: Api, pod: str, command: Sequence[str], **__: Any) -> ExecOutput:
        recorded = recording.inside[f"{pod}: {' '.join(command)}"]
        is_packed = recorded.startswith(_PACKED)
        return ExecOutput(base64.b64decode(recorded.removeprefix(_PACKED)) if is_packed else recorded.encode(), b"")

    answers = _AnswerQueue({path: [*answers] for path, answers in recording.answers.items()})
    with tempfile.TemporaryDirectory() as folder, RecordedApiServer(answers, Path(folder)).running() as server:
        environment = {"KUBECONFIG": str(server.kubeconfig), "COLUMNS": str(width), "NO_COLOR": "1"}
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(time, "time", return_value=recording.now),
            mock.patch.object(logs, "_POLL_SECONDS", 0.01),
            _programs(run_recorded),
            contextlib.chdir(folder),
        ):
            text = command_output([*arguments, *_namespace_option(arguments, recording.namespace)], out)
        _check(recording, server.requests)
        return text


def _check(recording: Recording, requests: Sequence[tuple[str, str, Any]]) -> None:
    sent: dict[str, list[Any]] = {}
    for method, target, body in requests:
        key = _key(method, target.partition("?")[0])
        if key not in recording.answers:
            raise LookupError(f"{key} was not requested when this was recorded: record it again")
        if method != "GET":
            sent.setdefault(key, []).append(_without_irrelevant_fields(body))
    for key in {**sent, **recording.sent}:
        if sent.get(key) != recording.sent.get(key):
            raise LookupError(f"{key} differs from the recorded body: record it again")


def _key(method: str, path: str) -> str:
    return path if method == "GET" else f"{method} {path}"


def command_output(arguments: Sequence[str], out: io.StringIO | None = None) -> str:
    """Run a command and return its output, also if it fails."""
    out = out or io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main([*arguments])
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def record(arguments: Sequence[str], namespace: str) -> tuple[Recording, str]:
    """Run a command on the current cluster; return the recording and the output."""
    recording = Recording(0.0, namespace, {}, {})
    times: list[float] = []
    with _record_calls(recording, times):
        text = command_output([*arguments, *_namespace_option(arguments, namespace)])
    return replace(recording, now=times[-1]), text


def _namespace_option(arguments: Sequence[str], namespace: str) -> tuple[str, ...]:
    return ("-n", namespace) if namespace and "-n" not in arguments else ()


@contextlib.contextmanager
def _record_calls(recording: Recording, times: list[float]) -> Iterator[None]:
    ask, follow = Connection.request, LineStream.read_lines
    run, stream = pod_exec.run_in_pod, Connection.stream
    paths: dict[int, str] = {}

    def request(self: Connection, method: str, path: str, **more: Any) -> HttpResponse:
        answer = ask(self, method, path, **more)
        times.append(time.time())
        if method == "GET":
            _append_answer(recording, path, _parse_answer(answer))
        else:
            recording.answers.setdefault(_key(method, path), []).append(_parse_answer(answer))
            recording.sent.setdefault(_key(method, path), []).append(_without_irrelevant_fields(more.get("body")))
        return answer

    @contextlib.contextmanager
    def record_stream(self: Connection, path: str, **more: Any) -> Iterator[LineStream]:
        with stream(self, path, **more) as opened:
            paths[id(opened)] = path
            recording.answers.setdefault(path, [])
            yield opened

    def lines(self: LineStream) -> Iterator[bytes]:
        for line in follow(self):
            _append_answer(recording, paths[id(self)], line.decode(errors="replace") + "\n", appended=True)
            yield line

    def record_exec(api: Api, pod: str, command: Sequence[str], **more: Any) -> ExecOutput:
        output = run(api, pod, command, **more)
        times.append(time.time())
        text = _pack_spans(output.out) if output.out[:2] == _GZIP else output.out.decode(errors="replace")
        recording.inside[f"{pod}: {' '.join(command)}"] = text
        return output

    with (
        mock.patch.object(Connection, "request", request),
        mock.patch.object(Connection, "stream", record_stream),
        mock.patch.object(LineStream, "read_lines", lines),
        _programs(record_exec),
    ):
        yield


def _pack_spans(trace: bytes) -> str:
    """Keep the spans of a trace, without their arguments and the name of the machine."""
    content = json.loads(gzip.decompress(trace))
    events = [{key: event[key] for key in _SPAN if key in event} for event in content["traceEvents"]]
    spans = {"trainium": content["trainium"], "traceEvents": [event for event in events if event["ph"] == "X"]}
    return _PACKED + base64.b64encode(gzip.compress(json.dumps(spans).encode(), mtime=0)).decode()


@contextlib.contextmanager
def _programs(run: Callable[..., ExecOutput]) -> Iterator[None]:
    with contextlib.ExitStack() as patched:
        for module in (pod_exec, inspect, profile):
            patched.enter_context(mock.patch.object(module, "run_in_pod", run))
        yield


def _append_answer(recording: Recording, path: str, answer: Any, *, appended: bool = False) -> None:
    """Append a response if it differs from the last one; of a job only the phase counts."""
    known = recording.answers.setdefault(path, [])
    if appended and known:
        known[-1] += answer
    elif not known or _relevant_part(known[-1]) != _relevant_part(answer):
        known.append(answer)


def _relevant_part(answer: Any) -> Any:
    is_job = isinstance(answer, dict) and answer.get("kind") == "TrainingJob"
    return (answer.get("status") or {}).get("phase") if is_job else answer


def _parse_answer(answer: HttpResponse) -> Any:
    text = answer.body.decode()
    try:
        return _without_irrelevant_fields(json.loads(text))
    except ValueError:
        return text


def _without_irrelevant_fields(value: Any) -> Any:
    """Remove what only the API server and `kubectl apply` read, and what names a machine."""
    if isinstance(value, list):
        return [_without_irrelevant_fields(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_irrelevant_fields(inner) for key, inner in _fields(value) if key not in _DROPPED}


def _fields(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if key == "annotations" and isinstance(inner, dict):
            annotations = {name: text for name, text in inner.items() if name != _LAST_APPLIED}
            if annotations:
                yield key, annotations
        else:
            yield key, inner
