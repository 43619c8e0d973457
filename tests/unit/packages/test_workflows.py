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
    assert built == {"operator", "trainer-cpu", "trainer"}
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
    """What the steps of a job run, as one text."""
    found = jobs(ROOT / ".github/workflows" / name)[job]["steps"]
    return "\n".join(step.get("run", "") for step in found)


def test_every_file_of_a_release_is_signed_before_it_is_published() -> None:
    ran = steps("release.yaml", "chart")
    (signed,) = re.findall(r"for file in (.+); do\n\s*cosign sign-blob", ran)
    published = re.findall(r"out/\S+", ran[ran.index("gh release create") :])
    assert [*signed.split(), "out/*.sigstore.json"] == published
    assert ran.index("cosign sign-blob") < ran.index("gh release create")
    assert 'cosign sign --yes "$CHART"' in ran


def test_programs_that_a_workflow_builds_have_a_version() -> None:
    built = [one for path in WORKFLOWS for one in re.findall(r"go run (\S+)", path.read_text())]
    assert len(built) == 3
    assert all(re.fullmatch(r"\S+@v\d+\.\d+\.\d+", one) for one in built)


def test_what_is_looked_at_as_a_manifest_is_the_chart_that_is_there(tmp_path: Path) -> None:
    helm = os.environ.get("HELM") or shutil.which("helm")
    if helm is None:
        pytest.skip("needs helm, as variable HELM or on PATH")
    (tmp_path / "helm").symlink_to(ROOT / "helm")
    script = steps("checks.yaml", "manifests").split("for version")[0]
    path = f"{Path(helm).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    kinds = {
        name: {one["kind"] for one in yaml.safe_load_all((tmp_path / f"out/rendered/{name}.yaml").read_text()) if one}
        for name in ("defaults", "everything")
    }
    assert kinds["defaults"] < kinds["everything"]
    assert {"NetworkPolicy", "PodMonitor", "PrometheusRule", "Certificate", "ConfigMap"} <= kinds["everything"]


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint on PATH")
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
