"""Print the requirements of an image: its part of constraints.txt, with pinned versions and hashes.

Usage, from the repository's root: python scripts/image_requirements.py agent|operator|trainer|client|build|dev

`agent`, `operator` and `client` are the requirements of these distributions by their pyproject.toml, `trainer` the
trainer's with extra s3, `build` those of building wheels, `dev` those of the tests (without the group docs, whose pins
are in docs_requirements.txt).

Guarantees:
- An installed torch is kept (a vendor's image includes one), and packages that only the pinned torch needs are omitted.
- The output has no distribution of this repository, and no index is queried for one: they come from wheels.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

DISTRIBUTION_PREFIX = "trainium-"
"""Prefix of the names of this repository's distributions."""
REQUIREMENTS = {
    "agent": "trainium-agent",
    "operator": "trainium-operator",
    "trainer": "trainium-trainer[s3]",
    "client": "trainium-client",
}
"""Requirement of each part: a distribution of this repository, with extras."""
EXTRAS_NOT_TESTED = frozenset({"mlflow", "wandb", "tasks"})
"""Extras that are not in the environment of the tests but in a separate one (Makefile)."""


def parse_constraints(text: str) -> dict[str, str]:
    """Return the lines of constraints.txt by package, with hashes and markers; a package may be pinned twice."""
    pins: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", text.strip()):
        if match := re.match(r"[A-Za-z0-9._-]+", block):
            pins.setdefault(normalize_name(match[0]), []).append(block)
    return {name: "\n".join(blocks) for name, blocks in pins.items()}


def strip_hashes(block: str) -> list[str]:
    """Return the pins of a package, each with version and marker but no hash."""
    return re.findall(r"^[A-Za-z0-9][^\\\n]*?(?=\s*\\?$)", block, re.MULTILINE)


def normalize_name(name: str) -> str:
    """Return the normalized name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_projects() -> dict[str, dict[str, Any]]:
    """Return the pyproject.toml of each distribution that exists here; an image build has a part of them."""
    projects = (tomllib.loads(file.read_text(encoding="utf-8")) for file in sorted(Path().glob("*/pyproject.toml")))
    return {project["project"]["name"]: project for project in projects}


def find_third_party_requirements(requirement: str, projects: Mapping[str, dict[str, Any]]) -> set[str]:
    """Return a third-party requirement as it is, and those of a distribution of this repository, recursively."""
    match = re.match(rf"({DISTRIBUTION_PREFIX}[a-z]+)(?:\[([^]]*)\])?", requirement)
    if match is None:
        return {requirement}
    if match[1] not in projects:
        sys.exit(f"{requirement} requires {match[1]}, but {match[1]}'s pyproject.toml is not here; add it")
    project = projects[match[1]]["project"]
    direct = list(project["dependencies"])
    for extra in filter(None, (match[2] or "").split(",")):
        direct += project["optional-dependencies"][extra]
    return set().union(*(find_third_party_requirements(dependency, projects) for dependency in direct))


def find_part_requirements(part: str) -> list[str]:
    """Return the third-party requirements of a part."""
    projects = read_projects()
    if part == "build":
        return sorted(
            {requirement for project in projects.values() for requirement in project["build-system"]["requires"]}
        )
    if part != "dev":
        return sorted(find_third_party_requirements(REQUIREMENTS[part], projects))
    workspace = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    requirements = set(workspace["dependency-groups"]["dev"])
    for name, project in projects.items():
        extras = project["project"].get("optional-dependencies", {}).keys() - EXTRAS_NOT_TESTED
        requirements |= find_third_party_requirements(f"{name}[{','.join(extras)}]", projects)
    return sorted(requirements)


def resolve(requirements: list[str], pins: str) -> list[str]:
    """Return the names of all packages that pip would install for the requirements at the pinned versions."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pins)
        file.flush()
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", "-c", file.name]
        report = subprocess.run([*command, *requirements], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [normalize_name(package["metadata"]["name"]) for package in json.loads(report)["install"]]


def read_installed_torch() -> dict[str, str]:
    """Return the versions of an installed torch and of the packages that it requires in one version (CUDA, triton)."""
    try:
        requirements = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    matches = (re.match(r"([A-Za-z0-9._-]+)(\[.*?\])? ?\(?==", requirement) for requirement in requirements)
    versions = {}
    for name in ("torch", *(match[1] for match in matches if match)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[normalize_name(name)] = importlib.metadata.version(name)
    return versions


def main(part: str) -> None:
    """Print the requirements of `part`; exit with a message if one of them is not pinned."""
    pinned = parse_constraints(Path("constraints.txt").read_text(encoding="utf-8"))
    installed = read_installed_torch()
    for name in installed:
        pinned.pop(name, None)
    pins = [pin for block in pinned.values() for pin in strip_hashes(block)]
    pins += (f"{name}=={version}" for name, version in installed.items())
    names = resolve(find_part_requirements(part), "\n".join(pins))
    if missing := [name for name in names if name not in pinned]:
        sys.exit(f"constraints.txt has no version and hash of {', '.join(missing)}; add them")
    sys.stdout.write("".join(f"{pinned[name]}\n" for name in sorted(names)))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in {*REQUIREMENTS, "build", "dev"}:
        sys.exit("usage: python scripts/image_requirements.py agent|operator|trainer|client|build|dev")
    main(sys.argv[1])
