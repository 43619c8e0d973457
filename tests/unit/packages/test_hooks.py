"""The hooks of `.pre-commit-config.yaml` are lines of `make check`, by the tools of the repository's environment."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CONFIGURATION: dict[str, Any] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
HOOKS: list[dict[str, Any]] = [hook for repository in CONFIGURATION["repos"] for hook in repository["hooks"]]


def commands_of_check() -> set[str]:
    """Return what `make check` would run, by make itself."""
    command = ["make", "--no-print-directory", "-n", "check", "VENV=.venv"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def command(hook: dict[str, Any]) -> str:
    words = shlex.split(hook["entry"])
    return words[2] if words[:2] == ["sh", "-c"] else hook["entry"]


def test_each_hook_runs_a_line_of_make_check() -> None:
    assert HOOKS
    assert {command(hook) for hook in HOOKS} <= commands_of_check()


def test_no_hook_adds_a_tool() -> None:
    assert [repository["repo"] for repository in CONFIGURATION["repos"]] == ["local"]
    for hook in HOOKS:
        assert hook["language"] == "system", hook["id"]
        assert hook["pass_filenames"] is False, f"{hook['id']}: the whole tree is checked, as by make check"
