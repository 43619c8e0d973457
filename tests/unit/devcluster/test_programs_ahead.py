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

from tests.testing.suite.processes import has_ended
from tests.testing.suite.timeouts import until
from trainium_devcluster.binaries.cache import ensure_binaries
from trainium_devcluster.errors import ClusterError

ROOT = Path(__file__).parents[3]
GO = """#!/bin/sh
# Accepts the arguments of the real program and writes one file in $EVENTS for each event.
await() { for _ in $(seq 600); do [ -e "$EVENTS/$1" ] && return; sleep 0.05; done; echo "no $1" >&2; exit 9; }
case "$PWD" in */helm) module=helm ;; *) module=control-plane ;; esac
event=$1-$module
case $1 in
    version) echo go version go1.26.6 linux/amd64; exit ;;
    list) echo "go: downloading example.org/$module v1.0.0" >&2; echo example.org/a; echo example.org/b ;;
    build) echo "example.org/a" >&2 ;;
esac
{ echo "$@"; echo "$CGO_ENABLED $GOFLAGS $GOWORK"; } >"$EVENTS/$event"
[ -e "$EVENTS/$event-waits-for" ] && await "$(cat "$EVENTS/$event-waits-for")"
[ -e "$EVENTS/fail-$event" ] && { echo "$module.go:7: undefined: x" >&2; exit 1; }
if [ -e "$EVENTS/stay-$event" ]; then sleep 600 & echo $! >"$EVENTS/child"; wait; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && { printf '#!/bin/sh\\n' >"$2"; chmod +x "$2"; }; shift; done
touch "$EVENTS/$event-ended"
"""
PYTHON = """#!/bin/sh
# The interpreter of a virtual environment, whose pip only waits for $EVENTS/pip-waits-for.
case "$*" in
    "-m trainium_devcluster"*) exec "$REAL_PYTHON" -S "$@" ;;
    *"-r constraints.txt"*)
        touch "$EVENTS/pip"
        for _ in $(seq 600); do [ -e "$EVENTS/$(cat "$EVENTS/pip-waits-for")" ] && break; sleep 0.05; done
        [ ! -e "$EVENTS/fail-pip" ] || exit 3
        touch "$EVENTS/pip-ended" ;;
esac
"""


@pytest.fixture(autouse=True)
def _handle_sigint() -> Iterator[None]:
    """Handle SIGINT: a shell cannot handle a signal that its parent ignores, as tests in the background do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fake programs on PATH; return the folder with a file for each of their events."""
    folder = tmp_path / "events"
    folder.mkdir()
    write_executable(tmp_path / "path" / "go", GO)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("EVENTS", str(folder))
    monkeypatch.setenv("REAL_PYTHON", sys.executable)
    monkeypatch.setenv("TRAINIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINIUM_BINARIES", "build")
    return folder


def write_executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def start_build() -> subprocess.Popen[str]:
    """Start the build as `scripts/setup.sh` does, without site packages."""
    command = [sys.executable, "-S", "-m", "trainium_devcluster.binaries"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "devcluster")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_sources_of_the_next_program_are_fetched_while_one_is_compiled(events: Path, tmp_path: Path) -> None:
    (events / "build-control-plane-waits-for").write_text("list-helm-ended")
    lines: list[str] = []
    binaries = ensure_binaries(report=lines.append)
    assert sorted(path.name for path in binaries.folder.iterdir()) == [
        "control-plane", "etcd", "helm", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl",
    ]  # fmt: skip
    assert [line for line in lines if "..." not in line and "done" not in line] == [
        "[1/4] fetching the sources of etcd, the Kubernetes control plane and kubectl",
        "[2/4] building etcd, the Kubernetes control plane and kubectl from source (minutes the first time)",
        "[3/4] fetching the sources of helm",
        "[4/4] building helm from source (minutes the first time)",
    ]
    arguments, environment = (events / "build-helm").read_text().splitlines()
    assert arguments.startswith("build -v -trimpath -buildvcs=false -ldflags -s -w -X helm.sh/helm")
    assert environment == "0  off"


def test_a_failed_build_has_the_lines_of_go_and_ends_the_concurrent_fetch(events: Path, tmp_path: Path) -> None:
    (events / "stay-list-helm").touch()
    (events / "build-control-plane-waits-for").write_text("child")
    (events / "fail-build-control-plane").touch()
    with pytest.raises(ClusterError) as caught:
        ensure_binaries(report=lambda _: None)
    assert str(caught.value) == (
        "Building etcd, the Kubernetes control plane and kubectl failed; its last lines:\n"
        "control-plane.go:7: undefined: x"
    )
    assert not list((tmp_path / "cache").rglob("*.build"))
    until(lambda: has_ended(int((events / "child").read_text())), "every process has ended")


