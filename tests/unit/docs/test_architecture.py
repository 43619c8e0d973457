"""The files and packages that the architecture page names exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
BASES = [
    "", "agent/trainium_agent/", "client/trainium_client/", "contract/trainium_contract/",
    "operator/trainium_operator/",
    "operator/trainium_operator/cluster/", "operator/trainium_operator/plan/", "tests/testing/",
    "trainer_image/trainium_trainer/", "worker/", "worker/trainium_worker/",
    "trainer_image/trainium_trainer/backends/", "trainer_image/trainium_trainer/backends/nxd/",
    "trainer_image/trainium_trainer/checkpoint/", "trainer_image/trainium_trainer/data/",
]  # fmt: skip
FILES = set(
    subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()
)  # fmt: skip
FOLDERS = {str(parent) for path in FILES for parent in Path(path).parents}
NAMES = {Path(path).name for path in FILES}


def named_paths() -> list[str]:
    """The names of files and folders in the tables, without those that continue a path before them."""
    cells = " ".join(line for line in PAGE.splitlines() if line.startswith("|"))
    return sorted(set(re.findall(r"`([\w./-]+(?:\.py|\.txt|/[\w/]*))`", cells)))


@pytest.mark.parametrize("name", named_paths())
def test_a_file_or_package_of_the_architecture_page_exists(name: str) -> None:
    path = name.rstrip("/")
    found = any(f"{base}{path}" in FILES | FOLDERS for base in BASES)
    assert found or ("/" not in path and path in NAMES), f"docs/architecture.md names {name}, which does not exist"


def test_every_package_of_the_trainer_and_the_plan_is_on_the_architecture_page() -> None:
    tables = PAGE.partition("\n## The rooms of the contract\n")[2]
    for base in (
        "agent/trainium_agent",
        "trainer_image/trainium_trainer",
        "operator/trainium_operator/plan",
        "contract/trainium_contract",
        "worker/trainium_worker",
    ):
        folders = {path.name for path in (ROOT / base).iterdir() if (path / "__init__.py").exists()}
        assert [name for name in sorted(folders) if f"`{name}/`" not in tables] == [], f"{base}: not in the tables"
