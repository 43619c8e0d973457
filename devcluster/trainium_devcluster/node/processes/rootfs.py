"""Build the file system of a container, in its first process, before that becomes the pod's command.

The machine's own directories are the image: each top-level directory is shown through an overlay whose writable half
lies in the container's scratch directory, so that a pod sees the installed packages, may write anywhere as it may in a
container, and leaves nothing behind. Volumes are bind mounts on top.

Guarantees:
- No file is created outside the scratch directory and the pod's volumes.
- It runs after fork and before exec in a process with one thread.
- It imports only the standard library.
"""
# ruff: noqa: PTH101, PTH102, PTH103, PTH106, PTH110, PTH112, PTH114, PTH115, PTH116, PTH118, PTH120, PTH123, PTH208, PTH211 - plain os calls: this runs in a forked child

import os
import stat
from dataclasses import dataclass, field

from trainium_devcluster.node.processes.command import ContainerCommand, Mount
from trainium_devcluster.node.processes.isolation import Isolation, Namespaces
from trainium_devcluster.processes import syscalls as sc

_OLD = "/.old"
_CREATED_TOP_LEVEL = frozenset({"proc", "sys", "dev", "lost+found"})
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_ACCELERATORS = ("neuron", "nvidia", "infiniband", "dri", "kfd")  # shown when the machine has them
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_MAX_SUBMOUNTS = 64  # a developer's machine may have hundreds of container mounts below /var/lib


@dataclass(slots=True)
class _Layout:
    """The parts of the new root in which files may be created (`writable`), and those of the machine (`shared`)."""

    command: ContainerCommand
    user_namespace: bool
    writable: list[str] = field(default_factory=lambda: ["/"])
    shared: list[str] = field(default_factory=list)

    def is_on_machine(self, path: str) -> bool:
        """Return whether a file created at `path` would be on the machine."""
        covering = [p for p in (*self.writable, *self.shared) if path == p or path.startswith(p.rstrip("/") + "/")]
        return max(covering, key=len) in self.shared


def build(command: ContainerCommand, isolation: Isolation) -> None:
    """Build the file system of `command` and make it this process's root."""
    root = os.path.join(command.scratch, "root")
    os.makedirs(root, exist_ok=True)
    sc.mount("tmpfs", root, "tmpfs", options="mode=755,size=64m")
    layout = _Layout(command, isolation.namespaces is Namespaces.USER)
    submounts = [path for path in _list_submounts() if not path.startswith(command.hidden + "/")]
    for name in sorted(os.listdir("/")):
        if name not in _CREATED_TOP_LEVEL:
            _mount_top_level(root, name, submounts, layout)
    _make_devices(root, layout)
    os.makedirs(root + "/sys")
    sc.bind("/sys", root + "/sys")
    layout.shared.append("/sys")
    os.makedirs(root + "/proc")
    os.makedirs(root + _OLD)
    sc.pivot_root(root, root + _OLD)
    os.chdir("/")
    if isolation.pid_namespace:
        sc.mount("proc", "/proc", "proc")
    else:
        sc.bind(_OLD + "/proc", "/proc")
    layout.shared.append("/proc")
    sc.bind(_OLD + command.shm, "/dev/shm")  # noqa: S108 - the container's own, not the machine's
    if os.path.isdir(command.hidden):
        sc.mount("tmpfs", command.hidden, "tmpfs", options="mode=755,size=64k")
        layout.writable.append(command.hidden)
    for mount in sorted(command.mounts, key=lambda m: m.target.count("/")):
        _mount_volume(mount, layout)
    sc.unmount(_OLD)
    os.rmdir(_OLD)
    if command.read_only_root:
        # A volume hides what is below it, and keeps its mode.
        volumes = [os.path.realpath(mount.target) for mount in command.mounts]
        for path in layout.writable:
            if path != "/dev" and not any(path == volume or path.startswith(volume + "/") for volume in volumes):
                sc.remount_read_only(path)


