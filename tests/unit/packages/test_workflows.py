"""The workflows call what there is: targets of the Makefile, stages of the Dockerfile, files, each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainium_devcluster.binaries import CLUSTER_PROGRAMS, ensure_binaries, is_cached

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def test_every_target_of_make_and_every_stage_of_an_image_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    made, built = set(), set()
    for path in WORKFLOWS:
        made |= set(re.findall(r"\bmake ([a-z][a-z-]*)", path.read_text()))
        for job in jobs(path).values():
            matrix = job.get("strategy", {}).get("matrix", {})
            made |= {target.split()[0] for target in matrix.get("target", ())}
            built |= {each["target"] for each in matrix.get("include", ())}
    assert made <= targets
    assert built == {"agent", "operator", "trainer-cpu", "trainer"}
    assert built <= stages


def test_no_workflow_may_write_more_than_it_has_to() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path.name
    rights = {
        name: job["permissions"] for path in WORKFLOWS for name, job in jobs(path).items() if "permissions" in job
    }
    assert rights == {
        "images": {"contents": "read", "id-token": "write"},
        "chart": {"contents": "write", "id-token": "write"},
    }


def steps(name: str, job: str) -> str:
    """Return what the steps of a job run, as one text."""
    found = jobs(ROOT / ".github/workflows" / name)[job]["steps"]
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
def test_what_the_release_signs_is_verified_as_its_users_do_and_not_once_it_is_changed(tmp_path: Path) -> None:
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


def test_programs_that_a_workflow_builds_have_a_version() -> None:
    built = [one for path in WORKFLOWS for one in re.findall(r"go run (\S+)", path.read_text())]
    assert len(built) == 3
    assert all(re.fullmatch(r"\S+@v\d+\.\d+\.\d+", one) for one in built)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_what_is_checked_as_a_manifest_is_the_chart_that_is_there(checked: Path) -> None:
    kinds = {
        file.stem: {one["kind"] for one in yaml.safe_load_all(file.read_text()) if one}
        for file in (checked / "out/rendered").iterdir()
    }
    assert kinds["smallest"] < kinds["defaults"] < kinds["everything"]
    assert {"NetworkPolicy", "PodMonitor", "PrometheusRule", "Certificate", "ConfigMap"} <= kinds["everything"]


def test_the_base_of_the_workers_image_on_kind_is_that_of_the_dockerfile_with_the_pinned_torch(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$*" >call\ncat >built\n')
    docker.chmod(0o755)
    for name in ("Dockerfile", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = steps("nightly.yaml", "kind").split("make test-cluster")[0]
    given = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_ENV": str(tmp_path / "variables"),
    }

    def base(index: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-e", "-c", script]
        return subprocess.run(
            command, cwd=tmp_path, env=given | {"TORCH_INDEX": index}, capture_output=True, text=True, check=False
        )

    refused = base("")
    assert (refused.returncode, refused.stderr[:20]) == (2, "TORCH_INDEX is empty")
    made = base("https://packages.example/cpu")
    assert (made.returncode, made.stderr) == (0, "")
    first, second = (tmp_path / "built").read_text().splitlines()
    assert f"ARG PYTHON_IMAGE={first.removeprefix('FROM ')}" in (ROOT / "Dockerfile").read_text().splitlines()
    (torch,) = re.findall(r"^(torch==\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert second == f"RUN pip install --no-cache-dir --index-url https://packages.example/cpu {torch}"
    (variable,) = (tmp_path / "variables").read_text().splitlines()
    settings = yaml.safe_load(Path(variable.removeprefix("TRAINIUM_TEST_SITE=")).read_text())
    assert (tmp_path / "call").read_text() == f"build -t {settings['trainerBase']} -\n"


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint on PATH")
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("kube-linter") is None, reason="needs kube-linter on PATH")
def test_kube_linter_finds_nothing(checked: Path) -> None:
    (loop,) = re.findall(r"for file in [^;]+; do\n.*?kube-linter.*?done", steps("checks.yaml", "manifests"), re.DOTALL)
    script = re.sub(r"go run \S+", "kube-linter", loop)
    done = subprocess.run(["bash", "-e", "-c", script], cwd=checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stderr.count("No lint errors found!") + done.stdout.count("No lint errors found!") == 5
