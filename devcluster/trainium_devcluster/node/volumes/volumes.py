"""The volumes of one pod: made before its containers start, kept up to date while they run, removed afterwards.

Invariants: every volume is a path below the pod's directory (or the host path itself); volumes made of objects change
atomically and within a second of the object; a token is renewed after 80 % of its life; an emptyDir of medium Memory
is a separate tmpfs of the requested size, which vanishes with the node as it does when a machine loses power.
"""

import asyncio
import contextlib
import logging
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainium_devcluster.node.api import quantities
from trainium_devcluster.node.api.client import Api, ApiError, Unreachable
from trainium_devcluster.node.api.objects import Json, namespace, uid
from trainium_devcluster.node.api.reflector import ObjectCache
from trainium_devcluster.node.api.waiting import until
from trainium_devcluster.node.processes.isolation import Isolation
from trainium_devcluster.node.spec import config_data, downward_api
from trainium_devcluster.node.spec.config_data import FileContent
from trainium_devcluster.node.volumes import atomic_writer, persistent_volume_claims
from trainium_devcluster.node.volumes.service_account_tokens import TokenSource
from trainium_devcluster.processes import syscalls as sc
from trainium_devcluster.processes.cleanup import remove_tree

_log = logging.getLogger(__name__)
_PRIVATE_SHM = "64m"  # what container runtimes give /dev/shm of a pod


class VolumeError(Exception):
    """A volume cannot be made, for now: the pod waits and tries again."""


