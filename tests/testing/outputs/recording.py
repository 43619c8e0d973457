"""Record what `kubectl trn` read of a cluster, wrote to it, and when, so that the same command can run on it again.

Invariant: a command that is replayed asks for nothing that was not recorded, writes what it wrote then, and sees the
clock of that moment.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.testing.api.recorded_jobs import ApiServer
from trainium_client import pod_exec
from trainium_client.commands import inspect, logs, profile
from trainium_client.commands.main import main
from trainium_client.pod_exec import Output
from trainium_contract.api_server.connection import Answer, Connection, LineStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainium_client.api import Api

WIDTH = 110
"""Columns of the terminal that a page shows."""
_DROPPED = ("fieldsV1", "description", "nodeInfo")
_ANYWHERE = {
    str(Path(__file__).parents[3]): "/opt/trainium",
    sys.base_prefix: "/usr/local",
    os.uname().release: "6.1.0",
}
"""Folder of the development cluster's programs, and the one shown for it: a recording names no machine."""
_GZIP, _PACKED = b"\x1f\x8b", "base64:"
"""Start of a file that a program printed packed, and of what is kept of it."""
_SPAN = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(frozen=True, slots=True)
class Recording:
    """Objects that a command read."""

    now: float
    """When it read the last of it; Unix seconds."""
    namespace: str
    """Namespace that it read; empty for a command without one."""
    answers: dict[str, list[Any]]
    """What the API server answered by path (of a write: `METHOD PATH`), one after the other; an object (a refusal is a
    Status) or a text. Empty streams are left out."""
    inside: dict[str, str]
    """Output of programs inside of workers, by `POD: PROGRAM`; packed files in base64."""
    sent: dict[str, list[Any]] = field(default_factory=dict)
    """What the command wrote, by `METHOD PATH`, one after the other."""

    @staticmethod
    def read(path: Path) -> Recording:
        """One that was kept."""
        return Recording(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Keep it."""
        path.parent.mkdir(exist_ok=True)
        text = json.dumps(asdict(self), indent=1, sort_keys=True)
        for here, anywhere in _ANYWHERE.items():
            text = text.replace(here, anywhere)
        path.write_text(f"{text}\n", encoding="utf-8")


class _InTurn(dict[str, Any]):
    """Answers for `ApiServer`: each path's one after the other, the last one for good."""

    def get(self, path: str, default: Any = None) -> Any:
        """The next one."""
        left = super().get(path)
        if not left:
            return default
        return _served(left.pop(0) if len(left) > 1 else left[0])


def _served(answer: Any) -> Any:
    """For `ApiServer`, to which bytes are a refusal with 404."""
    refusal = isinstance(answer, dict) and answer.get("kind") == "Status" and answer.get("code") == 404
    return json.dumps(answer).encode() if refusal else answer


class Frame(io.StringIO):
    """A terminal at which a person looks until something is shown, and then leaves."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = False

    def isatty(self) -> bool:
        """It is one."""
        return True

    def flush(self) -> None:
        """The first time somebody sees it."""
        if not self._seen:
            self._seen = True
            raise KeyboardInterrupt


def replayed(
    recording: Recording, arguments: Sequence[str], *, width: int = WIDTH, out: io.StringIO | None = None
) -> str:
    """Return what the command prints, on both streams together as a terminal shows them.

    Raises LookupError where it asks for or writes something else than was recorded. It runs in an empty folder.
    """

    def remembered(_: Api, pod: str, command: Sequence[str], **__: Any) -> Output:
        kept = recording.inside[f"{pod}: {' '.join(command)}"]
        packed = kept.startswith(_PACKED)
        return Output(base64.b64decode(kept.removeprefix(_PACKED)) if packed else kept.encode(), b"")

    answers = _InTurn({path: [*each] for path, each in recording.answers.items()})
    with tempfile.TemporaryDirectory() as folder, ApiServer(answers, Path(folder)).running() as server:
        chosen = {"KUBECONFIG": str(server.kubeconfig), "COLUMNS": str(width), "NO_COLOR": "1"}
        with (
            mock.patch.dict(os.environ, chosen),
            mock.patch.object(time, "time", return_value=recording.now),
            mock.patch.object(logs, "_POLL_SECONDS", 0.01),
            _programs(remembered),
            contextlib.chdir(folder),
        ):
            text = printed([*arguments, *_where(arguments, recording.namespace)], out)
        _check(recording, server.requests)
        return text


def _check(recording: Recording, requests: Sequence[tuple[str, str, Any]]) -> None:
    sent: dict[str, list[Any]] = {}
    for method, target, body in requests:
        key = _key(method, target.partition("?")[0])
        if key not in recording.answers:
            raise LookupError(f"{key} is asked for, and was not when this was recorded: record it again")
        if method != "GET":
            sent.setdefault(key, []).append(_without_noise(body))
    for key in {**sent, **recording.sent}:
        if sent.get(key) != recording.sent.get(key):
            raise LookupError(f"{key} is another than when this was recorded: record it again")


def _key(method: str, path: str) -> str:
    return path if method == "GET" else f"{method} {path}"


def printed(arguments: Sequence[str], out: io.StringIO | None = None) -> str:
    """Return what a command prints, also one that fails."""
    out = out or io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main([*arguments])
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def recorded_now(arguments: Sequence[str], namespace: str) -> tuple[Recording, str]:
    """Run a command on the cluster of this environment; what it read, and what it printed."""
    found = Recording(0.0, namespace, {}, {})
    times: list[float] = []
    with _listening(found, times):
        text = printed([*arguments, *_where(arguments, namespace)])
    return replace(found, now=times[-1]), text


def _where(arguments: Sequence[str], namespace: str) -> tuple[str, ...]:
    return ("-n", namespace) if namespace and "-n" not in arguments else ()


@contextlib.contextmanager
def _listening(to: Recording, times: list[float]) -> Iterator[None]:
    ask, follow = Connection.request, LineStream.lines
    run, stream = pod_exec.run_in_pod, Connection.stream
    paths: dict[int, str] = {}

    def request(self: Connection, method: str, path: str, **more: Any) -> Answer:
        answer = ask(self, method, path, **more)
        times.append(time.time())
        if method == "GET":
            _keep(to, path, _kept(answer))
        else:
            to.answers.setdefault(_key(method, path), []).append(_kept(answer))
            to.sent.setdefault(_key(method, path), []).append(_without_noise(more.get("body")))
        return answer

    @contextlib.contextmanager
    def streaming(self: Connection, path: str, **more: Any) -> Iterator[LineStream]:
        with stream(self, path, **more) as opened:
            paths[id(opened)] = path
            to.answers.setdefault(path, [])
            yield opened

    def lines(self: LineStream) -> Iterator[bytes]:
        for line in follow(self):
            _keep(to, paths[id(self)], line.decode(errors="replace") + "\n", appended=True)
            yield line

    def running(api: Api, pod: str, command: Sequence[str], **more: Any) -> Output:
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
def _programs(run: Callable[..., Output]) -> Iterator[None]:
    with contextlib.ExitStack() as patched:
        for module in (pod_exec, inspect, profile):
            patched.enter_context(mock.patch.object(module, "run_in_pod", run))
        yield


def _keep(to: Recording, path: str, answer: Any, *, appended: bool = False) -> None:
    """Keep an answer once for each change; of a job only the phase counts."""
    known = to.answers.setdefault(path, [])
    if appended and known:
        known[-1] += answer
    elif not known or _news(known[-1]) != _news(answer):
        known.append(answer)


def _news(answer: Any) -> Any:
    of_a_job = isinstance(answer, dict) and answer.get("kind") == "TrainingJob"
    return (answer.get("status") or {}).get("phase") if of_a_job else answer


def _kept(answer: Answer) -> Any:
    text = answer.body.decode()
    try:
        return _without_noise(json.loads(text))
    except ValueError:
        return text


def _without_noise(value: Any) -> Any:
    """Remove what only the API server and `kubectl apply` read, and what names a machine."""
    if isinstance(value, list):
        return [_without_noise(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_noise(each) for key, each in _fields(value) if key not in _DROPPED}


def _fields(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if key == "annotations" and isinstance(each, dict):
            kept = {name: text for name, text in each.items() if name != _LAST_APPLIED}
            if kept:
                yield key, kept
        else:
            yield key, each
