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

from tests.testing.api.recorded_jobs import ApiServer
from trainium_client import pod_exec
from trainium_client.api import Api
from trainium_client.commands import inspect, logs, profile
from trainium_client.commands.main import main
from trainium_client.pod_exec import ExecOutput
from trainium_contract.api_server.connection import Answer, Connection, LineStream

WIDTH = 110
"""Columns of the terminal that a page shows."""
_DROPPED = ("fieldsV1", "description", "nodeInfo")
_ANYWHERE = {
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
        for here, anywhere in _ANYWHERE.items():
            text = text.replace(here, anywhere)
        path.write_text(f"{text}\n", encoding="utf-8")


class _AnswerQueue(dict[str, Any]):
    """Responses for `ApiServer`: those of a path in order, and the last one repeatedly."""

    def get(self, path: str, default: Any = None) -> Any:
        """Return the next response of a path."""
        left = super().get(path)
        if not left:
            return default
        return _served(left.pop(0) if len(left) > 1 else left[0])


def _served(answer: Any) -> Any:
    """Convert a response for `ApiServer`, where bytes stand for status 404."""
    refusal = isinstance(answer, dict) and answer.get("kind") == "Status" and answer.get("code") == 404
    return json.dumps(answer).encode() if refusal else answer


class FirstFrameTerminal(io.StringIO):
    """A terminal that raises KeyboardInterrupt after the first frame."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = False

    def isatty(self) -> bool:
        """Return True, as a terminal does."""
        return True

    def flush(self) -> None:
        """Interrupt the command at the first frame."""
        if not self._seen:
            self._seen = True
            raise KeyboardInterrupt


def replay(
    recording: Recording, arguments: Sequence[str], *, width: int = WIDTH, out: io.StringIO | None = None
) -> str:
    """Replay a command in an empty folder; return its output on both streams.

    Raises LookupError for a request or a body that was not recorded.
    """

    def remembered(_: Api, pod: str, command: Sequence[str], **__: Any) -> ExecOutput:
        kept = recording.inside[f"{pod}: {' '.join(command)}"]
        packed = kept.startswith(_PACKED)
        return ExecOutput(base64.b64decode(kept.removeprefix(_PACKED)) if packed else kept.encode(), b"")

    answers = _AnswerQueue({path: [*each] for path, each in recording.answers.items()})
    with tempfile.TemporaryDirectory() as folder, ApiServer(answers, Path(folder)).running() as server:
        chosen = {"KUBECONFIG": str(server.kubeconfig), "COLUMNS": str(width), "NO_COLOR": "1"}
        with (
            mock.patch.dict(os.environ, chosen),
            mock.patch.object(time, "time", return_value=recording.now),
            mock.patch.object(logs, "_POLL_SECONDS", 0.01),
            _programs(remembered),
            contextlib.chdir(folder),
        ):
            text = command_output([*arguments, *_where(arguments, recording.namespace)], out)
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
    found = Recording(0.0, namespace, {}, {})
    times: list[float] = []
    with _record_calls(found, times):
        text = command_output([*arguments, *_where(arguments, namespace)])
    return replace(found, now=times[-1]), text


def _where(arguments: Sequence[str], namespace: str) -> tuple[str, ...]:
    return ("-n", namespace) if namespace and "-n" not in arguments else ()


@contextlib.contextmanager
def _record_calls(to: Recording, times: list[float]) -> Iterator[None]:
    ask, follow = Connection.request, LineStream.lines
    run, stream = pod_exec.run_in_pod, Connection.stream
    paths: dict[int, str] = {}

    def request(self: Connection, method: str, path: str, **more: Any) -> Answer:
        answer = ask(self, method, path, **more)
        times.append(time.time())
        if method == "GET":
            _append_answer(to, path, _parse_answer(answer))
        else:
            to.answers.setdefault(_key(method, path), []).append(_parse_answer(answer))
            to.sent.setdefault(_key(method, path), []).append(_without_irrelevant_fields(more.get("body")))
        return answer

    @contextlib.contextmanager
    def streaming(self: Connection, path: str, **more: Any) -> Iterator[LineStream]:
        with stream(self, path, **more) as opened:
            paths[id(opened)] = path
            to.answers.setdefault(path, [])
            yield opened

    def lines(self: LineStream) -> Iterator[bytes]:
        for line in follow(self):
            _append_answer(to, paths[id(self)], line.decode(errors="replace") + "\n", appended=True)
            yield line

    def running(api: Api, pod: str, command: Sequence[str], **more: Any) -> ExecOutput:
        output = run(api, pod, command, **more)
        times.append(time.time())
        kept = _spans_of(output.out) if output.out[:2] == _GZIP else output.out.decode(errors="replace")
        to.inside[f"{pod}: {' '.join(command)}"] = kept
        return output

    with (
        mock.patch.object(Connection, "request", request),
        mock.patch.object(Connection, "stream", streaming),
        mock.patch.object(LineStream, "lines", lines),
        _programs(running),
    ):
        yield


def _spans_of(trace: bytes) -> str:
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


def _append_answer(to: Recording, path: str, answer: Any, *, appended: bool = False) -> None:
    """Append a response if it differs from the last one; of a job only the phase counts."""
    known = to.answers.setdefault(path, [])
    if appended and known:
        known[-1] += answer
    elif not known or _relevant_part(known[-1]) != _relevant_part(answer):
        known.append(answer)


def _relevant_part(answer: Any) -> Any:
    of_a_job = isinstance(answer, dict) and answer.get("kind") == "TrainingJob"
    return (answer.get("status") or {}).get("phase") if of_a_job else answer


def _parse_answer(answer: Answer) -> Any:
    text = answer.body.decode()
    try:
        return _without_irrelevant_fields(json.loads(text))
    except ValueError:
        return text


def _without_irrelevant_fields(value: Any) -> Any:
    """Remove what only the API server and `kubectl apply` read, and what names a machine."""
    if isinstance(value, list):
        return [_without_irrelevant_fields(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_irrelevant_fields(each) for key, each in _fields(value) if key not in _DROPPED}


def _fields(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if key == "annotations" and isinstance(each, dict):
            kept = {name: text for name, text in each.items() if name != _LAST_APPLIED}
            if kept:
                yield key, kept
        else:
            yield key, each