@dataclass(slots=True)
class PodVolumes:
    """The volumes of one pod. `paths` holds the path of each volume by name once `setup` has returned."""

    api: Api
    cache: ObjectCache
    isolation: Isolation
    folder: Path
    facts: Callable[[], downward_api.PodFacts]
    paths: dict[str, Path] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _tokens: dict[str, TokenSource] = field(default_factory=dict)
    _tmpfs: list[Path] = field(default_factory=list)
    _refresher: asyncio.Task[None] | None = None

    async def setup(self) -> None:
        """Make every volume; may be called again after a failure.

        Raises:
            VolumeError: when one cannot be made yet, with a kubelet's sentence.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_memory(self.folder / "shm", _PRIVATE_SHM, 0o1777)
        for volume in self._pod["spec"].get("volumes") or []:
            try:
                self.paths[volume["name"]] = await self._make(volume)
            except (
                ApiError,
                Unreachable,
                OSError,
                config_data.MissingKeyError,
                downward_api.UnknownFieldError,
            ) as error:
                raise VolumeError(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error}') from error
        if self._refresher is None:
            self._refresher = asyncio.create_task(self._keep_fresh())

    @property
    def shm(self) -> Path:
        """The pod's shared memory, shown as /dev/shm."""
        return self.folder / "shm"

    def pod_changed(self) -> None:
        """Update files for changed labels or annotations of the pod."""
        self.changed.set()

    def remove(self) -> None:
        """Take everything down; the containers have ended."""
        if self._refresher is not None:
            self._refresher.cancel()
        self.cache.release(uid(self._pod))
        for path in self._tmpfs:
            with contextlib.suppress(OSError):
                sc.unmount(str(path))
            if not self.isolation.mounts:
                shutil.rmtree(path.resolve(), ignore_errors=True)
        remove_tree(self.folder)

    @property
    def _pod(self) -> Json:
        return self.facts().pod

    async def _make(self, volume: Json) -> Path:
        path = self.folder / "volumes" / str(volume["name"])
        if "emptyDir" in volume:
            return self._make_empty(path, volume["emptyDir"] or {})
        if "hostPath" in volume:
            return check_host_path(volume["hostPath"])
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            return check_host_path(await persistent_volume_claims.backing(self.api, namespace(self._pod), claim))
        atomic_writer.write(path, await self._files(volume))
        return path

    def _make_empty(self, path: Path, source: Json) -> Path:
        if source.get("medium") == "Memory":
            limit = source.get("sizeLimit")
            size = str(int(quantities.parse(limit))) if limit and quantities.parse(limit) > 0 else "50%"
            self._make_memory(path, size, 0o777)
        else:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o777)
        return path

    def _make_memory(self, path: Path, size: str, mode: int) -> None:
        if path in self._tmpfs:
            return
        if self.isolation.mounts:
            path.mkdir(parents=True, exist_ok=True)
            sc.mount("tmpfs", str(path), "tmpfs", options=f"mode={mode:o},size={size}")
        else:
            real = Path("/dev/shm", f"trainium-node-{uid(self._pod)}-{path.name}")  # noqa: S108 - named after a random uid
            real.mkdir(mode=0o700, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(real)
        self._tmpfs.append(path)

    async def _files(self, volume: Json) -> dict[str, FileContent]:
        if "projected" in volume:
            projected = volume["projected"]
            mode = _mode(projected)
            files: dict[str, FileContent] = {}
            for source in projected.get("sources") or []:
                files |= await self._source(source, mode, volume["name"])
            return files
        for key in ("configMap", "secret", "downwardAPI"):
            if key in volume:
                source = volume[key]
                if key == "secret":
                    source = {**source, "name": source["secretName"]}
                return await self._source({key: source}, _mode(source), volume["name"])
        raise VolumeError(f"volume {volume['name']} is of a kind that this node does not have")

    async def _source(self, source: Json, mode: int, volume: str) -> dict[str, FileContent]:
        if "serviceAccountToken" in source:
            return await self._token(source["serviceAccountToken"], mode, volume)
        if "downwardAPI" in source:
            return self._downward(source["downwardAPI"].get("items") or [], mode)
        for key, plural, kind in (("configMap", "configmaps", "configmap"), ("secret", "secrets", "secret")):
            if key in source:
                reference = source[key]
                wanted, optional = reference["name"], bool(reference.get("optional"))
                space = namespace(self._pod)
                found = await self.cache.use(plural, space, wanted, uid(self._pod), self.changed.set)
                if found is None:
                    if optional:
                        return {}
                    raise VolumeError(f'MountVolume.SetUp failed for volume "{volume}" : {kind} "{wanted}" not found')
                what = f"{kind} {space}/{wanted}"
                return config_data.select(
                    config_data.decode(found, plural), reference.get("items"), mode, optional, what
                )
        raise VolumeError(f"volume {volume} has a source that this node does not have: {', '.join(source)}")

    async def _token(self, source: Json, mode: int, volume: str) -> dict[str, FileContent]:
        key = f"{volume}/{source['path']}"
        token = self._tokens.get(key)
        if token is None:
            token = self._tokens[key] = TokenSource(self.api, self._pod, source)
        context = self._pod["spec"].get("securityContext") or {}
        if context.get("fsGroup") is not None:
            mode = 0o640  # regardless of defaultMode, as with a kubelet
        elif context.get("runAsUser") is not None:
            mode = 0o600
        return {source["path"]: FileContent((await token.get()).encode(), mode)}

    def _downward(self, items: list[Json], mode: int) -> dict[str, FileContent]:
        facts = self.facts()
        files = {}
        for item in items:
            if "fieldRef" in item:
                text = downward_api.field(facts, item["fieldRef"]["fieldPath"])
            else:
                text = downward_api.resource(facts, item["resourceFieldRef"], "")
            files[item["path"]] = FileContent(text.encode(), item.get("mode") or mode)
        return files

    async def _keep_fresh(self) -> None:
        """Write volumes again whenever an object, the pod or a token's age asks for it."""
        while True:
            renewal = min((token.renew_in() for token in self._tokens.values()), default=None)
            await until(self.changed, renewal)
            self.changed.clear()
            for volume in self._pod["spec"].get("volumes") or []:
                if not {"projected", "configMap", "secret", "downwardAPI"} & volume.keys():
                    continue
                try:
                    atomic_writer.write(self.paths[volume["name"]], await self._files(volume))
                except (VolumeError, ApiError, Unreachable, OSError, config_data.MissingKeyError) as error:
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
        # An untyped path that is missing becomes a directory too: container runtimes create it.
        path.mkdir(parents=True, mode=0o755)
    elif kind == "FileOrCreate" and not path.exists():
        path.touch(mode=0o644)
    demands: dict[str, Callable[[int], bool]] = {
        "Directory": stat.S_ISDIR,
        "DirectoryOrCreate": stat.S_ISDIR,
        "File": stat.S_ISREG,
        "FileOrCreate": stat.S_ISREG,
        "Socket": stat.S_ISSOCK,
        "CharDevice": stat.S_ISCHR,
        "BlockDevice": stat.S_ISBLK,
    }
    if kind in demands and not (path.exists() and demands[kind](path.stat().st_mode)):
        raise VolumeError(f"hostPath type check failed: {path} is not a {kind}")
    return path


def _mode(source: Json) -> int:
    value = source.get("defaultMode")
    return config_data.DEFAULT_MODE if value is None else int(value)
