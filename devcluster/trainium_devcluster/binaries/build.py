"""Build programs from the pinned Go modules beside this package, for machines that reach no release host.

Guarantees:
- One multi-call file serves etcd, the Kubernetes components and kubectl, linked under each name.
- Versions and checksums of every dependency come from `go.mod` and `go.sum`, or the pair of another Kubernetes.
- Flags are fixed so that checkouts share Go's build cache.
- One module is compiled at a time, on all processors, while the sources of the next are fetched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_devcluster.binaries.catalog import (
    CLUSTER_PROGRAMS,
    HELM_VERSION,
    KUEUE_VERSION,
    VERSITYGW_VERSION,
    KubernetesVersion,
    Program,
)
from trainium_devcluster.binaries.toolchain import Go, find_go
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_devcluster.binaries.go_command import GoCommand
    from trainium_devcluster.progress import ProgressLines

_COMPONENT_VERSION = "k8s.io/component-base/version"
_BUILD_SECONDS = 3600.0
_FETCH_SECONDS = 1200.0
_LIST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Source:
    """One Go module and the programs built from it."""

    label: str
    folder: str
    """Folder of the module, relative to the parent folder of this package."""
    programs: tuple[Program, ...]
    file: str
    package: str = "."
    variables: tuple[tuple[str, str], ...] = ()
    """Variables that the linker sets: the version that the program reports."""
    files: tuple[str, str] | None = None
    """A module and its folder that is copied beside the program, under the folder's last name."""
    modules: str = "go.mod"
    """The file of `folder` with the pinned modules."""

    def build_command(self, go: Go, verb: str, *arguments: str) -> GoCommand:
        """Return a command of Go in the folder of the module, with its pinned modules."""
        pins = () if self.modules == "go.mod" else (f"-modfile={self.modules}",)
        return go.build_command(verb, *pins, *arguments, folder=find_module_root() / self.folder)


def build_source(kubernetes: KubernetesVersion) -> Source:
    """Return the source of the control plane of a version."""
    major, minor = kubernetes.minor.split(".")
    return Source(
        label="etcd, the Kubernetes control plane and kubectl",
        folder=".",
        file="control-plane",
        programs=tuple(sorted(CLUSTER_PROGRAMS - {Program.HELM})),
        variables=(
            (f"{_COMPONENT_VERSION}.gitVersion", f"v{kubernetes.number}"),
            (f"{_COMPONENT_VERSION}.gitMajor", major),
            (f"{_COMPONENT_VERSION}.gitMinor", minor),
        ),
        modules=kubernetes.modules,
    )


def _build_program_source(label: str, folder: str, program: Program, **fields: Any) -> Source:
    """Return the source of one program."""
    return Source(label=label, folder=folder, programs=(program,), file=program, **fields)


_OTHER_SOURCES = (
    _build_program_source(
        "helm",
        "helm",
        Program.HELM,
        package="helm.sh/helm/v4/cmd/helm",
        variables=(("helm.sh/helm/v4/internal/version.version", f"v{HELM_VERSION}"),),
    ),
    _build_program_source("kwok", "kwok", Program.KWOK, package="sigs.k8s.io/kwok/cmd/kwok"),
    _build_program_source(
        "Kueue",
        "kueue",
        Program.KUEUE,
        package="sigs.k8s.io/kueue/cmd/kueue",
        variables=(("sigs.k8s.io/kueue/pkg/version.GitVersion", f"v{KUEUE_VERSION}"),),
        files=("sigs.k8s.io/kueue", "config/components"),
    ),
    _build_program_source(
        "versitygw",
        "versitygw",
        Program.VERSITYGW,
        package="github.com/versity/versitygw/cmd/versitygw",
        variables=(("main.Version", f"v{VERSITYGW_VERSION}"),),
    ),
    _build_program_source("the check of definitions", "definition", Program.CHECK_DEFINITION),
    _build_program_source(
        "the check of definitions by the newest Kubernetes",
        "definition",
        Program.CHECK_NEWEST_DEFINITION,
        modules="newest.mod",
    ),
)


def list_sources(kubernetes: KubernetesVersion) -> tuple[Source, ...]:
    """Return all sources, with the control plane of this version first."""
    return (build_source(kubernetes), *_OTHER_SOURCES)


