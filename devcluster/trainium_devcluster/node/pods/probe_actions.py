"""Perform the actions of probes: HTTP request, TCP connection, command.

Guarantees:
- HTTPS certificates are not verified and redirects within the host are followed, as a kubelet does.
- A check never raises; it returns success or a sentence.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from trainium_devcluster.node.api.objects import Json, find
from trainium_devcluster.node.api.waiting import with_timeout
from trainium_devcluster.node.processes.container_exec import ExecResult

_MAX_BODY = 10 * 1024
_AGENT = "kube-probe/1.36"

Execute = Callable[[list[str], float], Awaitable[ExecResult]]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of a check, and its output."""

    success: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """The target of a check: the pod's address, the container's spec, and a function that runs commands in it."""

    address: str
    container: Json
    execute: Execute
    http: aiohttp.ClientSession


async def run_action(action: Json, target: ProbeTarget, timeout: float) -> ProbeResult:
    """Perform the action of a probe within `timeout` seconds."""
    if "exec" in action:
        result = await target.execute(list(action["exec"].get("command") or []), timeout)
        if result.timed_out:
            return ProbeResult(
                False, f"command timed out: {action['exec'].get('command')} timed out after {timeout:g}s"
            )
        return ProbeResult(result.code == 0, result.output)
    if "httpGet" in action:
        return await _probe_http(action["httpGet"], target, timeout)
    if "tcpSocket" in action:
        return await _probe_tcp(action["tcpSocket"], target, timeout)
    return ProbeResult(False, f"none of exec, httpGet, tcpSocket is given: {', '.join(action)}")


def find_port_number(port: str | int, container: Json) -> int | None:
    """Return the number of a port that is given by number or by the name of a container port."""
    if isinstance(port, int) or port.isdigit():
        return int(port)
    declared = find(container.get("ports"), "name", port)
    return None if declared is None else int(declared["containerPort"])


async def _probe_http(action: Json, target: ProbeTarget, timeout: float) -> ProbeResult:
    port = find_port_number(action["port"], target.container)
    if port is None:
        return ProbeResult(False, f"the container has no port named {action['port']!r}")
    host = action.get("host") or target.address
    path = action.get("path") or "/"
    url = f"{action.get('scheme', 'HTTP').lower()}://{host}:{port}{path if path.startswith('/') else '/' + path}"
    headers = {"User-Agent": _AGENT, "Accept": "*/*"} | {h["name"]: h["value"] for h in action.get("httpHeaders") or []}
    limit = aiohttp.ClientTimeout(total=timeout)
    try:
        async with target.http.get(url, headers=headers, timeout=limit, ssl=False) as response:
            body = await response.content.read(_MAX_BODY)
            if 200 <= response.status < 400:
                return ProbeResult(True, body.decode(errors="replace"))
            return ProbeResult(False, f"HTTP probe failed with statuscode: {response.status}")
    except TimeoutError:
        return ProbeResult(
            False, f'Get "{url}": context deadline exceeded (Client.Timeout exceeded while awaiting headers)'
        )
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return ProbeResult(False, f'Get "{url}": {error or type(error).__name__}')


async def _probe_tcp(action: Json, target: ProbeTarget, timeout: float) -> ProbeResult:
    port = find_port_number(action["port"], target.container)
    if port is None:
        return ProbeResult(False, f"the container has no port named {action['port']!r}")
    host = action.get("host") or target.address
    try:
        _, writer = await with_timeout(asyncio.open_connection(host, port), timeout)
    except (OSError, TimeoutError) as error:
        return ProbeResult(False, f"dial tcp {host}:{port}: {error or 'i/o timeout'}")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ProbeResult(True)
