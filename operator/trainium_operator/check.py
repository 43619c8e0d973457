"""Implement `trainium-operator check`: whether the installed operator works; `helm test` runs it.

It connects as a worker and a kubelet do, from inside the cluster and without rights at the API server. It checks that
- every replica passes its readiness probe, so its caches of TrainingJobs are in sync;
- every replica presents a certificate signed by the release's own authority;
- exactly one replica leads: it asks for a token, and the others answer that they do not lead.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from trainium_contract.wire.stream import STREAM_PATH
from trainium_operator.command_line import HELP_OPTIONS, PROGRAM, run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ANSWER_SECONDS = 5.0
_PAUSE_SECONDS = 1.0
_MAX_CHARACTERS = 200
"""Characters of a response that are kept."""


@dataclass(frozen=True, slots=True)
class Replica:
    """The answer of one address of the coordinator's Service."""

    address: str
    is_leader: bool = False
    problem: str = ""
    """The problem in a few words; empty when the replica works."""


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The result of the check, and its sentence."""

    works: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class Installation:
    """The addresses and the certificates of the installed operator."""

    service: str
    """Name of the coordinator's Service, with its namespace and .svc."""
    replicas: int
    coordinator_port: int
    probe_port: int
    authority: Path
    """File with the certificates that the release trusts."""


def judge_replicas(service: str, expected: int, replicas: Sequence[Replica]) -> CheckVerdict:
    """Return the verdict on the responses of the replicas."""
    bad = [f"{replica.address} {replica.problem}" for replica in replicas if replica.problem]
    leaders = [replica.address for replica in replicas if replica.is_leader and not replica.problem]
    if bad:
        problem = "; ".join(bad)
    elif len(replicas) < expected:
        problem = f"{service} has {len(replicas)} of {expected} replicas: look at the Deployment's pods"
    elif len(leaders) != 1:
        problem = f"{len(leaders)} of {len(replicas)} replicas lead: look at the Lease and at the operator's log"
    else:
        good = f"{len(replicas)} of {expected} replicas ready" if len(replicas) > 1 else "the only replica is ready"
        return CheckVerdict(
            works=True, sentence=f"the operator works: {good}, {leaders[0]} leads, certificates are its own"
        )
    return CheckVerdict(works=False, sentence=f"the operator does not work: {problem}")


def resolve_addresses(name: str) -> list[str]:
    """Return every address of a name. Raises OSError."""
    return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})


def poll(installed: Installation, *, resolve: Callable[[str], Sequence[str]] = resolve_addresses) -> CheckVerdict:
    """Ask every replica once."""
    try:
        trust = ssl.create_default_context(cafile=str(installed.authority))
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        return CheckVerdict(
            works=False,
            sentence=f"the operator does not work: {installed.authority}: {reason}: no replica has written its "
            "certificates into the Secret yet; look at the operator's log",
        )
    try:
        addresses = resolve(installed.service)
    except OSError as error:
        return CheckVerdict(
            works=False,
            sentence=f"the operator does not work: {installed.service}: {error.strerror or error}: the Service has no "
            "pods, or names are not resolved; look at the Deployment's pods",
        )
    replicas = [_build_replica(installed, address, trust) for address in addresses]
    return judge_replicas(installed.service, installed.replicas, replicas)


def poll_until_ready(
    check_once: Callable[[], CheckVerdict], seconds: float, pause: Callable[[float], None]
) -> CheckVerdict:
    """Poll until the operator works; return that verdict, or the last one after about `seconds` of pauses."""
    for _ in range(int(seconds / _PAUSE_SECONDS)):
        verdict = check_once()
        if verdict.works:
            return verdict
        pause(_PAUSE_SECONDS)
    return check_once()


def _build_replica(installed: Installation, address: str, trust: ssl.SSLContext) -> Replica:
    try:
        probed = http.client.HTTPConnection(address, installed.probe_port, timeout=_ANSWER_SECONDS)
        status, text = _get(probed, "/readyz")
        if status != http.client.OK:
            return Replica(address, problem=f"is not ready ({text}); look at its log")
        connection = http.client.HTTPSConnection(address, installed.coordinator_port, timeout=_ANSWER_SECONDS)
        plain = socket.create_connection((address, installed.coordinator_port), _ANSWER_SECONDS)
        with plain, trust.wrap_socket(plain, server_hostname=installed.service) as connection.sock:
            status, text = _get(connection, STREAM_PATH)
    except ssl.SSLCertVerificationError as error:
        return Replica(address, problem=f"shows a certificate that the release does not trust ({error.verify_message})")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Replica(address, problem=f"does not answer ({reason}); look at its log and at NetworkPolicies")
    if status in (http.client.UNAUTHORIZED, http.client.SERVICE_UNAVAILABLE):
        return Replica(address, is_leader=status == http.client.UNAUTHORIZED)
    return Replica(address, problem=f"answers {status} where it should ask for a token ({text}); look at its log")


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    """Return the HTTP status and the start of the body, on one line."""
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(_MAX_CHARACTERS).decode(errors="replace").strip()
    finally:
        connection.close()
    return answer.status, " ".join(text.split())


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)


@app.command()
def check(
    service: Annotated[str, typer.Option(help="The coordinator's Service, as NAME.NAMESPACE.svc.")],
    authority: Annotated[Path, typer.Option(help="ca.crt of the coordinator's Secret.")],
    replicas: Annotated[int, typer.Option(min=1, help="Replicas that must be ready.")] = 1,
    coordinator_port: Annotated[int, typer.Option(help="Port of the coordinator.")] = 8443,
    probe_port: Annotated[int, typer.Option(help="Port of the probes.")] = 8080,
    seconds: Annotated[float, typer.Option(min=0.0, max=600.0, help="How long to wait until it works.")] = 30.0,
) -> None:
    """Print in one sentence whether the installed operator works, from inside the cluster; exit 1 when not."""
    installed = Installation(service, replicas, coordinator_port, probe_port, authority)
    verdict = poll_until_ready(lambda: poll(installed), seconds, time.sleep)
    typer.echo(verdict.sentence, err=not verdict.works)
    raise typer.Exit(0 if verdict.works else 1)


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the command; ends the process with its exit code."""
    sys.exit(run_command(app, arguments, f"{PROGRAM} check"))
