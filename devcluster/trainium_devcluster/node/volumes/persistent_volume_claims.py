"""Resolve bound PersistentVolumeClaims to paths, and provision those of the cluster's storage class.

Guarantees:
- A provisioned volume is a directory of the cluster's claims folder, reachable from every node.
- Only the node that the scheduler chose provisions a claim.
- The directory is removed with the volume (reclaim policy Delete).
"""

import asyncio
import logging
from pathlib import Path

from trainium_contract.api_server.errors import ApiError, ConnectionFailedError
from trainium_devcluster.controlplane.bootstrap import PROVISIONER
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json, get_name, get_namespace, get_uid
from trainium_devcluster.node.api.reflector import Reflector
from trainium_devcluster.processes.cleanup import remove_tree

_log = logging.getLogger(__name__)

_SELECTED_NODE = "volume.kubernetes.io/selected-node"
_PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
_CONFLICT = 409


async def resolve_host_path(api: Api, claim_namespace: str, claim_name: str) -> Json:
    """Return the host path source behind a claim.

    Raises:
        OSError: when the claim is not bound, or its volume is of a kind that this node cannot show.
        ApiError: when it cannot be read.
    """
    claim = await api.get(f"/api/v1/namespaces/{claim_namespace}/persistentvolumeclaims/{claim_name}")
    volume_name = claim["spec"].get("volumeName")
    if claim.get("status", {}).get("phase") != "Bound" or not volume_name:
        raise OSError(f'persistentvolumeclaim "{claim_name}" is not bound')
    if claim["spec"].get("volumeMode") == "Block":
        raise OSError(f'persistentvolumeclaim "{claim_name}" is a block device, which this node does not have')
    volume = await api.get(f"/api/v1/persistentvolumes/{volume_name}")
    if path := volume["spec"].get("hostPath"):
        return dict(path)
    if local := volume["spec"].get("local"):
        return {"path": local["path"], "type": "Directory"}
    raise OSError(f"persistent volume {volume_name} is neither hostPath nor local, the kinds that this node has")


class Provisioner:
    """Creates volumes of the cluster's storage class for claims of pods on this node; removes released ones."""

    def __init__(self, api: Api, node: str, folder: Path) -> None:
        self._api = api
        self._node = node
        self._folder = folder
        self._classes = Reflector(api, "/apis/storage.k8s.io/v1/storageclasses", {}, self._wake)
        self._claims = Reflector(api, "/api/v1/persistentvolumeclaims", {}, self._wake)
        self._volumes = Reflector(api, "/api/v1/persistentvolumes", {}, self._wake)
        self._changed = asyncio.Event()

    def _wake(self, _: Json, __: bool) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Serve claims until cancelled; return at once if the node lacks the permission."""
        try:
            await self._api.get("/apis/storage.k8s.io/v1/storageclasses", {"limit": "1"})
        except ConnectionFailedError:
            pass
        except ApiError as error:
            _log.info("claims are not provisioned by this node: %s", error)
            return
        async with asyncio.TaskGroup() as group:
            for reflector in (self._classes, self._claims, self._volumes):
                group.create_task(reflector.run())
            group.create_task(self._reconcile())

    async def _reconcile(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                for claim in list(self._claims.objects.values()):
                    if self._should_provision(claim):
                        await self._provision(claim)
                for volume in list(self._volumes.objects.values()):
                    await self._reclaim(volume)
            except ApiError as error:
                _log.warning("provisioner: %s", error)

    def _should_provision(self, claim: Json) -> bool:
        annotations = claim["metadata"].get("annotations") or {}
        storage_class = claim["spec"].get("storageClassName")
        served = {get_name(c) for c in self._classes.objects.values() if c.get("provisioner") == PROVISIONER}
        return (
            annotations.get(_SELECTED_NODE) == self._node
            and storage_class in served
            and not claim["spec"].get("volumeName")
        )

    async def _provision(self, claim: Json) -> None:
        volume_name = f"pvc-{get_uid(claim)}"
        path = self._folder / volume_name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        body = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume_name, "annotations": {_PROVISIONED_BY: PROVISIONER}},
            "spec": {
                "accessModes": claim["spec"]["accessModes"],
                "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "name": get_name(claim),
                    "namespace": get_namespace(claim),
                    "uid": get_uid(claim),
                },
                "hostPath": {"path": str(path), "type": "Directory"},
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": claim["spec"]["storageClassName"],
                "volumeMode": "Filesystem",
            },
        }
        try:
            await self._api.create("/api/v1/persistentvolumes", body)
        except ApiError as error:
            if error.status != _CONFLICT:
                raise

    async def _reclaim(self, volume: Json) -> None:
        annotations = volume["metadata"].get("annotations") or {}
        path = Path((volume["spec"].get("hostPath") or {}).get("path", "/"))
        if annotations.get(_PROVISIONED_BY) != PROVISIONER or path.parent != self._folder:
            return
        if (
            volume.get("status", {}).get("phase") == "Released"
            and volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
        ):
            remove_tree(path)
            await self._api.delete(f"/api/v1/persistentvolumes/{get_name(volume)}", {})
