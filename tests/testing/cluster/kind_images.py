"""The images that pods of a kind cluster start from: built from the Dockerfile, or archives of the settings; loaded.

Each node keeps an image twice, packed and unpacked, and the workers' has gigabytes. So only nodes with pods get it,
and the settings may name a base whose torch has no CUDA (`trainerBase`): the Dockerfile keeps a torch that is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.testing.cluster.access import ROOT

if TYPE_CHECKING:
    from tests.testing.cluster.access import Access

OPERATOR = "trainium-operator:test"
TRAINER = "trainium-trainer:test"


def load_images(access: Access, cluster: str) -> None:
    """Archives that the settings name; without any, what is built here, and `chartValues` then say so."""
    where = ("--name", cluster, "--nodes", ",".join(_nodes_with_pods(access, cluster)))
    archives = access.settings.get("images", ())
    for archive in archives:
        access.must("kind", "load", "image-archive", archive, *where, seconds=600)
    if archives:
        return
    base = access.settings.get("trainerBase")
    arguments = ("--build-arg", f"PYTHON_IMAGE={base}") if base else ()
    for image, target, more in ((OPERATOR, "operator", ()), (TRAINER, "trainer-cpu", arguments)):
        access.must("docker", "build", "--target", target, *more, "-t", image, str(ROOT), seconds=1800)
        access.must("kind", "load", "docker-image", image, *where, seconds=600)
    repository, _, tag = OPERATOR.partition(":")
    values = access.settings.setdefault("chartValues", {})
    values.update(image={"repository": repository, "tag": tag}, trainerImage=TRAINER)


def _nodes_with_pods(access: Access, cluster: str) -> list[str]:
    """All but the control plane, on which kind lets no pod of ours where there are other nodes."""
    nodes = access.must("kind", "get", "nodes", "--name", cluster).split()
    return [node for node in nodes if "-control-plane" not in node.removeprefix(cluster)]
