"""Create the krew plugin: for each platform an archive with `kubectl trn` and its packages, and the manifest.

Usage, from the repository's root, with a Python that has the requirements of trainium-client:

    python scripts/krew_plugin.py --uri BASE --homepage URL [--out FOLDER] [--all-platforms]

krew unpacks an archive and links one file of it as `kubectl-trn`; it installs no Python. So an archive contains
launchers and all packages. One of them is compiled, pydantic-core; its file names include system and Python, so the
files for all Pythons are in one folder. Optional extensions of PyYAML and charset-normalizer are left out, and so is
`kubernetes.aio` with its requirements, which the client does not import. Without --all-platforms:
only this machine and this Python, no network. The same sources and packages give the same bytes, so the digests in the
manifest are reproducible.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml
from image_requirements import find_part_requirements, normalize_name, parse_constraints, read_projects

PACKAGE_FOLDERS = (Path("client/trainium_client"), Path("contract/trainium_contract"))
COMPILED_PACKAGE = "pydantic-core"
OPTIONALLY_COMPILED = frozenset({"pyyaml", "charset-normalizer"})
OMITTED_PACKAGES = frozenset({"aiohttp", "aiohttp-retry"})
OMITTED_FOLDER = "kubernetes/aio/"
SUPPORTED_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PIP_PLATFORMS = {
    "linux-amd64": "manylinux_2_17_x86_64",
    "linux-arm64": "manylinux_2_17_aarch64",
    "darwin-amd64": "macosx_10_12_x86_64",
    "darwin-arm64": "macosx_11_0_arm64",
}
"""pip's platform tag by krew platform."""
LAUNCHERS = {
    "kubectl-trn": "trainium_client.commands.main",
    "kubectl_complete-trn": "trainium_client.commands.complete",
}
_LAUNCHER = '''#!/usr/bin/env python3
"""Start {name} with the packages beside this file."""

import os
import sys

if not ({oldest_tuple}) <= sys.version_info[:2] <= ({newest_tuple}):
    sys.exit("error: kubectl trn needs Python {oldest} to {newest}; python3 on PATH is %d.%d" % sys.version_info[:2])
sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "lib"))

from {module} import main

main()
'''
_CAVEATS = """\
Needs python3 {oldest} to {newest} on PATH; krew installs no Python. For completion by kubectl link the second program:
  ln -s "${{KREW_ROOT:-$HOME/.krew}}/store/trn/v{release}/kubectl_complete-trn" ~/.local/bin/
"""
_DESCRIPTION = """\
Shows a training job on one screen: its state, why it stopped, and what to do. Shows logs of a rank across pods,
checkpoints, goodput and bad machines, and writes a page to share or a bundle for a bug report.
"""


def find_transitive_distributions(requirements: list[str]) -> list[str]:
    """Return the names of the required distributions and of those that they require, all of which are installed."""
    names: set[str] = set()
    queue = list(requirements)
    while queue:
        name = normalize_name(re.split(r"[ <>=!~\[(]", queue.pop().strip(), maxsplit=1)[0])
        if name in names or name in OMITTED_PACKAGES:
            continue
        names.add(name)
        for dependency in importlib.metadata.requires(name) or []:
            requirement, _, marker = dependency.partition(";")
            # Markers here select extras, other systems and older Pythons, which are not needed.
            if not marker:
                queue.append(requirement)
    return sorted(names)


def collect_library_files() -> dict[str, bytes]:
    """Return the files of `lib/` for every platform by path; raise ValueError for an unexpected compiled package."""
    files = {}
    for package in PACKAGE_FOLDERS:
        for file in package.rglob("*.py"):
            files[str(file.relative_to(package.parent))] = file.read_bytes()
    for name in find_transitive_distributions(find_part_requirements("client")):
        for entry in importlib.metadata.files(name) or ():
            path = str(entry)
            if path.endswith((".so", ".pyd")) and name not in {COMPILED_PACKAGE, *OPTIONALLY_COMPILED}:
                raise ValueError(f"{name} has {path}, which is compiled: it needs a wheel for each platform")
            is_text = path.endswith((".py", "/METADATA")) or "/licenses/" in path or ".dist-info/LICENSE" in path
            if is_text and not path.startswith(("..", "/", OMITTED_FOLDER)):
                files[path] = Path(str(entry.locate())).read_bytes()
    return files


def find_local_extensions() -> dict[str, bytes]:
    """Return the compiled files of this machine and Python."""
    entries = (entry for entry in importlib.metadata.files(COMPILED_PACKAGE) or () if str(entry).endswith(".so"))
    return {str(entry): Path(str(entry.locate())).read_bytes() for entry in entries}