def _mount_top_level(root: str, name: str, submounts: list[str], layout: _Layout) -> None:
    source, target = "/" + name, f"{root}/{name}"
    mode = os.lstat(source).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
        return
    if not stat.S_ISDIR(mode):
        return
    os.mkdir(target)
    below = [path for path in submounts if path.startswith(source + "/")]
    if len(below) <= _MAX_SUBMOUNTS and _mount_overlay(layout, source, target, name):
        layout.writable.append(source)
        for path in below:
            _mount_submount(root, path, layout)
    else:
        sc.bind(source, target)
        layout.shared.append(source)


def _mount_submount(root: str, path: str, layout: _Layout) -> None:
    try:
        sc.bind(path, root + path)
    except OSError:
        return  # a mount point that this user may not read remains an empty directory
    layout.shared.append(path)


def _mount_overlay(layout: _Layout, source: str, target: str, name: str, old_root: str = "") -> bool:
    """Mount `source` at `target` with a writable layer in the scratch directory; return False if the kernel refuses."""
    upper, work = (os.path.join(old_root + layout.command.scratch, kind, name) for kind in ("upper", "work"))
    for folder in (upper, work):
        os.makedirs(folder, exist_ok=True)
    parent = os.stat(source)
    os.chmod(upper, stat.S_IMODE(parent.st_mode) | stat.S_IRWXU)
    lower, up, wk = (
        path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,") for path in (source, upper, work)
    )
    options = f"lowerdir={lower},upperdir={up},workdir={wk}"
    try:
        sc.mount("overlay", target, "overlay", options=options + (",userxattr" if layout.user_namespace else ""))
    except OSError:
        return False
    return True


def _make_devices(root: str, layout: _Layout) -> None:
    dev = root + "/dev"
    os.mkdir(dev)
    sc.mount("tmpfs", dev, "tmpfs", flags=sc.MS_NOSUID, options="mode=755,size=64k")
    layout.writable.append("/dev")
    extra = [name for name in os.listdir("/dev") if name.startswith(_ACCELERATORS)]
    for name in (*_DEVICES, *extra):
        source, target = f"/dev/{name}", f"{dev}/{name}"
        if not os.path.exists(source):
            continue
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            _touch(target)
        sc.bind(source, target)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    for name in ("shm", "pts"):
        os.mkdir(f"{dev}/{name}")
    if os.path.isdir("/dev/pts"):
        sc.bind("/dev/pts", f"{dev}/pts")


def _mount_volume(mount: Mount, layout: _Layout) -> None:
    source = _OLD + mount.source
    if not os.path.lexists(source):
        raise FileNotFoundError(2, "the source of the mount does not exist", mount.source)
    target = os.path.realpath(mount.target)
    _ensure_target(target, os.path.isdir(source), layout)
    sc.bind(source, target, read_only=mount.read_only)
    layout.writable.append(target)  # a mount point below is created in the volume, as by a container runtime


def _ensure_target(target: str, directory: bool, layout: _Layout) -> None:
    """Create the mount point `target` unless it exists, never on the machine itself."""
    target = os.path.realpath(target)
    if os.path.exists(target):
        return
    parent = target
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if layout.is_on_machine(parent):
        name = "graft-" + parent.strip("/").replace("/", "-")
        if not _mount_overlay(layout, parent, parent, name, _OLD):
            _graft(parent)
        layout.writable.append(parent)
    os.makedirs(target if directory else os.path.dirname(target), exist_ok=True)
    if not directory:
        _touch(target)


def _graft(parent: str) -> None:
    """Replace the directory `parent` by a writable one whose entries are bind mounts of the original entries."""
    original = _OLD + parent
    sc.mount("tmpfs", parent, "tmpfs", options="mode=755,size=16m")
    for name in os.listdir(original):
        source, target = f"{original}/{name}", f"{parent}/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
            continue
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            _touch(target)
        sc.bind(source, target)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _list_submounts() -> list[str]:
    """Return the machine's mount points, only the outermost below each top-level directory."""
    paths: list[str] = []
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            path = line.split(" ")[4].encode().decode("unicode_escape")
            if path.count("/") >= 2 and not any(path.startswith(known + "/") or path == known for known in paths):
                paths.append(path)
    return paths
