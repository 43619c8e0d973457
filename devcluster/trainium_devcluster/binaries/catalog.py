"""List the programs of the development cluster, their versions, and the locations of their official releases.

Guarantees:
- A version appears here and in the pinned Go modules; a test checks that both are equal.
- The control plane exists in several versions of Kubernetes, each with the etcd of its kubeadm and separate pins.
- A checksum is listed here or fetched from the release's host over verified TLS.
- No program is used unchecked, so one whose project publishes no checksum is built (Go's checksums cover its module).
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

KUBERNETES_VARIABLE = "TRAINIUM_KUBERNETES"
"""Environment variable: the version of Kubernetes, `1.37` or `1.37.2`."""
OLDEST_KUBERNETES_VERSION = "1.30.14"
"""Newest patch of the oldest version that the chart supports."""
HELM_VERSION = "4.3.1"
KWOK_VERSION = "0.8.0"
KUEUE_VERSION = "0.19.2"
VERSITYGW_VERSION = "1.8.0"


class Program(StrEnum):
    """The programs, by file name."""

    ETCD = "etcd"
    APISERVER = "kube-apiserver"
    CONTROLLER_MANAGER = "kube-controller-manager"
    SCHEDULER = "kube-scheduler"
    KUBECTL = "kubectl"
    HELM = "helm"
    KWOK = "kwok"
    """Simulates the kubelets of a fleet; only a fleet needs it."""
    KUEUE = "kueue"
    """The real Kueue controller; only clusters that ask for it need it."""
    VERSITYGW = "versitygw"
    """An S3 server over a folder; tests of checkpoints, data and artifacts in a bucket need it."""
    CHECK_DEFINITION = "check-definition"
    """Validates a CustomResourceDefinition as the oldest supported API server does; a test needs it."""
    CHECK_NEWEST_DEFINITION = "check-newest-definition"
    """The same as the newest API server that is tested."""


CLUSTER_PROGRAMS = frozenset(
    {
        Program.ETCD,
        Program.APISERVER,
        Program.CONTROLLER_MANAGER,
        Program.SCHEDULER,
        Program.KUBECTL,
        Program.HELM,
    }
)
FLEET_PROGRAMS = frozenset({Program.KWOK})
KUEUE_PROGRAMS = frozenset({Program.KUEUE})
S3_PROGRAMS = frozenset({Program.VERSITYGW})
DEFINITION_PROGRAMS = frozenset({Program.CHECK_DEFINITION, Program.CHECK_NEWEST_DEFINITION})
OPTIONAL_PROGRAMS = {
    "fleet": FLEET_PROGRAMS,
    "kueue": KUEUE_PROGRAMS,
    "s3": S3_PROGRAMS,
    "definition": DEFINITION_PROGRAMS,
}
"""Programs that are not in each cluster, by the option that prepares them; they are published without checksums, or
only as images, so they are built.
"""


class Architecture(StrEnum):
    """A processor architecture, as release files name it."""

    AMD64 = "amd64"
    ARM64 = "arm64"


@dataclass(frozen=True, slots=True)
class Release:
    """The location and the checksum of a program's official file."""

    program: Program
    version: str
    url: str
    member: str | None = None
    """Path inside the tar archive; None if the file is the program itself."""
    sha256: str | None = None
    """Checksum of the downloaded file, in hexadecimal; None if it is fetched from `sha256_url`."""
    sha256_url: str | None = None


@dataclass(frozen=True, slots=True)
class KubernetesVersion:
    """A version of the control plane and kubectl, and the etcd that its kubeadm starts."""

    number: str
    etcd: str
    modules: str
    """The file with its pinned Go modules, beside `go.mod`."""
    checksums: Mapping[tuple[Program, Architecture], str] = field(default_factory=dict)
    """Known checksums of releases. The others are published beside the file by the same host."""

    @property
    def minor(self) -> str:
        """The version without its patch, as `1.37`."""
        return self.number.rpartition(".")[0]


