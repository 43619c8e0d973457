"""Compute the mounts of a container: its volume mounts, and the files that every container gets.

Guarantees:
- A subPath never leads out of its volume.
- Symlinks in sources are resolved on the machine, not in the container.
- A volume mount at the same path (for instance /etc/hosts) takes precedence.
"""

import os
from pathlib import Path

from trainium_devcluster.node.api.objects import Json
from trainium_devcluster.node.processes.command import Mount
from trainium_devcluster.node.spec.environment import ConfigError

DEFAULT_TERMINATION_LOG = "/dev/termination-log"


def build_volume_mounts(container: Json, volumes: dict[str, Path]) -> list[Mount]:
    """Return the volume mounts of a container.

    Raises:
        ConfigError: for a mount of a volume that the pod does not have, or a subPath that leads out of it.
    """
    mounts = []
    for mount in container.get("volumeMounts") or []:
        if mount["name"] not in volumes:
            raise ConfigError(
                f"volumeMount {mount['mountPath']} names volume {mount['name']!r}, which the pod does not have"
            )
        source = volumes[mount["name"]]
        if sub := mount.get("subPath"):
            source = _resolve_sub_path(source, sub)
        mounts.append(
            Mount(os.path.realpath(source), os.path.normpath(mount["mountPath"]), bool(mount.get("readOnly")))
        )
    return mounts


def _resolve_sub_path(volume: Path, sub: str) -> Path:
    if Path(sub).is_absolute() or ".." in Path(sub).parts:
        raise ConfigError(f"subPath {sub!r} must be relative and without '..'")
    source = volume / sub
    if not source.exists():
        source.mkdir(parents=True, mode=0o755)
    if not source.resolve().is_relative_to(volume.resolve()):
        raise ConfigError(f"subPath {sub!r} leads out of its volume")
    return source


def build_node_files(container: Json, pod_folder: Path, termination_log: Path, occupied: set[str]) -> list[Mount]:
    """Return the files that every container gets from its node, unless a volume is mounted at the same path."""
    mounts = {
        "/etc/hosts": pod_folder / "hosts",
        "/etc/hostname": pod_folder / "hostname",
        "/etc/host.conf": pod_folder / "host.conf",
        container.get("terminationMessagePath") or DEFAULT_TERMINATION_LOG: termination_log,
    }
    return [Mount(str(source), target) for target, source in mounts.items() if target not in occupied]


def write_pod_files(pod_folder: Path, hostname: str) -> None:
    """Write the constant files of `node_files` (the hosts file changes and is written elsewhere)."""
    (pod_folder / "hostname").write_text(hostname + "\n", encoding="utf-8")
    # A name with several addresses must resolve to all of them.
    (pod_folder / "host.conf").write_text("multi on\n", encoding="utf-8")
