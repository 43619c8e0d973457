# ruff: noqa: INP001 - a script
"""Prints what one image installs: the part of constraints.txt that it needs, versions pinned and with hashes.

Usage, from the repository's root: python scripts/image_requirements.py operator|trainer|client|build|dev
`operator` and `client` are the project's extras of that name, `trainer` stands for its extras trainer and s3, `build`
is what makes its wheel, `dev` is all that the tests need (not the extra docs, whose pins are docs_requirements.txt). A
torch that is already installed (a vendor's image brings its own) is left alone, and so is everything that only the
pinned torch would need.
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


def blocks(text: str) -> dict[str, str]:
    """Package name -> its lines of constraints.txt, hashes and marker included; all of a name that is pinned twice."""
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", text.strip()):
        name = re.match(r"[A-Za-z0-9._-]+", block)
        if name:
            before = found.get(normal(name[0]))
            found[normal(name[0])] = block if before is None else f"{before}\n{block}"
    return found


def without_hashes(block: str) -> list[str]:
    """The versions and markers of a package's lines."""
    return re.findall(r"^[A-Za-z0-9][^\\\n]*?(?=\s*\\?$)", block, re.MULTILINE)


def normal(name: str) -> str:
    """A package name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(part: str) -> list[str]:
    """The requirements of one part, as pyproject.toml gives them."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    if part == "build":
        return list(project["build-system"]["requires"])
    extras = project["project"]["optional-dependencies"]
    parts = {"trainer": ("trainer", "s3"), "dev": tuple(extra for extra in extras if extra != "docs")}.get(
        part, (part,)
    )
    found = [need for each in parts for need in extras[each] if not need.startswith(f"{project['project']['name']}[")]
    return [*project["project"]["dependencies"], *found]


def resolved(requirements: list[str], pins: str) -> list[str]:
    """Names of all packages that pip would install for the requirements at the pinned versions."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pins)
        file.flush()
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", "-c", file.name]
        answer = subprocess.run([*command, *requirements], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [normal(package["metadata"]["name"]) for package in json.loads(answer)["install"]]


def installed_torch() -> dict[str, str]:
    """Versions of a torch that is there, and of what it takes in one version only (its CUDA, triton)."""
    try:
        needs = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    names = ["torch", *(match[1] for need in needs if (match := re.match(r"([A-Za-z0-9._-]+)(\[.*?\])? ?\(?==", need)))]
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[normal(name)] = importlib.metadata.version(name)
    return found


def main(part: str) -> None:
    """Prints the requirements of `part`; exits with a sentence when one of them is not pinned."""
    pinned = blocks(Path("constraints.txt").read_text(encoding="utf-8"))
    kept = installed_torch()
    for name in kept:
        pinned.pop(name, None)
    lines = [line for block in pinned.values() for line in without_hashes(block)]
    pins = "\n".join([*lines, *(f"{name}=={version}" for name, version in kept.items())])
    names = resolved(wanted(part), pins)
    if missing := [name for name in names if name not in pinned]:
        sys.exit(f"constraints.txt has no version and hash of {', '.join(missing)}; add them")
    sys.stdout.write("".join(f"{pinned[name]}\n" for name in sorted(names)))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in {"operator", "trainer", "client", "build", "dev"}:
        sys.exit("usage: python scripts/image_requirements.py operator|trainer|client|build|dev")
    main(sys.argv[1])