def test_sources_that_cannot_be_fetched_are_an_error(events: Path, tmp_path: Path) -> None:
    (events / "fail-list-control-plane").touch()
    with pytest.raises(ClusterError, match=r"The sources of etcd, .* could not be fetched; its last lines:\ncontrol"):
        ensure_binaries(report=lambda _: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_go_and_its_children_with_an_error(events: Path, number: signal.Signals) -> None:
    (events / "stay-build-control-plane").touch()
    with start_build() as process:
        until(lambda: (events / "child").exists() and (events / "child").read_text(), "the build starts")
        process.send_signal(number)
        _, output = process.communicate(timeout=30)
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith("error: The programs of the development cluster are not all there: their")
    until(lambda: has_ended(int((events / "child").read_text())), "every process has ended")


def test_a_second_checkout_waits_for_the_first_and_builds_nothing(events: Path) -> None:
    (events / "build-control-plane-waits-for").write_text("may-end")
    with start_build() as first:
        until((events / "build-control-plane").exists, "the build starts")
        with start_build() as second:
            assert second.stderr is not None
            assert "waiting for another process that prepares the programs" in second.stderr.readline()
            (events / "may-end").touch()
            folder, output = second.communicate(timeout=30)
        _, lines = first.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "building" in lines
    assert "building" not in output
    assert Path(folder.strip(), "kube-apiserver").exists()


def test_leftovers_of_a_killed_build_are_removed_by_the_next(events: Path, tmp_path: Path) -> None:
    folder = ensure_binaries(report=lambda _: None).folder
    (folder / "helm").unlink()
    leftover = folder / ".helm.12.build"
    leftover.touch()
    ensure_binaries(report=lambda _: None)
    assert (folder / "helm").exists()
    assert not leftover.exists()


@pytest.fixture
def checkout(tmp_path: Path, events: Path) -> Path:
    """Return a copy of the files that `scripts/setup.sh` reads, with an existing virtual environment."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    shutil.copytree(ROOT / "devcluster", folder / "devcluster", ignore=shutil.ignore_patterns("__pycache__"))
    write_executable(folder / ".venv/bin/python", PYTHON)
    return folder


def start_setup(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    # A terminal or make signals the whole process group.
    return subprocess.Popen(
        ["sh", "scripts/setup.sh", ".venv", *arguments],
        cwd=checkout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run_setup(checkout: Path, *arguments: str, code: int = 0) -> str:
    """Run `scripts/setup.sh` until it exits with this code; return its output."""
    with start_setup(checkout, *arguments) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    return output


def test_a_new_machine_builds_programs_while_it_installs_packages(events: Path, checkout: Path, tmp_path: Path) -> None:
    (events / "pip-waits-for").write_text("build-control-plane")
    (events / "build-control-plane-waits-for").write_text("pip-ended")
    output = run_setup(checkout, "with-binaries")
    assert (checkout / ".venv/.complete").exists()
    assert (events / "build-helm-ended").exists(), output
    assert output.splitlines()[-1].endswith("setup: done")
    assert not (events / "list-kwok").exists()


def test_setup_alone_builds_no_programs(events: Path, checkout: Path) -> None:
    (events / "pip-waits-for").write_text("pip")
    run_setup(checkout)
    assert not (events / "list-control-plane").exists()


def test_a_failed_build_does_not_stop_the_installation_of_packages(events: Path, checkout: Path) -> None:
    (events / "pip-waits-for").write_text("list-control-plane")
    (events / "fail-list-control-plane").touch()
    output = run_setup(checkout, "with-binaries")
    assert "error: The sources of etcd" in output
    assert "the build is retried when needed" in output
    assert (checkout / ".venv/.complete").exists()


def test_a_failed_installation_ends_the_build(events: Path, checkout: Path) -> None:
    (events / "pip-waits-for").write_text("child")
    (events / "fail-pip").touch()
    (events / "stay-build-control-plane").touch()
    run_setup(checkout, "with-binaries", code=3)
    assert not (checkout / ".venv/.complete").exists()
    until(lambda: has_ended(int((events / "child").read_text())), "every process has ended")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_installation_and_build(events: Path, checkout: Path, number: signal.Signals) -> None:
    (events / "pip-waits-for").write_text("never")
    (events / "stay-build-control-plane").touch()
    with start_setup(checkout, "with-binaries") as process:
        until((events / "child").exists, "the build starts")
        until((events / "pip").exists, "pip starts")
        until((events / "child").read_text, "the build starts")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        os.killpg(process.pid, number)
        process.communicate(timeout=30)
    assert process.returncode != 0
    until(lambda: has_ended(int((events / "child").read_text())), "every process has ended")
    until(lambda: not any(process.is_running() for process in children), f"{children} have ended")


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("demo", "with-binaries"),
        ("test", "with-binaries --fleet"),
        ("test-long", "with-binaries --kueue"),
        ("check", "with-binaries --helm"),
        ("setup", ""),
        ("test-fast", ""),
    ],
)
def test_each_make_target_prepares_its_programs(target: str, arguments: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, text=True, capture_output=True, check=True, timeout=30)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("scripts/setup.sh")]
    assert line.split()[2:] == arguments.split()
