"""The node's command line.

Invariants: everything that the node needs to know comes from here; a wrong value ends the program with a sentence,
before anything started.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from trainium_devcluster.node.api import quantities

_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint that the node registers with."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of a node. Paths are absolute; `api_server` is host and port as pods are to use them."""

    name: str
    kubeconfig: Path
    state_dir: Path
    control_socket: Path
    venv_bin: Path
    api_server: tuple[str, int]
    capacity: dict[str, str]
    labels: dict[str, str]
    taints: tuple[Taint, ...]
    pod_cidr: str | None
    kubelet_port: int
    client_ca: Path | None
    serving_ca_cert: Path | None
    serving_ca_key: Path | None
    claims_dir: Path
    images_dir: Path
    heartbeat_seconds: float


def parse(argv: list[str]) -> NodeOptions:
    """Read the command line; ends the program with a sentence on bad input."""
    parser = argparse.ArgumentParser(prog="trainium_devcluster.node", description="One node of a development cluster.")
    parser.add_argument("--name", required=True, help="node name")
    parser.add_argument("--kubeconfig", required=True, type=Path, help="how to reach the API server")
    parser.add_argument("--state-dir", required=True, type=Path, help="directory of this node alone")
    parser.add_argument("--control-socket", required=True, type=Path, help="Unix socket for fault controls")
    parser.add_argument("--venv-bin", required=True, type=Path, help="directory that comes first in the pods' PATH")
    parser.add_argument("--api-server", required=True, help="host:port of the API server as pods are to use it")
    parser.add_argument("--cpu", default="8", help="capacity: CPUs")
    parser.add_argument("--memory", default="32Gi", help="capacity: memory")
    parser.add_argument("--pods", default="110", help="capacity: pods")
    parser.add_argument("--ephemeral-storage", default="50Gi", help="capacity: disk")
    parser.add_argument("--neuron", default="0", help="capacity: aws.amazon.com/neuron")
    parser.add_argument(
        "--neuroncore", default=None, help="capacity: aws.amazon.com/neuroncore (default: two per device)"
    )
    parser.add_argument("--efa", default="0", help="capacity: vpc.amazonaws.com/efa")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="node label; repeatable")
    parser.add_argument(
        "--taint", action="append", default=[], metavar="KEY[=VALUE]:EFFECT", help="node taint; repeatable"
    )
    parser.add_argument("--pod-cidr", default=None, help="a /24 of 127.0.0.0/8 (default: a free one)")
    parser.add_argument("--kubelet-port", type=int, default=10250, help="port of the node's own API")
    parser.add_argument("--client-ca", type=Path, default=None, help="authority of the API server's client certificate")
    parser.add_argument(
        "--serving-ca-cert", type=Path, default=None, help="authority that signs the node's own certificate"
    )
    parser.add_argument("--serving-ca-key", type=Path, default=None, help="its key")
    parser.add_argument(
        "--heartbeat", type=float, default=10.0, metavar="SECONDS", help="how often the node shows that it lives"
    )
    parser.add_argument("--claims-dir", type=Path, default=None, help="where claims of our storage class live")
    parser.add_argument("--images-dir", type=Path, default=None, help="modules of images that have their own")
    return _checked(parser, parser.parse_args(argv))


def _checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> NodeOptions:
    if not _NAME.match(args.name):
        parser.error(f"--name {args.name!r} is not a node name: use lower-case letters, digits, '-' and '.'")
    host, _, port = args.api_server.rpartition(":")
    if not host or not port.isdigit():
        parser.error(f"--api-server {args.api_server!r} must be host:port")
    if not args.heartbeat > 0:
        parser.error(f"--heartbeat {args.heartbeat:g} must be more than 0 seconds")
    capacity = {
        "cpu": args.cpu,
        "memory": args.memory,
        "pods": args.pods,
        "ephemeral-storage": args.ephemeral_storage,
        "aws.amazon.com/neuron": args.neuron,
        "aws.amazon.com/neuroncore": args.neuroncore or str(2 * int(args.neuron)),
        "vpc.amazonaws.com/efa": args.efa,
    }
    for name, amount in capacity.items():
        try:
            quantities.parse(amount)
        except ValueError as error:
            parser.error(f"capacity of {name}: {error}")
    state = args.state_dir.absolute()
    return NodeOptions(
        name=args.name,
        kubeconfig=args.kubeconfig.absolute(),
        state_dir=state,
        control_socket=args.control_socket.absolute(),
        venv_bin=args.venv_bin.absolute(),
        api_server=(host, int(port)),
        capacity={name: amount for name, amount in capacity.items() if quantities.parse(amount) > 0},
        labels=dict(_label(parser, text) for text in args.label),
        taints=tuple(_taint(parser, text) for text in args.taint),
        pod_cidr=args.pod_cidr,
        kubelet_port=args.kubelet_port,
        client_ca=args.client_ca,
        serving_ca_cert=args.serving_ca_cert,
        serving_ca_key=args.serving_ca_key,
        claims_dir=(args.claims_dir or state.parent / "claims").absolute(),
        images_dir=(args.images_dir or state.parent / "images").absolute(),
        heartbeat_seconds=args.heartbeat,
    )


def _label(parser: argparse.ArgumentParser, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        parser.error(f"--label {text!r} must be KEY=VALUE")
    return key, value


def _taint(parser: argparse.ArgumentParser, text: str) -> Taint:
    pair, _, effect = text.rpartition(":")
    key, _, value = pair.partition("=")
    if not key or effect not in _EFFECTS:
        parser.error(f"--taint {text!r} must be KEY[=VALUE]:EFFECT with an effect of {', '.join(_EFFECTS)}")
    return Taint(key, value, effect)
