"""The version before this one, out of git: its code, its chart, its definition.

`COMMIT` stands for it as long as the repository has no tag of a release. A release moves both: `TAG` to the one before.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.testing.cluster.access import ROOT
from tests.testing.suite.patience import patient

TAG = "v0.1.0"
COMMIT = "2ae9f07d0fcb03fa757d25953548c3f8968b3088"
"""The last one without near batches, sizes that are compiled, Workloads of our own, deadlines, lists of namespaces."""
ENV_REVISION = "TRAINIUM_TEST_PREVIOUS"
"""Another revision in place of both, to try by hand."""


@dataclass(frozen=True, slots=True)
class Previous:
    """A folder with the whole repository as it was."""

    folder: Path
    revision: str

    @property
    def modules(self) -> tuple[Path, ...]:
        """What comes first on the path of a program of that version."""
        rooms = (self.folder / room for room in ("contract", "operator", "trainer_image", "client"))
        return tuple(room for room in rooms if room.is_dir())

    @property
    def chart(self) -> Path:
        return self.folder / "helm" / "trainium-operator"

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that runs that version, with the packages of this virtual environment."""
        return {**os.environ, "PYTHONPATH": ":".join(map(str, self.modules))}


def speak(previous: Previous, version: str, command: str, given: Any = None) -> Any:
    """A command of `version_speaker.py`, carried out by the code of `previous` or `present`."""
    present = ":".join(str(ROOT / each.name) for each in previous.modules)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("version_speaker.py")), command],
        input=json.dumps(given),
        env=previous.environment if version == "previous" else {**previous.environment, "PYTHONPATH": present},
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(60),
    )
    assert done.returncode == 0, f"{version} {command}: {done.stderr}"
    return json.loads(done.stdout)


def previous_version(folder: Path) -> Previous:
    """Put it into the folder; skips the test with a sentence where git does not have it."""
    revision = _revision()
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision], capture_output=True, check=False, timeout=patient(60)
    )
    assert done.returncode == 0, done.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Previous(folder, revision)


def _revision() -> str:
    wanted = [os.environ[ENV_REVISION]] if ENV_REVISION in os.environ else [f"refs/tags/{TAG}", COMMIT]
    try:
        found = [revision for revision in wanted if _git("cat-file", "-e", f"{revision}^{{commit}}") == "0"]
    except FileNotFoundError:
        pytest.skip("needs the version before this one, and there is no git on PATH to take it from")
    if found:
        return found[0]
    if _git("rev-parse", "--git-dir") != "0":
        pytest.skip("needs the version before this one: this is a copy without history, use a clone of the repository")
    pytest.skip(
        f"needs the version before this one: neither tag {TAG} nor commit {COMMIT[:12]} is in this clone, which is "
        "shallow or partial; `git fetch --unshallow --tags` brings them"
    )


def _git(*arguments: str) -> str:
    """The exit code of a quiet git."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False, timeout=patient(60))
    return str(done.returncode)
