"""Compilation of a program before a worker joins: a command that writes files as a compiler does, on real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.testing.suite.timeouts import scaled

COMPILE = 'echo "$TRAINIUM_NODES $TRAINIUM_WORLD_SIZE" >>{log}; echo graph >"$NEURON_COMPILE_CACHE_URL/$TRAINIUM_NODES"'


class Node:
    """A node with its own cache folder; all nodes share a volume and the log of what was compiled."""

    def __init__(self, folder: Path, name: str) -> None:
        self.cache, self.log = folder / name, folder / "compiled.log"
        self._folder = folder

    def start(self, script: str = COMPILE, **fields: Any) -> "subprocess.Popen[str]":
        command = ["sh", "-c", script.format(log=self.log)]
        program = {"image": "i", "command": ["train"], "precompile": {"command": command, **fields}}
        variables = {
            "TRAINIUM_PROGRAM": json.dumps(program),
            "TRAINIUM_COMPILE_CACHE": str(self.cache),
            "NEURON_COMPILE_CACHE_URL": str(self.cache),
            "TRAINIUM_SHARED_COMPILE_CACHE": str(self._folder / "shared"),
            "TRAINIUM_TERMINATION_LOG": str(self._folder / "termination"),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "trainium_agent.precompile", "--sizes", "2,1", "--cores-per-node", "4"],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str = COMPILE, **fields: Any) -> tuple[int, str]:
        process = self.start(script, **fields)
        errors = process.communicate(timeout=scaled(60))[1]
        return process.returncode, errors

    @property
    def compiled(self) -> list[str]:
        return self.log.read_text().splitlines()


def test_each_size_is_compiled_once_for_all_nodes(tmp_path: Path) -> None:
    first, second = Node(tmp_path, "a"), Node(tmp_path, "b")
    processes = [node.start() for node in (first, second)]
    for process in processes:
        process.communicate(timeout=scaled(60))
        assert process.returncode == 0
    assert sorted(first.compiled) == ["1 4", "2 8"]
    for node in (first, second):
        assert [(node.cache / size).read_text() for size in ("1", "2")] == ["graph\n"] * 2
    assert first.run()[0] == 0
    assert len(first.compiled) == 2, "a container that starts again compiles nothing again"


def test_another_command_is_compiled_again(tmp_path: Path) -> None:
    node = Node(tmp_path, "a")
    node.run()
    node.run(f"{COMPILE}; true")
    assert len(node.compiled) == 4


@pytest.mark.parametrize(
    ("script", "fields", "sentence"),
    [
        (
            "echo Traceback; echo 'ValueError: no shape (4096,)' >&2; exit 3",
            {},
            "ended with code 3 at 2 nodes: ValueError: no shape (4096,)",
        ),
        ("exit 1", {}, "ended with code 1 at 2 nodes: it wrote nothing"),
        ("while :; do echo x; done", {"timeoutSeconds": 1}, "has not ended after 1 s at 2 nodes: raise timeoutSeconds"),
        ("trap '' TERM; sleep 300 & wait", {"timeoutSeconds": 1}, "has not ended after 1 s at 2 nodes"),
    ],
    ids=["error", "silent", "endless output", "ignores signals"],
)
def test_a_command_that_fails_or_does_not_end_is_a_sentence(
    tmp_path: Path, script: str, fields: dict[str, Any], sentence: str
) -> None:
    node = Node(tmp_path, "a")
    code, errors = node.run(script, **fields)
    assert code == 64
    assert f"program.precompile.command {sentence}" in errors
    assert not (tmp_path / "shared" / "keys").exists(), "nothing is shared"


def test_a_command_that_leaves_a_process_ends_it(tmp_path: Path) -> None:
    node, pid = Node(tmp_path, "a"), tmp_path / "pid"
    assert node.run(f"sleep 300 & echo $! >{pid}")[0] == 0
    assert not Path("/proc", pid.read_text().strip()).exists()


def test_a_stopped_container_gives_its_lease_back(tmp_path: Path) -> None:
    node, started = Node(tmp_path, "a"), tmp_path / "started"
    process = node.start(f"touch {started}; sleep 300")
    deadline = time.monotonic() + scaled(30)
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=scaled(30))
    assert process.returncode == 75
    assert not [*(tmp_path / "shared" / "locks").iterdir()]
