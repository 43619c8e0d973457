"""Workflows and commit hooks: their targets, stages and files exist; rights, signatures and linters."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainium_devcluster.binaries import CLUSTER_PROGRAMS, ensure_binaries, is_cached

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


def read_jobs(path: Path) -> dict[str, Any]:
    workflow_jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return workflow_jobs


def test_make_targets_and_image_stages_of_workflows_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    called, built = set(), set()
    for path in WORKFLOWS:
        called |= set(re.findall(r"\bmake ([a-z][a-z-]*)", path.read_text()))
        for job in read_jobs(path).values():
            matrix = job.get("strategy", {}).get("matrix", {})
            called |= {target.split()[0] for target in matrix.get("target", ())}
            built |= {entry["target"] for entry in matrix.get("include", ())}
    assert called <= targets
    assert built == {"agent", "operator", "trainer-cpu", "trainer"}
    assert built <= stages


def test_workflows_have_only_the_permissions_that_they_need() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path.name
    rights = {
        name: job["permissions"] for path in WORKFLOWS for name, job in read_jobs(path).items() if "permissions" in job
    }
    assert rights == {
        "images": {"contents": "read", "id-token": "write"},
        "chart": {"contents": "write", "id-token": "write"},
    }


def steps(name: str, job: str) -> str:
    """Return what the steps of a job run, as one text."""
    found = read_jobs(ROOT / ".github/workflows" / name)[job]["steps"]
    return "\n".join(step.get("run", "") for step in found)


def test_every_file_of_a_release_is_signed_before_it_is_published() -> None:
    ran = steps("release.yaml", "chart")
    (signed,) = re.findall(r"for file in (.+); do\n\s*cosign sign-blob", ran)
    published = re.findall(r"out/\S+", ran[ran.index("gh release create") :])
    assert [*signed.split(), "out/*.sigstore.json"] == published
    assert ran.index("cosign sign-blob") < ran.index("gh release create")
    assert 'cosign sign --yes "$CHART"' in ran


COSIGN = """#!/bin/sh
# The workflow's command, with a key and no service: neither an identity nor a log of signatures is asked for.
command=$1; shift
exec {program} "$command" --key {folder}/cosign.key --signing-config {folder}/services.json "$@"
"""


@pytest.mark.skipif(shutil.which("cosign") is None, reason="needs cosign on PATH")
def test_signed_files_verify_until_they_are_changed(tmp_path: Path) -> None:
    program, environment = shutil.which("cosign"), os.environ | {"COSIGN_PASSWORD": "", "HOME": str(tmp_path)}

    def cosign(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    cosign("generate-key-pair").check_returncode()
    cosign("signing-config", "create", "--out", "services.json").check_returncode()
    files = [tmp_path / "out" / name for name in ("crd.yaml", "chart.tgz", "room.whl", "plugin.tar.gz")]
    for folder in ("out", "bin"):
        (tmp_path / folder).mkdir()
    for file in files:
        file.write_text(file.name)
    (tmp_path / "bin/cosign").write_text(COSIGN.format(program=program, folder=tmp_path))
    (tmp_path / "bin/cosign").chmod(0o755)
    (loop,) = re.findall(r"for file in [^;]+; do\n\s*cosign.*?done", steps("release.yaml", "chart"), re.DOTALL)
    path = f"{tmp_path / 'bin'}:{environment['PATH']}"
    subprocess.run(["bash", "-e", "-c", loop], cwd=tmp_path, env=environment | {"PATH": path}, check=True)

    shown = (ROOT / "docs/install.md").read_text()
    (bundle,) = re.findall(r"cosign verify-blob --bundle (\S+) ", shown)
    for file in files:
        made = bundle.replace("FILE", str(file))
        verify = ("verify-blob", "--bundle", made, "--key", "cosign.pub", "--insecure-ignore-tlog", str(file))
        assert cosign(*verify).returncode == 0
        file.write_text("changed")
        assert cosign(*verify).returncode == 1


def test_programs_that_workflows_build_are_pinned() -> None:
    built = [match for path in WORKFLOWS for match in re.findall(r"go run (\S+)", path.read_text())]
    assert len(built) == 3
    assert all(re.fullmatch(r"\S+@v\d+\.\d+\.\d+", program) for program in built)


@pytest.fixture(scope="module")
def rendered_manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Render the manifests that the checks read, as they do: a folder with the files that their commands name."""
    if not is_cached(CLUSTER_PROGRAMS):
        pytest.skip("the cluster's programs are not there; `make binaries` brings them, helm among them")
    helm = ensure_binaries().folder / "helm"
    folder = tmp_path_factory.mktemp("manifests")
    for name in ("helm", "manifests", ".kube-linter.yaml"):
        (folder / name).symlink_to(ROOT / name)
    script = steps("checks.yaml", "manifests").split("for version")[0]
    path = f"{helm.parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-e", "-c", script], cwd=folder, env=os.environ | {"PATH": path}, check=True)
    return folder


def test_checked_manifests_are_renderings_of_the_chart(rendered_manifests: Path) -> None:
    kinds = {
        file.stem: {document["kind"] for document in yaml.safe_load_all(file.read_text()) if document}
        for file in (rendered_manifests / "out/rendered").iterdir()
    }
    assert kinds["smallest"] < kinds["defaults"] < kinds["everything"]
    assert {"NetworkPolicy", "PodMonitor", "PrometheusRule", "Certificate", "ConfigMap"} <= kinds["everything"]


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint on PATH")
def test_workflows_pass_actionlint() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("kube-linter") is None, reason="needs kube-linter on PATH")
def test_manifests_pass_kube_linter(rendered_manifests: Path) -> None:
    (loop,) = re.findall(r"for file in [^;]+; do\n.*?kube-linter.*?done", steps("checks.yaml", "manifests"), re.DOTALL)
    script = re.sub(r"go run \S+", "kube-linter", loop)
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=rendered_manifests, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stderr.count("No lint errors found!") + done.stdout.count("No lint errors found!") == 5


ROOT = Path(__file__).parents[3]


CONFIGURATION: dict[str, Any] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))


HOOKS: list[dict[str, Any]] = [hook for repository in CONFIGURATION["repos"] for hook in repository["hooks"]]


def commands_of_check() -> set[str]:
    """Return what `make check` would run, by make itself."""
    command = ["make", "--no-print-directory", "-n", "check", "VENV=.venv"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def hook_command(hook: dict[str, Any]) -> str:
    arguments = shlex.split(hook["entry"])
    return arguments[2] if arguments[:2] == ["sh", "-c"] else hook["entry"]


def test_each_hook_runs_a_line_of_make_check() -> None:
    assert HOOKS
    assert {hook_command(hook) for hook in HOOKS} <= commands_of_check()


def test_no_hook_adds_a_tool() -> None:
    assert [repository["repo"] for repository in CONFIGURATION["repos"]] == ["local"]
    for hook in HOOKS:
        assert hook["language"] == "system", hook["id"]
        assert hook["pass_filenames"] is False, f"{hook['id']}: the whole tree is checked, as by make check"
