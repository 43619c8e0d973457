"""Run a program inside a worker, as `kubectl exec` does: the API server's WebSocket, protocol v4.

Invariants: output is bounded. A failed program is reported as a sentence without a stack. Many workers are queried at
once.
"""

from __future__ import annotations

import json
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from trainium_client.views.log_lines import parse_log_line
from trainium_contract.api_server.errors import ClientError, ForbiddenError, NotFoundError
from trainium_contract.views.curve import read_curve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trainium_client.api import Api
    from trainium_contract.views.curve import CurvePoint

_PROTOCOL = "v4.channel.k8s.io"
_OUT, _ERROR, _STATUS = 1, 2, 3
MAX_OUTPUT_BYTES = 256 * 2**20
MAX_CONCURRENT_CALLS = 16


@dataclass(frozen=True, slots=True)
class ExecOutput:
    """The output of a program."""

    out: bytes
    error: bytes


def run_in_pod(
    api: Api,
    pod: str,
    command: Sequence[str],
    *,
    timeout_seconds: float = 60.0,
    accepted_codes: tuple[int, ...] = (0,),
) -> ExecOutput:
    """Run a program in the container `worker`.

    Raises ClientError if the program cannot be run, or exits with a code that is not accepted.
    """
    import websocket  # noqa: PLC0415 - few commands run programs in workers

    client: Any = websocket
    connection = api.connection
    query = [("command", part) for part in command]
    query += [("container", "worker"), ("stdout", "true"), ("stderr", "true")]
    path = f"/api/v1/namespaces/{api.namespace}/pods/{quote(pod)}/exec"
    url, headers = connection.serialize("GET", path, query, **{"sec-websocket-protocol": _PROTOCOL})
    try:
        socket = _open_websocket(connection.access.configuration, url, headers.items())
        socket.settimeout(timeout_seconds)
    except client.WebSocketBadStatusException as error:
        raise _describe_refusal(error.status_code, api.namespace, pod) from error
    except (client.WebSocketException, OSError) as error:
        raise ClientError(f"cannot run a program in {pod}: {error}") from error
    try:
        return _read_output(socket, client, pod, accepted_codes)
    finally:
        socket.shutdown()  # not `close`, which leaves a socket open after the server has closed its side


def read_curve_in_pod(api: Api, pod: str, path: str) -> tuple[CurvePoint, ...]:
    """Read the loss curve from a worker's `metrics.jsonl`. Raises ClientError as `run_in_pod` does."""
    return read_curve(run_in_pod(api, pod, ("cat", path)).out.decode(errors="replace").splitlines())


def call_concurrently(keys: Sequence[str], call: Callable[[str], Any]) -> dict[str, Any]:
    """Call a function for each key, several at once; a failure becomes its sentence, but a ForbiddenError is raised."""

    def call_or_describe(key: str) -> Any:
        try:
            return call(key)
        except ForbiddenError:
            raise
        except ClientError as error:
            return str(error)

    with ThreadPoolExecutor(MAX_CONCURRENT_CALLS) as pool:
        return dict(zip(keys, pool.map(call_or_describe, keys), strict=True))


def query_pods(api: Api, pods: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run a program in each pod and return the objects that it printed, or the sentence of a failure."""
    return call_concurrently(pods, lambda pod: parse_json_lines(run_in_pod(api, pod, command)))


def parse_json_lines(output: ExecOutput) -> list[dict[str, Any]]:
    """Parse the objects that a program printed, one a line; ignore other lines."""
    records = []
    for line in output.out.decode(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _open_websocket(configuration: Any, url: str, headers: Iterable[tuple[str, str]]) -> Any:
    """Open a WebSocket with all headers; `kubernetes.stream` drops those of an impersonated user."""
    import websocket  # noqa: PLC0415 - as above
    from kubernetes.stream import ws_client  # noqa: PLC0415 - as above

    options = {
        "cert_reqs": ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE,
        "check_hostname": configuration.verify_ssl and configuration.assert_hostname is not False,
        "ca_certs": configuration.ssl_ca_cert,
        "certfile": configuration.cert_file,
        "keyfile": configuration.key_file,
        "server_hostname": configuration.tls_server_name,
    }
    header = [f"{name}: {value}" for name, value in headers]
    proxy = ws_client.websocket_proxycare({}, configuration, url, None)
    socket: Any = websocket.WebSocket(sslopt={name: value for name, value in options.items() if value is not None})
    socket.connect(ws_client.get_websocket_url(url), header=header, **proxy)
    return socket


def _read_output(socket: Any, client: Any, pod: str, accepted_codes: tuple[int, ...]) -> ExecOutput:
    channels: dict[int, bytearray] = {_OUT: bytearray(), _ERROR: bytearray(), _STATUS: bytearray()}
    try:
        while True:
            code, data = socket.recv_data()
            if code == client.ABNF.OPCODE_CLOSE:
                break
            if data and data[0] in channels:
                channels[data[0]] += data[1:]
            if sum(map(len, channels.values())) > MAX_OUTPUT_BYTES:
                raise ClientError(f"the program in {pod} prints more than {MAX_OUTPUT_BYTES} bytes")
    except (client.WebSocketConnectionClosedException, ConnectionError):
        pass  # the server closes the connection without a close frame once the program has ended
    except (client.WebSocketException, OSError) as error:
        raise ClientError(f"the program in {pod} did not respond in time: {error}") from error
    output = ExecOutput(bytes(channels[_OUT]), bytes(channels[_ERROR]))
    _check_exit(bytes(channels[_STATUS]), output, pod, accepted_codes)
    return output


def _check_exit(status: bytes, output: ExecOutput, pod: str, accepted_codes: tuple[int, ...]) -> None:
    try:
        result = json.loads(status) if status else {}
    except ValueError:
        result = {}
    causes = (result.get("details") or {}).get("causes") or ()
    codes = [str(cause.get("message")) for cause in causes if cause.get("reason") == "ExitCode"]
    if result.get("status") == "Success" or any(code == str(number) for code in codes for number in accepted_codes):
        return
    last = output.error.decode(errors="replace").strip().splitlines()[-1:] or [str(result.get("message") or "cut off")]
    # If the worker writes its log as JSON, the last line of the program's output is JSON too.
    raise ClientError(f"{pod}: {parse_log_line(last[0]).text.splitlines()[-1]}")


def _describe_refusal(code: int, namespace: str, pod: str) -> ClientError:
    if code == 403:
        permission = f"create pods/exec in namespace {namespace}"
        return ForbiddenError(f"you may not {permission}; ask for a Role with verb 'create' on 'pods/exec'")
    if code == 404:
        return NotFoundError(f"{pod} is deleted")
    return ClientError(f"cannot run a program in {pod}: the API server answered {code}")
