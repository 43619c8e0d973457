# ruff: noqa: INP001 - a script
"""Print the requirements of an image: its part of constraints.txt, with pinned versions and hashes.

Usage, from the repository's root: python scripts/image_requirements.py agent|operator|trainer|client|build|dev

`agent`, `operator` and `client` are the requirements of these distributions by their pyproject.toml, `trainer` those
with extra s3, `build` those of building wheels, `dev` those of the tests (without the group docs, whose pins are in
docs_requirements.txt). An installed torch (a vendor's image includes one) is kept, and packages that only the pinned
torch would need are omitted. The output has no distribution of this repository, and no index is queried for one: they
come from wheels.
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

OWN = "trainium-"
"""Prefix of this repository's distributions."""
PARTS = {
    "agent": "trainium-agent",
    "operator": "trainium-operator",
    "trainer": "trainium-trainer[s3]",
    "client": "trainium-client",
}
"""Distribution of each part."""


SEPARATE = frozenset({"mlflow", "wandb", "trackio", "tasks"})
"""Extras that are not in the environment of the tests but in a separate one (Makefile)."""


def parse_constraints(text: str) -> dict[str, str]:
    """Return the lines of constraints.txt by package, with hashes and markers; a package may be pinned twice."""
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", text.strip()):
        name = re.match(r"[A-Za-z0-9._-]+", block)
        if name:
            before = found.get(normalize_name(name[0]))
            found[normalize_name(name[0])] = block if before is None else f"{before}\n{block}"
    return found


def strip_hashes(block: str) -> list[str]:
    """Return the versions and markers of the lines of a package."""
    return re.findall(r"^[A-Za-z0-9][^\\\n]*?(?=\s*\\?$)", block, re.MULTILINE)


def normalize_name(name: str) -> str:
    """Return the normalized name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_projects() -> dict[str, dict[str, Any]]:
    """Return the pyproject.toml of each distribution that exists here; an image has only its own."""
    found = (tomllib.loads(file.read_text(encoding="utf-8")) for file in sorted(Path().glob("*/pyproject.toml")))
    return {each["project"]["name"]: each for each in found}


def third_party_requirements(requirement: str, known: Mapping[str, dict[str, Any]]) -> set[str]:
    """Return the third-party requirements of a requirement, through packages of this repository."""
    match = re.match(rf"({OWN}[a-z]+)(?:\[([^]]*)\])?", requirement)
    if match is None:
        return {requirement}
    if match[1] not in known:
        sys.exit(f"no pyproject.toml here is of {match[1]}, which {requirement} requires; add it")
    project = known[match[1]]["project"]
    extras = project.get("optional-dependencies", {})
    chosen = [need for name in (match[2] or "").split(",") if name for need in extras[name]]
    return {each for need in [*project["dependencies"], *chosen] for each in third_party_requirements(need, known)}


def requirements_of(part: str) -> list[str]:
    """Return the requirements of a part."""
    known = read_projects()
    if part == "build":
        return sorted({need for each in known.values() for need in each["build-system"]["requires"]})
    if part != "dev":
        return sorted(third_party_requirements(PARTS[part], known))
    extras = {
        name: ",".join(each["project"].get("optional-dependencies", {}).keys() - SEPARATE)
        for name, each in known.items()
    }
    found = {each for name, chosen in extras.items() for each in third_party_requirements(f"{name}[{chosen}]", known)}
    groups = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    return sorted({*found, *groups["dev"]})


def resolve(requirements: list[str], pins: str) -> list[str]:
    """Return the names of all packages that pip would install for the requirements at the pinned versions."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pins)
        file.flush()
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", "-c", file.name]
        answer = subprocess.run([*command, *requirements], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [normalize_name(package["metadata"]["name"]) for package in json.loads(answer)["install"]]


def installed_torch() -> dict[str, str]:
    """Return the versions of an installed torch and of the packages that it requires in one version (CUDA, triton)."""
    try:
        needs = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    names = ["torch", *(match[1] for need in needs if (match := re.match(r"([A-Za-z0-9._-]+)(\[.*?\])? ?\(?==", need)))]
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[normalize_name(name)] = importlib.metadata.version(name)
    return found


def main(part: str) -> None:
    """Print the requirements of `part`; exit with a message if one of them is not pinned."""
    pinned = parse_constraints(Path("constraints.txt").read_text(encoding="utf-8"))
    kept = installed_torch()
    for name in kept:
        pinned.pop(name, None)
    lines = [line for block in pinned.values() for line in strip_hashes(block)]
    pins = "\n".join([*lines, *(f"{name}=={version}" for name, version in kept.items())])
    names = resolve(requirements_of(part), pins)
    if missing := [name for name in names if name not in pinned]:
        sys.exit(f"constraints.txt has no version and hash of {', '.join(missing)}; add them")
    sys.stdout.write("".join(f"{pinned[name]}\n" for name in sorted(names)))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in {*PARTS, "build", "dev"}:
        sys.exit("usage: python scripts/image_requirements.py agent|operator|trainer|client|build|dev")
    main(sys.argv[1])
