"""Load images into a kind cluster: archives of the settings, or images built from the Dockerfile.

A node receives a packed image and unpacks it; that of workers has gigabytes. Only nodes with pods receive it, one after
another, and each deletes the packed layers, so that an image takes its size once on each node instead of twice.
"""

from tests.testing.cluster.access import ROOT, Access

OPERATOR = "trainium-operator:test"
TRAINER = "trainium-trainer:test"

_CONTENT = "ctr -n k8s.io content ls"
_UNPACKED = "containerd.io/uncompressed="
"""containerd's label of a layer that it has unpacked; a node image has layers that are not, for later pods."""
_COLLECT = "ctr -n k8s.io leases delete --sync $(ctr -n k8s.io leases create)"
"""Deleting content frees no disk until the next garbage collection; the end of this lease waits for one."""


def load_images(access: Access, cluster: str) -> None:
    """Load the archives of the settings; without any, build the images and name them in `chartValues`."""
    nodes = _nodes_with_pods(access, cluster)
    archives = access.settings.get("images", ())
    for archive in archives:
        _load(access, cluster, nodes, "image-archive", archive)
    if archives:
        return
    for image, target in ((OPERATOR, "operator"), (TRAINER, "trainer-cpu")):
        access.check_output("docker", "build", "--target", target, "-t", image, str(ROOT), seconds=1800)
        _load(access, cluster, nodes, "docker-image", image)
    repository, _, tag = OPERATOR.partition(":")
    values = access.settings.setdefault("chartValues", {})
    values.update(image={"repository": repository, "tag": tag}, trainerImage=TRAINER)


def _load(access: Access, cluster: str, nodes: list[str], kind: str, image: str) -> None:
    """Load an image onto each node, and free the packed layers."""
    for node in nodes:
        before = _unpacked_layers(access, node)
        access.check_output("kind", "load", kind, image, "--name", cluster, "--nodes", node, seconds=600)
        packed = sorted(_unpacked_layers(access, node) - before)
        if packed:
            remove = f"ctr -n k8s.io content rm {' '.join(packed)} && {_COLLECT}"
            access.check_output("docker", "exec", node, "sh", "-c", remove, seconds=120)


def _unpacked_layers(access: Access, node: str) -> set[str]:
    """Return the digests of packed layers that the node has unpacked."""
    lines = access.check_output("docker", "exec", node, "sh", "-c", _CONTENT).splitlines()
    return {line.split()[0] for line in lines if _UNPACKED in line}


def _nodes_with_pods(access: Access, cluster: str) -> list[str]:
    """Return all nodes but the control plane, which takes no pods where there are other nodes."""
    nodes = access.check_output("kind", "get", "nodes", "--name", cluster).split()
    return [node for node in nodes if "-control-plane" not in node.removeprefix(cluster)]
