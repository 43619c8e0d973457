"""Start the supervisor of a new cluster.

Of two simultaneous starts with one name, one succeeds and the other gets an error; neither removes files of the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_devcluster.control_socket import accepts_requests
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.processes.cleanup import end_leftovers, remove_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_devcluster.state import ClusterPaths, ClusterSpec

_SECONDS = 30.0


@contextlib.contextmanager
def reserve_name(paths: ClusterPaths) -> Iterator[None]:
    """Reserve a name until its supervisor holds the cluster's lock; remove the leftovers of a dead cluster."""
    try:
        paths.root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One lock for all names, because it is held for a fraction of a second only.
        with (paths.root.parent / ".starting").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if paths.is_running():
                raise ClusterError(f"Cluster {paths.name!r} already runs; stop it first or choose another name.")
            if paths.root.exists():
                end_leftovers(paths)
                remove_folder(paths.root)
            yield
    except OSError as error:
        raise ClusterError(
            f"The folder {paths.root} cannot be used ({error}); set XDG_STATE_HOME to another."
        ) from error


def launch_supervisor(
    spec: ClusterSpec, paths: ClusterPaths, binaries: Path, venv_bin: Path | None, *, detached: bool, keep_files: bool
) -> subprocess.Popen[bytes]:
    """Start the supervisor and wait until it accepts requests; raises ClusterError after 30 s."""
    paths.logs.mkdir(parents=True, mode=0o700)
    paths.root.chmod(0o700)
    paths.spec.write_text(spec.to_json())
    if keep_files:
        paths.keep.touch()
    paths.control_socket.unlink(missing_ok=True)
    bin_folder = (venv_bin or Path(sys.executable).parent).absolute()
    command = [sys.executable, "-m", "trainium_devcluster.supervisor", "--root", str(paths.root)]
    command += ["--binaries", str(binaries), "--venv-bin", str(bin_folder)]
    if not detached:
        command.append("--owned")
    log = paths.logs / "supervisor.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _SECONDS
    while not accepts_requests(paths.control_socket):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
            lines = log.read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else f"{log} is empty"
            raise ClusterError(f"The supervisor of cluster {spec.name!r} did not start: {last}")
        time.sleep(0.02)
    return process
