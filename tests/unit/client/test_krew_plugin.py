"""The archive for krew, unpacked and linked as krew does it, runs without any package of this environment."""

import ast
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing.api.recorded_jobs import RecordedApiServer, recorded_responses

ROOT = Path(__file__).parents[3]
BASE = "https://example.com/releases/v1"
CompletedCommand = subprocess.CompletedProcess[str]


def build_archive(out: Path) -> tuple[Path, dict[str, Any]]:
    """Build the archive for this machine; return it and the manifest."""
    command = [sys.executable, "scripts/krew_plugin.py", "--uri", BASE, "--homepage", BASE, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    (file,) = out.glob("kubectl-trn-*.tar.gz")
    return file, yaml.safe_load((out / "trn.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return build_archive(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def plugin(
    archive: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., CompletedCommand]:
    """Return a runner of the linked program with only the standard library and the archive."""
    home = tmp_path_factory.mktemp("krew")
    with tarfile.open(archive[0]) as packed:
        packed.extractall(home / "store", filter="data")
    (home / "bin").mkdir()

    def run(program: str, *arguments: str, **variables: str) -> CompletedCommand:
        link = home / "bin" / program
        if not link.is_symlink():
            link.symlink_to(home / "store" / program)
        command = [sys.executable, "-I", "-S", str(link), *arguments]
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    return run


def test_the_plugin_runs_through_its_symlink(plugin: Callable[..., CompletedCommand]) -> None:
    output = plugin("kubectl-trn", "--help")
    assert (output.returncode, output.stderr) == (0, "")
    assert "support-bundle" in output.stdout


@pytest.mark.parametrize("command", ["status", "why", "sizes", "goodput"])
def test_commands_answer_from_an_api_server(
    plugin: Callable[..., CompletedCommand], tmp_path: Path, command: str
) -> None:
    with RecordedApiServer(recorded_responses(), tmp_path).running() as server:
        output = plugin("kubectl-trn", command, "llama", "-o", "json", KUBECONFIG=str(server.kubeconfig))
    assert (output.returncode, output.stderr) == (0, "")
    assert json.loads(output.stdout)


def test_the_completion_program_completes(plugin: Callable[..., CompletedCommand]) -> None:
    assert plugin("kubectl_complete-trn", "stat", KUBECONFIG="/nowhere").stdout.splitlines()[0] == "status"


def test_the_manifest_names_the_archive_with_its_digest(archive: tuple[Path, dict[str, Any]]) -> None:
    path, manifest = archive
    (platform,) = manifest["spec"]["platforms"]
    assert platform["uri"] == f"{BASE}/{path.name}"
    assert platform["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    with tarfile.open(path) as packed:
        assert packed.getmember(platform["bin"]).mode & 0o111
        assert packed.getmember("LICENSE")
        assert not [name for name in packed.getnames() if name.startswith(("/", ".."))]
    assert len(manifest["spec"]["shortDescription"]) < 50
    assert manifest["metadata"]["name"] == "trn"


def test_the_same_sources_give_the_same_bytes(archive: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    assert build_archive(tmp_path)[0].read_bytes() == archive[0].read_bytes()


def test_an_old_python_gets_a_version_error(archive: tuple[Path, dict[str, Any]]) -> None:
    with tarfile.open(archive[0]) as packed:
        launcher = packed.extractfile("kubectl-trn")
        assert launcher is not None
        text = launcher.read().decode()
    ast.parse(text, feature_version=(3, 4))
    assert text.index("needs Python 3.11 to 3.14") < text.index("from trainium_client")