def find_module_root() -> Path:
    """Return the folder of the pinned Go modules; raises ClusterError when only the Python package is installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "go.mod").is_file():
        raise ClusterError(
            f"The Go modules of the development cluster are not at {root}: run it from a checkout of the repository, "
            "or on a machine that reaches the official release hosts."
        )
    return root


def build_all(
    sources: Sequence[Source], programs: frozenset[Program], target: Path, tools: Path, progress: ProgressLines
) -> None:
    """Build the modules in order and link those in `programs` into `target`; raises ClusterError with Go's message.

    Built modules remain when a later one fails.
    """
    find_module_root()  # missing files are reported before the search for Go
    go = find_go(tools, progress)
    with contextlib.ExitStack() as running:
        fetch = _fetch(go, sources[0], running)
        for number, source in enumerate(sources):
            later = sources[number + 1 :]
            packages = _wait_for_sources(fetch, source, progress)
            if later:
                fetch = _fetch(go, later[0], running)
            with _create_staging_file(target, source) as staging:
                following = ", ".join(later_source.label for later_source in later)
                _compile(go, source, staging, progress, packages, following)
                _copy_files(go, source, target)
                staging.replace(target / source.file)
            _link(source, programs, target)


def _fetch(go: Go, source: Source, running: contextlib.ExitStack) -> GoCommand:
    """Start Go, which downloads the modules of the package and prints their names; `running` ends it."""
    fetch = running.push(source.build_command(go, "list", "-deps", "-f", "{{.ImportPath}}", source.package))
    return fetch.__enter__()  # `running` ends it


def _wait_for_sources(fetch: GoCommand, source: Source, progress: ProgressLines) -> int:
    """Return the number of packages of the program, once they are downloaded."""
    try:
        with progress.step(f"fetching the sources of {source.label}", describe_progress=fetch.format_downloaded):
            if not fetch.wait_for_success(_FETCH_SECONDS):
                raise ClusterError(
                    f"The sources of {source.label} could not be fetched; its last lines:\n{fetch.read_last_errors()}"
                )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"The sources of {source.label} were not here after {_FETCH_SECONDS:.0f} s.") from None
    return len(fetch.read_output().splitlines())


def _compile(go: Go, source: Source, staging: Path, progress: ProgressLines, packages: int, following: str) -> None:
    flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in source.variables)])
    options = ("-v", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", str(staging))
    run = source.build_command(go, "build", *options, source.package)

    def describe_progress() -> str:
        return f"{run.packages:,} of {packages:,} packages" if run.packages else ""

    label = f"building {source.label} from source (minutes the first time)"
    try:
        with run, progress.step(label, describe_progress=describe_progress, then=following):
            if not run.wait_for_success(_BUILD_SECONDS):
                raise ClusterError(f"Building {source.label} failed; its last lines:\n{run.read_last_errors()}")
    except subprocess.TimeoutExpired:
        raise ClusterError(f"Building {source.label} took more than {_BUILD_SECONDS:.0f} s and was stopped.") from None


@contextlib.contextmanager
def _create_staging_file(target: Path, source: Source) -> Iterator[Path]:
    """Yield a file for Go's output, after removing those of killed processes: only one process fills the folder."""
    for leftover in target.glob(f".{source.file}.*.build"):
        leftover.unlink(missing_ok=True)
    staging = target / f".{source.file}.{os.getpid()}.build"
    try:
        yield staging
    finally:
        staging.unlink(missing_ok=True)


def _link(source: Source, programs: frozenset[Program], target: Path) -> None:
    for program in sorted(programs & set(source.programs)):
        if program.value != source.file:
            link = target / f".{program}.{os.getpid()}.link"
            link.unlink(missing_ok=True)
            link.symlink_to(source.file)
            link.replace(target / program)


def _copy_files(go: Go, source: Source, target: Path) -> None:
    """Copy a folder of a module, which Go verified and unpacked for the build, before the program gets its name."""
    if source.files is None:
        return
    module, path = source.files
    with source.build_command(go, "list", "-m", "-f", "{{.Dir}}", module) as listed:
        if not listed.wait_for_success(_LIST_SECONDS):
            raise ClusterError(
                f"The files of {module} were not found; the last lines of Go:\n{listed.read_last_errors()}"
            )
        unpacked = Path(listed.read_output().strip())
    kept = target / Path(path).name
    shutil.rmtree(kept, ignore_errors=True)
    # The module cache is read-only, folders included, but the copy must be removable.
    for file in sorted((unpacked / path).rglob("*.yaml")):
        copy = kept / file.relative_to(unpacked / path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
