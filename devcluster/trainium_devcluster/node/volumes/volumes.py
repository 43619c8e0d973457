"""Create a pod's volumes before its containers start, update them while they run, and remove them afterwards.

Guarantees:
- Every volume is a path below the pod's directory (or the host path itself).
- Volumes with the content of objects change atomically, within a second of the object.
- A token is renewed after 80 % of its life.
- An emptyDir of medium Memory is a separate tmpfs of the requested size, which is lost with the node as on a machine
  without power.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.node.api import quantities
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json, get_namespace, get_uid
from trainium_devcluster.node.api.reflector import ObjectCache
from trainium_devcluster.node.api.waiting import wait_for_event
from trainium_devcluster.node.spec import config_data, downward_api
from trainium_devcluster.node.spec.config_data import ProjectedFile
from trainium_devcluster.node.volumes import atomic_writer, persistent_volume_claims
from trainium_devcluster.node.volumes.service_account_tokens import TokenSource
from trainium_devcluster.processes import syscalls as sc
from trainium_devcluster.processes.cleanup import remove_tree

_log = logging.getLogger(__name__)
_PRIVATE_SHM = "64m"  # the default size of a pod's /dev/shm in container runtimes


class VolumeError(Exception):
    """A volume cannot be created yet; the pod waits and retries."""


@dataclass(slots=True)
class PodVolumes:
    """Manages the volumes of one pod; `paths` holds the path of each volume by name once `setup` has returned."""

    api: Api
    cache: ObjectCache
    folder: Path
    facts: Callable[[], downward_api.PodFacts]
    paths: dict[str, Path] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _tokens: dict[str, TokenSource] = field(default_factory=dict)
    _tmpfs_mounts: list[Path] = field(default_factory=list)
    _refresher: asyncio.Task[None] | None = None

    async def create(self) -> None:
        """Create every volume; may be called again after a failure.

        Raises:
            VolumeError: when one cannot be created yet, with a kubelet's message.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mount_tmpfs(self.folder / "shm", _PRIVATE_SHM, 0o1777)
        for volume in self._pod["spec"].get("volumes") or []:
            try:
                self.paths[volume["name"]] = await self._create_volume(volume)
            except (ApiError, OSError, config_data.MissingKeyError, downward_api.UnknownFieldError) as error:
                raise VolumeError(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error}') from error
        if self._refresher is None:
            self._refresher = asyncio.create_task(self._refresh())

    @property
    def shm(self) -> Path:
        """The pod's shared memory, shown as /dev/shm."""
        return self.folder / "shm"

    def remove(self) -> None:
        """Remove all volumes; the containers have ended."""
        if self._refresher is not None:
            self._refresher.cancel()
        self.cache.release(get_uid(self._pod))
        for path in self._tmpfs_mounts:
            with contextlib.suppress(OSError):
                sc.unmount(str(path))
        remove_tree(self.folder)

    @property
    def _pod(self) -> Json:
        return self.facts().pod

    async def _create_volume(self, volume: Json) -> Path:
        path = self.folder / "volumes" / str(volume["name"])
        if "emptyDir" in volume:
            return self._create_empty_dir(path, volume["emptyDir"] or {})
        if "hostPath" in volume:
            return check_host_path(volume["hostPath"])
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            return check_host_path(
                await persistent_volume_claims.resolve_host_path(self.api, get_namespace(self._pod), claim)
            )
        atomic_writer.write(path, await self._read_files(volume))
        return path

    def _create_empty_dir(self, path: Path, source: Json) -> Path:
        if source.get("medium") == "Memory":
            limit = source.get("sizeLimit")
            size = str(int(quantities.parse(limit))) if limit and quantities.parse(limit) > 0 else "50%"
            self._mount_tmpfs(path, size, 0o777)
        else:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o777)
        return path

    def _mount_tmpfs(self, path: Path, size: str, mode: int) -> None:
        if path in self._tmpfs_mounts:
            return
        path.mkdir(parents=True, exist_ok=True)
        sc.mount("tmpfs", str(path), "tmpfs", options=f"mode={mode:o},size={size}")
        self._tmpfs_mounts.append(path)

    async def _read_files(self, volume: Json) -> dict[str, ProjectedFile]:
        if "projected" in volume:
            projected = volume["projected"]
            mode = _read_default_mode(projected)
            files: dict[str, ProjectedFile] = {}
            for source in projected.get("sources") or []:
                files |= await self._read_source(source, mode, volume["name"])
            return files
        for key in ("configMap", "secret", "downwardAPI"):
            if key in volume:
                source = volume[key]
                if key == "secret":
                    source = {**source, "name": source["secretName"]}
                return await self._read_source({key: source}, _read_default_mode(source), volume["name"])
        raise VolumeError(f"volume {volume['name']} is of a kind that this node does not have")

    async def _read_source(self, source: Json, mode: int, volume: str) -> dict[str, ProjectedFile]:
        if "serviceAccountToken" in source:
            return await self._read_token(source["serviceAccountToken"], mode, volume)
        if "downwardAPI" in source:
            return self._read_downward_api(source["downwardAPI"].get("items") or [], mode)
        for key, plural, kind in (("configMap", "configmaps", "configmap"), ("secret", "secrets", "secret")):
            if key in source:
                reference = source[key]
                object_name, optional = reference["name"], bool(reference.get("optional"))
                pod_namespace = get_namespace(self._pod)
                data_object = await self.cache.acquire(
                    plural, pod_namespace, object_name, get_uid(self._pod), self.changed.set
                )
                if data_object is None:
                    if optional:
                        return {}
                    raise VolumeError(
                        f'MountVolume.SetUp failed for volume "{volume}" : {kind} "{object_name}" not found'
                    )
                what = f"{kind} {pod_namespace}/{object_name}"
                return config_data.project_keys(
                    config_data.decode_data(data_object, plural), reference.get("items"), mode, optional, what
                )
        raise VolumeError(f"volume {volume} has a source that this node does not have: {', '.join(source)}")

    async def _read_token(self, source: Json, mode: int, volume: str) -> dict[str, ProjectedFile]:
        key = f"{volume}/{source['path']}"
        token = self._tokens.get(key)
        if token is None:
            token = self._tokens[key] = TokenSource(self.api, self._pod, source)
        context = self._pod["spec"].get("securityContext") or {}
        if context.get("fsGroup") is not None:
            mode = 0o640  # independent of defaultMode, as with a kubelet
        elif context.get("runAsUser") is not None:
            mode = 0o600
        return {source["path"]: ProjectedFile((await token.get()).encode(), mode)}

    def _read_downward_api(self, items: list[Json], mode: int) -> dict[str, ProjectedFile]:
        facts, files = self.facts(), {}
        for item in items:
            if "fieldRef" not in item:
                raise VolumeError(f"resourceFieldRef of {item['path']} is not supported by the process node")
            text = downward_api.resolve_field(facts, item["fieldRef"]["fieldPath"])
            files[item["path"]] = ProjectedFile(text.encode(), item.get("mode") or mode)
        return files

    async def _refresh(self) -> None:
        """Write volumes again after a change of an object or the pod, and when a token is due."""
        while True:
            renewal = min((token.renew_in() for token in self._tokens.values()), default=None)
            await wait_for_event(self.changed, renewal)
            self.changed.clear()
            for volume in self._pod["spec"].get("volumes") or []:
                if not {"projected", "configMap", "secret", "downwardAPI"} & volume.keys():
                    continue
                try:
                    atomic_writer.write(self.paths[volume["name"]], await self._read_files(volume))
                except (VolumeError, ApiError, OSError, config_data.MissingKeyError) as error:
                    _log.warning("volume %s keeps its old content: %s", volume["name"], error)
                    for token in self._tokens.values():
                        token.postpone()


def check_host_path(source: Json) -> Path:
    """Return the host path of a volume, checked or created according to its `type`.

    Raises:
        VolumeError: when it is not what `type` demands.
    """
    path, kind = Path(source["path"]), source.get("type") or ""
    if kind in {"", "DirectoryOrCreate"} and not path.exists():
        # A missing path without a type becomes a directory too, as in container runtimes.
        path.mkdir(parents=True, mode=0o755)
    if kind not in {"", "Directory", "DirectoryOrCreate", "File"}:
        raise VolumeError(f"hostPath type {kind} is not supported by the process node")
    if kind and not (path.is_file() if kind == "File" else path.is_dir()):
        raise VolumeError(f"hostPath type check failed: {path} is not a {kind}")
    return path


def _read_default_mode(source: Json) -> int:
    value = source.get("defaultMode")
    return config_data.DEFAULT_MODE if value is None else int(value)
