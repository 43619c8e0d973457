"""Keep programs in the user's cache folder, filled by download or build.

Guarantees:
- A file under a program's name is complete, because it was renamed there.
- One process at a time fills the folder of a version; others wait for it and use the result.
- A full cache needs no lock and no network.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainium_devcluster.binaries.build import build_all, list_sources
from trainium_devcluster.binaries.catalog import (
    CLUSTER_PROGRAMS,
    Architecture,
    KubernetesVersion,
    Program,
    Release,
    find_architecture,
    find_kubernetes,
    format_version_key,
    release_of,
)
from trainium_devcluster.binaries.download import DownloadError, Limits, UnreachableError, download_program
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.progress import ProgressLines, ReportProgress, hold_lock, print_to_stderr

SOURCE_VARIABLE = "TRAINIUM_BINARIES"
"""Environment variable: `auto` (the default), `download` or `build`."""

ReleaseOf = Callable[[Program, Architecture, KubernetesVersion], Release]


class Origin(StrEnum):
    """The sources of programs that are not in the cache."""

    AUTO = "auto"
    DOWNLOAD = "download"
    BUILD = "build"


@dataclass(frozen=True, slots=True)
class Binaries:
    """A folder with each requested program under its name."""

    folder: Path

    def find_path(self, program: Program) -> Path:
        """Return the file of a program."""
        return self.folder / program


def find_cache_root() -> Path:
    """Return the cache folder: TRAINIUM_CACHE, else trainium-operator under XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("TRAINIUM_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "trainium-operator"


def ensure_binaries(
    *,
    programs: frozenset[Program] = CLUSTER_PROGRAMS,
    kubernetes: str | None = None,
    root: Path | None = None,
    origin: Origin | None = None,
    report: ReportProgress = print_to_stderr,
    releases: ReleaseOf = release_of,
    limits: Limits | None = None,
) -> Binaries:
    """Return the folder with the programs, after adding missing ones; raises ClusterError if that fails.

    `programs` are those of a cluster (the default) or the additional ones of a fleet: each set has a separate folder.
    `kubernetes` is the version of the cluster's programs, by default that of `find_kubernetes`.
    """
    architecture, version = find_architecture(), find_kubernetes(kubernetes)
    root = root or find_cache_root()
    folder = root / "bin" / format_version_key(architecture, programs, version)
    origin = origin or _read_origin()
    if not _find_missing(folder, programs):
        return Binaries(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"The cache folder {folder} cannot be created ({error}); set TRAINIUM_CACHE to another."
        ) from error
    with hold_lock(folder.with_name(f"{folder.name}.lock"), "prepares the programs of the cluster", report):
        missing = _find_missing(folder, programs)
        published = missing & CLUSTER_PROGRAMS
        progress = ProgressLines(len(published), report)
        if published and origin is not Origin.BUILD:
            _download_all(
                published,
                folder,
                release_of=lambda program: releases(program, architecture, version),
                limits=limits or Limits(),
                progress=progress,
            )
            missing = _find_missing(folder, programs)
        if missing and origin is Origin.DOWNLOAD:
            raise ClusterError(
                f"{', '.join(missing)} cannot be downloaded; set {SOURCE_VARIABLE}=build to build from source."
            )
        sources = [source for source in list_sources(version) if missing & set(source.programs)]
        if sources:
            build_all(sources, missing, folder, root / "go", ProgressLines(2 * len(sources), report))
    return Binaries(folder)


def _read_origin() -> Origin:
    value = os.environ.get(SOURCE_VARIABLE) or Origin.AUTO
    try:
        return Origin(value)
    except ValueError:
        raise ClusterError(f"{SOURCE_VARIABLE} is {value!r}; it may be {', '.join(Origin)}.") from None


def is_cached(programs: frozenset[Program]) -> bool:
    """Return whether all programs are cached, so that neither network nor build is needed."""
    key = format_version_key(find_architecture(), programs, find_kubernetes())
    return not _find_missing(find_cache_root() / "bin" / key, programs)


def _find_missing(folder: Path, programs: frozenset[Program]) -> frozenset[Program]:
    return frozenset(program for program in programs if not os.access(folder / program, os.X_OK))


def _download_all(
    missing: frozenset[Program],
    folder: Path,
    *,
    release_of: Callable[[Program], Release],
    limits: Limits,
    progress: ProgressLines,
) -> None:
    """Download the programs that are available; report a failure in one line and skip its host afterwards."""
    dead_hosts: set[str] = set()
    for program in sorted(missing):
        release = release_of(program)
        host = release.url.split("/")[2]
        if host in dead_hosts:
            continue
        try:
            with progress.step(f"downloading {program} {release.version}"):
                download_program(release, folder / program, limits)
        except DownloadError as error:
            progress.log(f"{program} is built from source instead: {error}")
            if isinstance(error, UnreachableError):
                # A machine without network access reaches none of the hosts, so it must not wait for each of them.
                return
            dead_hosts.add(host)
