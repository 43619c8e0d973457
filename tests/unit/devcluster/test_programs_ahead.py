"""Concurrent builds of programs: real processes, with a fake Go, pip and interpreter that record calls and wait.

A fake waits for a file that another process writes, so that a test passes only when both ran at the same time.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.testing.suite.timeouts import until
from trainium_devcluster.binaries.cache import Origin, ensure_binaries
from trainium_devcluster.errors import ClusterError

ROOT = Path(__file__).parents[3]
GO = """#!/bin/sh
# The arguments of the real program. It records its events in $BOOK, one file for each.
await() { for _ in $(seq 600); do [ -e "$BOOK/$1" ] && return; sleep 0.05; done; echo "no $1" >&2; exit 9; }
case "$PWD" in */helm) module=helm ;; *) module=control-plane ;; esac
event=$1-$module
case $1 in
    version) echo go version go1.26.6 linux/amd64; exit ;;
    list) echo "go: downloading example.org/$module v1.0.0" >&2; echo example.org/a; echo example.org/b ;;
    build) echo "example.org/a" >&2 ;;
esac
{ echo "$@"; echo "$CGO_ENABLED $GOFLAGS $GOWORK"; } >"$BOOK/$event"
[ -e "$BOOK/$event-waits-for" ] && await "$(cat "$BOOK/$event-waits-for")"
[ -e "$BOOK/fail-$event" ] && { echo "$module.go:7: undefined: x" >&2; exit 1; }
if [ -e "$BOOK/stay-$event" ]; then sleep 600 & echo $! >"$BOOK/child"; wait; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && { printf '#!/bin/sh\\n' >"$2"; chmod +x "$2"; }; shift; done
touch "$BOOK/$event-ended"
"""
PYTHON = """#!/bin/sh
# The interpreter of a virtual environment, of which pip only waits: $BOOK/pip-waits-for.
case "$*" in
    "-m trainium_devcluster"*) exec "$REAL_PYTHON" -S "$@" ;;
    *"-r constraints.txt"*)
        touch "$BOOK/pip"
        for _ in $(seq 600); do [ -e "$BOOK/$(cat "$BOOK/pip-waits-for")" ] && break; sleep 0.05; done
        [ ! -e "$BOOK/fail-pip" ] || exit 3
        touch "$BOOK/pip-ended" ;;
esac
"""


@pytest.fixture(autouse=True)
def _ctrl_c_is_handled() -> Iterator[None]:
    """Handle Ctrl-C, which tests in the background ignore: no shell can handle what its parent ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the programs on PATH record what they do."""
    folder = tmp_path / "book"
    folder.mkdir()
    write_executable(tmp_path / "path" / "go", GO)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("BOOK", str(folder))
    monkeypatch.setenv("REAL_PYTHON", sys.executable)
    monkeypatch.setenv("TRAINIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINIUM_BINARIES", "build")
    return folder


def write_executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def has_ended(pid: int) -> bool:
    """Return whether a process does not exist or is a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def prepare(book: Path) -> subprocess.Popen[str]:
    """Start the build as `scripts/setup.sh` does, without site packages."""
    command = [sys.executable, "-S", "-m", "trainium_devcluster.binaries"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "devcluster")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_sources_of_the_next_program_are_fetched_while_one_is_compiled(book: Path, tmp_path: Path) -> None:
    (book / "build-control-plane-waits-for").write_text("list-helm-ended")
    lines: list[str] = []
    found = ensure_binaries(root=tmp_path / "cache", origin=Origin.BUILD, write=lines.append)
    assert sorted(path.name for path in found.folder.iterdir()) == [
        "control-plane", "etcd", "helm", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl",
    ]  # fmt: skip
    assert [line for line in lines if "..." not in line and "done" not in line] == [
        "[1/4] fetching the sources of etcd, the Kubernetes control plane and kubectl",
        "[2/4] building etcd, the Kubernetes control plane and kubectl from source (minutes the first time)",
        "[3/4] fetching the sources of helm",
        "[4/4] building helm from source (minutes the first time)",
    ]
    asked, environment = (book / "build-helm").read_text().splitlines()
    assert asked.startswith("build -v -trimpath -buildvcs=false -ldflags -s -w -X helm.sh/helm")
    assert environment == "0  off"


def test_a_failed_build_has_the_lines_of_go_and_ends_the_concurrent_fetch(book: Path, tmp_path: Path) -> None:
    (book / "stay-list-helm").touch()
    (book / "build-control-plane-waits-for").write_text("child")
    (book / "fail-build-control-plane").touch()
    with pytest.raises(ClusterError) as caught:
        ensure_binaries(root=tmp_path / "cache", origin=Origin.BUILD, write=lambda _: None)
    assert str(caught.value) == (
        "Building etcd, the Kubernetes control plane and kubectl failed; its last lines:\n"
        "control-plane.go:7: undefined: x"
    )
    assert not list((tmp_path / "cache").rglob("*.build"))
    until(lambda: has_ended(int((book / "child").read_text())), "every process has ended")


