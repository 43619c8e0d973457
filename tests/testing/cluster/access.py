"""Run commands against one cluster and return their output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.testing.cluster.api_reader import ApiReader, ReadError, path_of
from tests.testing.suite.timeouts import scaled

if TYPE_CHECKING:
    from trainium_devcluster.cluster import Cluster

ROOT = Path(__file__).parents[3]


class CommandError(AssertionError):
    """A kubectl or helm that must succeed did not."""


@dataclass
class Access:
    """One cluster; `settings` are those of the settings file, empty for the development cluster."""

    kind: str
    variables: dict[str, str]
    shared: Path
    settings: dict[str, Any] = field(default_factory=dict)
    cluster: Cluster | None = None
    reader: ApiReader | None = None
    """Given, what tests poll is read without a kubectl each time."""

    @property
    def is_lent(self) -> bool:
        """Whether it is somebody's own cluster, which is there before and after the tests."""
        return self.kind == "existing"

    def run(self, *command: str, stdin: str = "", seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """A command with the cluster's environment; `seconds` on a quiet machine."""
        return subprocess.run(
            command,
            input=stdin,
            env=os.environ | self.variables,
            text=True,
            capture_output=True,
            check=False,
            timeout=scaled(seconds),
        )

    def must(self, *command: str, stdin: str = "", seconds: float = 60) -> str:
        """Standard output of a command that must succeed; raises CommandError."""
        done = self.run(*command, stdin=stdin, seconds=seconds)
        if done.returncode != 0:
            raise CommandError(f"{shlex.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str = "", seconds: float = 60) -> str:
        """Standard output of a kubectl that must succeed."""
        return self.must("kubectl", *arguments, stdin=stdin, seconds=seconds)

    def wait(self, what: str, *of: str, seconds: float) -> None:
        """`kubectl wait --for=WHAT OF...`."""
        self.kubectl("wait", f"--for={what}", *of, f"--timeout={scaled(seconds):.0f}s", seconds=seconds + 10)

    def helm(self, *arguments: str) -> str:
        """Standard output of a helm that must succeed."""
        return self.must("helm", *arguments, seconds=180)

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get ... -o json`."""
        path = path_of(arguments) if self.reader is not None else None
        if self.reader is not None and path is not None:
            try:
                return self.reader.get(path)
            except ReadError as error:
                raise CommandError(f"get {shlex.join(arguments)}: {error}") from error
        document: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return document