DEFAULT_KUBERNETES = KubernetesVersion(
    "1.36.3",
    etcd="3.6.8",
    modules="go.mod",
    checksums={
        (Program.ETCD, Architecture.AMD64): "cf9cfe91a4856cb90eed9c99e6aee4b708db2c7888b88a6f116281f04b0ea693",
        (Program.ETCD, Architecture.ARM64): "438f56a700d17ce761510a3e63e6fa5c1d587b2dd4d7a22c179c09a649366760",
        (Program.KUBECTL, Architecture.AMD64): "ebbd080e7c2e275093b55915722043257eb24004363e20acb3c4d71919f88336",
        (Program.KUBECTL, Architecture.ARM64): "3d86f24401c41ae5a46ac50eef8865fe891d3647d324a0836f6c63757a126e62",
    },
)
KUBERNETES_VERSIONS = (
    DEFAULT_KUBERNETES,
    KubernetesVersion("1.37.2", etcd="3.7.0", modules="kubernetes-1.37.mod"),
)
"""The versions that a development cluster can have, oldest first."""


def find_kubernetes(requested: str | None = None) -> KubernetesVersion:
    """Return the version of this number, else of TRAINIUM_KUBERNETES, else the default; raises ClusterError."""
    wanted = requested or os.environ.get(KUBERNETES_VARIABLE) or DEFAULT_KUBERNETES.number
    for version in KUBERNETES_VERSIONS:
        if wanted.removeprefix("v") in {version.number, version.minor}:
            return version
    numbers = ", ".join(version.number for version in KUBERNETES_VERSIONS)
    raise ClusterError(f"There is no development cluster of Kubernetes {wanted!r}; use one of {numbers}.")


def find_architecture() -> Architecture:
    """Return the architecture of this machine; raises ClusterError on one without releases."""
    machine = platform.machine().lower()
    if platform.system() != "Linux":
        raise ClusterError(f"The development cluster runs on Linux only; this is {platform.system()}.")
    if machine in {"x86_64", "amd64"}:
        return Architecture.AMD64
    if machine in {"aarch64", "arm64"}:
        return Architecture.ARM64
    raise ClusterError(f"The development cluster has no binaries for the processor {machine!r}; use amd64 or arm64.")


def format_version_key(
    architecture: Architecture, programs: frozenset[Program], kubernetes: KubernetesVersion = DEFAULT_KUBERNETES
) -> str:
    """Return the name of the cache folder for these versions, so that an upgrade never mixes with older programs."""
    for versions, optional in (
        (f"kwok-{KWOK_VERSION}", FLEET_PROGRAMS),
        (f"kueue-{KUEUE_VERSION}", KUEUE_PROGRAMS),
        (f"versitygw-{VERSITYGW_VERSION}", S3_PROGRAMS),
        (f"definition-{OLDEST_KUBERNETES_VERSION}-{KUBERNETES_VERSIONS[-1].number}", DEFINITION_PROGRAMS),
    ):
        if programs <= optional:
            return f"{versions}-{architecture}"
    return f"kubernetes-{kubernetes.number}-etcd-{kubernetes.etcd}-helm-{HELM_VERSION}-{architecture}"


def release_of(program: Program, architecture: Architecture, kubernetes: KubernetesVersion) -> Release:
    """Return the official release of a program of `CLUSTER_PROGRAMS`."""
    pinned = kubernetes.checksums.get((program, architecture))
    match program:
        case Program.ETCD:
            stem = f"etcd-v{kubernetes.etcd}-linux-{architecture}"
            base = f"https://github.com/etcd-io/etcd/releases/download/v{kubernetes.etcd}"
            archive, checksums = f"{base}/{stem}.tar.gz", f"{base}/SHA256SUMS"
            return Release(program, kubernetes.etcd, archive, f"{stem}/etcd", pinned, checksums)
        case Program.HELM:
            url = f"https://get.helm.sh/helm-v{HELM_VERSION}-linux-{architecture}.tar.gz"
            return Release(program, HELM_VERSION, url, f"linux-{architecture}/helm", pinned, f"{url}.sha256sum")
        case _:
            url = f"https://dl.k8s.io/release/v{kubernetes.number}/bin/linux/{architecture}/{program}"
            return Release(program, kubernetes.number, url, None, pinned, f"{url}.sha256")
