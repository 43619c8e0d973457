"""The wheels of all rooms, built once as a release builds them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from email.message import Message

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Wheel:
    """One distribution: its room, and what was packed."""

    distribution: Path
    project: dict[str, Any]
    """`[project]` of the room's pyproject.toml."""
    files: dict[str, bytes]

    @property
    def package(self) -> str:
        return str(self.project["name"]).replace("-", "_")

    @property
    def information(self) -> str:
        """The folder of its metadata."""
        return f"{self.package}-{self.project['version']}.dist-info"

    @property
    def metadata(self) -> Message:
        return BytesParser().parsebytes(self.files[f"{self.information}/METADATA"])


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """Name of the distribution -> its wheel."""
    found = {}
    for distribution in sorted(file.parent for file in ROOT.glob("*/pyproject.toml")):
        out = tmp_path_factory.mktemp(distribution.name)
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
        subprocess.run(command, cwd=distribution, check=True, capture_output=True, timeout=60)
        (path,) = out.glob("*.whl")
        with zipfile.ZipFile(path) as packed:
            files = {name: packed.read(name) for name in packed.namelist()}
        project = tomllib.loads((distribution / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found[project["name"]] = Wheel(distribution, project, files)
    return found
