"""Run commands against one cluster and return their output."""

import functools
import json
import os
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.testing.cluster.api_reader import path_of
from tests.testing.suite.timeouts import scaled
from trainium_contract.api_server.errors import ApiError
from trainium_contract.api_server.kubeconfig import find_access
from trainium_devcluster.api_client import ApiClient
from trainium_devcluster.cluster import Cluster

ROOT = Path(__file__).parents[3]


class CommandError(AssertionError):
    """Report a command that failed, with its standard error."""


@dataclass
class Access:
    """One cluster; `settings` are those of the settings file, empty for the development cluster."""

    kind: str
    variables: dict[str, str]
    shared: Path
    settings: dict[str, Any] = field(default_factory=dict)
    devcluster: Cluster | None = None

    @property
    def is_existing(self) -> bool:
        """Return whether the cluster exists before and after the tests."""
        return self.kind == "existing"

    def run(self, *command: str, stdin: str = "", seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command with the cluster's environment, for at most `seconds` on an idle machine."""
        return subprocess.run(
            command,
            input=stdin,
            env=os.environ | self.variables,
            text=True,
            capture_output=True,
            check=False,
            timeout=scaled(seconds),
        )

    def check_output(self, *command: str, stdin: str = "", seconds: float = 60) -> str:
        """Return the standard output of a command; raise CommandError when it fails."""
        done = self.run(*command, stdin=stdin, seconds=seconds)
        if done.returncode != 0:
            raise CommandError(f"{shlex.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str = "", seconds: float = 60) -> str:
        """Return the standard output of kubectl; raise CommandError when it fails."""
        return self.check_output("kubectl", *arguments, stdin=stdin, seconds=seconds)

    def wait(self, what: str, *of: str, seconds: float) -> None:
        """Run `kubectl wait --for=WHAT OF...`."""
        self.kubectl("wait", f"--for={what}", *of, f"--timeout={scaled(seconds):.0f}s", seconds=seconds + 10)

    def helm(self, *arguments: str) -> str:
        """Return the standard output of helm; raise CommandError when it fails."""
        return self.check_output("helm", *arguments, seconds=180)

    @functools.cached_property
    def api(self) -> ApiClient:
        """A client of the API server with the rights of the kubeconfig."""
        access = find_access(None, None, os.environ | self.variables)
        return ApiClient(access, user_agent="tests", seconds=scaled(60))

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return the JSON of `kubectl get ... -o json`, mostly without starting kubectl."""
        path = path_of(arguments)
        if path is not None:
            try:
                return self.api.get(path)
            except ApiError as error:
                raise CommandError(f"get {shlex.join(arguments)}: {error}") from error
        document: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return document
