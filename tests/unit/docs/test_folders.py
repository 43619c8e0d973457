"""The house stays one that a stranger walks through: no folder of code has more files than an eye takes in."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[3]
MOST_FILES = 16
CODE = {".py", ".sh"}
EXCEPTIONS: dict[str, str] = {}
"""Folder -> why it may be larger."""


def code_files() -> list[PurePosixPath]:
    """All that git knows or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("a copy without git: what is code here cannot be told")
    paths = {PurePosixPath(name) for name in done.stdout.split("\0") if name}
    return sorted(path for path in paths if path.suffix in CODE and (ROOT / path).exists())


def test_no_folder_of_code_has_more_files_than_an_eye_takes_in() -> None:
    files = Counter(str(path.parent) for path in code_files() if path.name != "__init__.py")
    assert files, "no code was found"
    large = {folder: count for folder, count in files.items() if count > MOST_FILES}
    assert large.keys() == EXCEPTIONS.keys(), (
        f"at most {MOST_FILES} files a folder: divide it into rooms by question, or say in EXCEPTIONS why not"
    )