def download_extensions(tag: str) -> dict[str, bytes]:
    """Return the compiled files of a platform for every Python, from wheels with the digests of constraints.txt."""
    pins = parse_constraints(Path("constraints.txt").read_text(encoding="utf-8"))
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(pins[COMPILED_PACKAGE] + "\n", encoding="utf-8")
        for python in SUPPORTED_PYTHONS:
            options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--platform", tag]
            options += ["--python-version", python, "--dest", folder, "--quiet", "--disable-pip-version-check"]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, "-r", str(requirements)], check=True)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                files.update({name: archive.read(name) for name in archive.namelist() if name.endswith(".so")})
    if len(files) != len(SUPPORTED_PYTHONS):
        raise ValueError(
            f"{COMPILED_PACKAGE} for {tag}: {len(files)} compiled files for {len(SUPPORTED_PYTHONS)} Pythons"
        )
    return files


def build_launcher_files() -> dict[str, bytes]:
    """Return the launchers of the archive."""
    oldest, newest = SUPPORTED_PYTHONS[0], SUPPORTED_PYTHONS[-1]
    versions = {"oldest": oldest, "newest": newest}
    versions |= {"oldest_tuple": oldest.replace(".", ", "), "newest_tuple": newest.replace(".", ", ")}
    return {name: _LAUNCHER.format(name=name, module=module, **versions).encode() for name, module in LAUNCHERS.items()}


def build_archive(files: dict[str, bytes]) -> bytes:
    """Return a tar.gz without times, owners and modes of this machine."""
    archive = io.BytesIO()
    with gzip.GzipFile(fileobj=archive, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for path, content in sorted(files.items()):
            info = tarfile.TarInfo(path)
            info.size = len(content)
            info.mode = 0o755 if path in LAUNCHERS else 0o644
            tar.addfile(info, io.BytesIO(content))
    return archive.getvalue()


def render_manifest(release: str, homepage: str, archives: dict[str, tuple[str, str]]) -> str:
    """Return the manifest of krew; `archives` has URI and digest by platform."""
    platforms = []
    for name, (uri, digest) in archives.items():
        system, _, processor = name.partition("-")
        labels = {"os": system, "arch": processor}
        platforms.append({"selector": {"matchLabels": labels}, "uri": uri, "sha256": digest, "bin": "kubectl-trn"})
    spec = {
        "version": f"v{release}",
        "homepage": homepage,
        "shortDescription": "Inspect and change TrainingJobs",
        "description": _DESCRIPTION,
        "caveats": _CAVEATS.format(oldest=SUPPORTED_PYTHONS[0], newest=SUPPORTED_PYTHONS[-1], release=release),
        "platforms": platforms,
    }
    head = {"apiVersion": "krew.googlecontainertools.github.com/v1alpha2", "kind": "Plugin"}
    return yaml.safe_dump({**head, "metadata": {"name": "trn"}, "spec": spec}, sort_keys=False, width=110)


def find_platform() -> str:
    """Return krew's name of this machine's platform."""
    processor = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return f"{platform.system().lower()}-{processor}"


def build_plugin(base: str, homepage: str, out: Path, *, all_platforms: bool) -> Path:
    """Write the archives and return the path of the manifest."""
    release = read_projects()["trainium-client"]["project"]["version"]
    common = {f"lib/{path}": content for path, content in collect_library_files().items()}
    common |= build_launcher_files() | {"LICENSE": Path("LICENSE").read_bytes()}
    out.mkdir(parents=True, exist_ok=True)
    archives = {}
    for name in PIP_PLATFORMS if all_platforms else (find_platform(),):
        compiled = download_extensions(PIP_PLATFORMS[name]) if all_platforms else find_local_extensions()
        content = build_archive(common | {f"lib/{path}": data for path, data in compiled.items()})
        file = out / f"kubectl-trn-{release}-{name}.tar.gz"
        file.write_bytes(content)
        archives[name] = f"{base.rstrip('/')}/{file.name}", hashlib.sha256(content).hexdigest()
    path = out / "trn.yaml"
    path.write_text(render_manifest(release, homepage, archives), encoding="utf-8")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Create the archives and the manifest of the krew plugin trn.")
    parser.add_argument("--uri", required=True, help="base URL of the archives")
    parser.add_argument("--homepage", required=True, help="URL of the project")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for all files")
    parser.add_argument("--all-platforms", action="store_true", help="not only this machine; needs pip and a network")
    options = parser.parse_args()
    build_plugin(options.uri, options.homepage, options.out, all_platforms=options.all_platforms)
