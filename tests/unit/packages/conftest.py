"""The wheels of all distributions, built once as a release builds them."""

import itertools
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Wheel:
    """One distribution: its folder and its packed files."""

    distribution: Path
    project: dict[str, Any]
    """`[project]` of its pyproject.toml."""
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


_BUILD = """
import os, sys
from hatchling.build import build_wheel
for folder, out in zip(sys.argv[1::2], sys.argv[2::2]):
    os.chdir(folder)
    build_wheel(out)
"""


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """Return the wheels by name of the distribution."""
    found = {}
    distributions = sorted(file.parent for file in ROOT.glob("*/pyproject.toml"))
    outs = [tmp_path_factory.mktemp(distribution.name) for distribution in distributions]
    pairs = zip(map(str, distributions), map(str, outs), strict=True)
    subprocess.run(
        [sys.executable, "-c", _BUILD, *itertools.chain(*pairs)], check=True, capture_output=True, timeout=60
    )
    for distribution, out in zip(distributions, outs, strict=True):
        (path,) = out.glob("*.whl")
        with zipfile.ZipFile(path) as packed:
            files = {name: packed.read(name) for name in packed.namelist()}
        project = tomllib.loads((distribution / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found[project["name"]] = Wheel(distribution, project, files)
    return found