def test_sources_that_cannot_be_fetched_are_an_error(book: Path, tmp_path: Path) -> None:
    (book / "fail-list-control-plane").touch()
    with pytest.raises(ClusterError, match=r"The sources of etcd, .* could not be fetched; its last lines:\ncontrol"):
        ensure_binaries(root=tmp_path / "cache", origin=Origin.BUILD, write=lambda _: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_go_and_its_children_with_an_error(book: Path, number: signal.Signals) -> None:
    (book / "stay-build-control-plane").touch()
    with prepare(book) as process:
        until((book / "child").exists, "the build starts")
        until((book / "child").read_text, "the build starts")
        process.send_signal(number)
        _, output = process.communicate(timeout=30)
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith("error: The programs of the development cluster are not all there: their")
    until(lambda: has_ended(int((book / "child").read_text())), "every process has ended")


def test_a_second_checkout_waits_for_the_first_and_builds_nothing(book: Path) -> None:
    (book / "build-control-plane-waits-for").write_text("go-on")
    with prepare(book) as first:
        until((book / "build-control-plane").exists, "the build starts")
        with prepare(book) as second:
            assert second.stderr is not None
            assert "waiting for another process that prepares the programs" in second.stderr.readline()
            (book / "go-on").touch()
            shown, output = second.communicate(timeout=30)
        _, lines = first.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "building" in lines
    assert "building" not in output
    assert Path(shown.strip(), "kube-apiserver").exists()


def test_leftovers_of_a_killed_build_are_removed_by_the_next(book: Path, tmp_path: Path) -> None:
    folder = ensure_binaries(root=tmp_path / "cache", origin=Origin.BUILD, write=lambda _: None).folder
    (folder / "helm").unlink()
    left = folder / ".helm.12.build"
    left.touch()
    ensure_binaries(root=tmp_path / "cache", origin=Origin.BUILD, write=lambda _: None)
    assert (folder / "helm").exists()
    assert not left.exists()


@pytest.fixture
def checkout(tmp_path: Path, book: Path) -> Path:
    """Return a copy of the files that `scripts/setup.sh` reads, with an existing virtual environment."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    shutil.copytree(ROOT / "devcluster", folder / "devcluster", ignore=shutil.ignore_patterns("__pycache__"))
    write_executable(folder / ".venv/bin/python", PYTHON)
    return folder


def set_up(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    # In its own group, as a terminal or make would signal it.
    return subprocess.Popen(
        ["sh", "scripts/setup.sh", ".venv", *arguments],
        cwd=checkout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def test_a_new_machine_builds_programs_while_it_installs_packages(book: Path, checkout: Path, tmp_path: Path) -> None:
    (book / "pip-waits-for").write_text("build-control-plane")
    (book / "build-control-plane-waits-for").write_text("pip-ended")
    with set_up(checkout, "ahead") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert (checkout / ".venv/.complete").exists()
    assert (book / "build-helm-ended").exists(), output
    assert output.splitlines()[-1].endswith("setup: done")
    assert not (book / "list-kwok").exists()


def test_setup_alone_builds_no_programs(book: Path, checkout: Path) -> None:
    (book / "pip-waits-for").write_text("pip")
    with set_up(checkout) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert not (book / "list-control-plane").exists()


def test_a_failed_build_does_not_stop_the_installation_of_packages(book: Path, checkout: Path) -> None:
    (book / "pip-waits-for").write_text("list-control-plane")
    (book / "fail-list-control-plane").touch()
    with set_up(checkout, "ahead") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "error: The sources of etcd" in output
    assert "they are tried again when needed" in output
    assert (checkout / ".venv/.complete").exists()


def test_a_failed_installation_ends_the_build(book: Path, checkout: Path) -> None:
    (book / "pip-waits-for").write_text("child")
    (book / "fail-pip").touch()
    (book / "stay-build-control-plane").touch()
    with set_up(checkout, "ahead") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert not (checkout / ".venv/.complete").exists()
    until(lambda: has_ended(int((book / "child").read_text())), "every process has ended")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_installation_and_build(book: Path, checkout: Path, number: signal.Signals) -> None:
    (book / "pip-waits-for").write_text("never")
    (book / "stay-build-control-plane").touch()
    with set_up(checkout, "ahead") as process:
        until((book / "child").exists, "the build starts")
        until((book / "pip").exists, "pip starts")
        until((book / "child").read_text, "the build starts")
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 3
        os.killpg(process.pid, number)
        process.communicate(timeout=30)
    assert process.returncode != 0
    until(lambda: has_ended(int((book / "child").read_text())), "every process has ended")
    until(lambda: not any(each.is_running() for each in started), f"{started} have ended")


@pytest.mark.parametrize(
    ("target", "asked"),
    [
        ("demo", "ahead"),
        ("test", "ahead --fleet"),
        ("test-long", "ahead --kueue"),
        ("check", "ahead --helm"),
        ("setup", ""),
        ("test-fast", ""),
    ],
)
def test_each_make_target_prepares_its_programs(target: str, asked: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, text=True, capture_output=True, check=True, timeout=30)
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("scripts/setup.sh")]
    assert line.split()[2:] == asked.split()
