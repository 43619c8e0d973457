"""Temporary files of processes in a container with a read-only root and no volume on /tmp."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainium_contract.temporary_folder import set_temporary_folder

HIDE = (
    "for dir in /tmp /var/tmp; do mount --bind $dir $dir && mount -o remount,ro,bind $dir || exit 77; done; "
    'cd /proc; exec "$0" "$@"'
)
"""A shell command that makes the usual folders read-only for one process."""
PRINT = (
    "import os, tempfile; from trainium_contract.temporary_folder import set_temporary_folder; "
    "set_temporary_folder(os.environ); print(tempfile.gettempdir())"
)


def test_the_cache_of_the_pod_has_temporary_files_where_no_usual_folder_is_writable() -> None:
    cache = Path("/var/cache") / f"trainium-test-{os.getpid()}"
    command = ["unshare", "--mount", "sh", "-c", HIDE, sys.executable, "-c", PRINT]
    environment = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(cache)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode in (1, 77) and "Traceback" not in done.stderr:
            pytest.skip("needs the right to mount in a namespace")
        assert (done.stdout.strip(), done.stderr) == (str(cache / "tmp"), "")
    finally:
        for folder in (cache / "tmp", cache):
            if folder.exists():
                folder.rmdir()


@pytest.mark.parametrize("variables", [{}, {"TMPDIR": "/nowhere"}, {"XDG_CACHE_HOME": "/cache"}])
def test_a_writable_folder_is_kept(variables: dict[str, str]) -> None:
    environment = dict(variables)
    set_temporary_folder(environment)
    assert environment == variables
