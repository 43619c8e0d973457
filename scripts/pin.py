# ruff: noqa: INP001 - a script
"""Adds to constraints.txt what the workspace asks for and is not pinned there: versions, hashes, markers.

For all Pythons from the oldest that we support and all platforms at once. What is pinned keeps its version, as long as
it satisfies what is asked for. Needs uv on PATH (or its path in `UV`). Usage, from the repository's root: python
scripts/pin.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from image_requirements import wanted

OLDEST = "3.11"
_HOW = ("--universal", "--generate-hashes", "--no-header", "--no-annotate", "--quiet")


def main() -> int:
    """Write the file; uv's exit code."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write("\n".join(sorted({*wanted("dev"), *wanted("build")})) + "\n")
        file.flush()
        command = [os.environ.get("UV", "uv"), "pip", "compile", *_HOW, "--python-version", OLDEST]
        return subprocess.run([*command, "--output-file", "constraints.txt", file.name], check=False).returncode


if __name__ == "__main__":
    if not Path("constraints.txt").is_file():
        sys.exit("constraints.txt is not here: start this from the repository's root")
    sys.exit(main())
