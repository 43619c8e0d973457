"""Pin the missing requirements of the workspace in constraints.txt: versions, hashes, markers.

The pins hold for all supported Pythons and all platforms. A pinned version is kept as long as it satisfies the
requirements. Needs uv on PATH (or its path in `UV`). Usage, from the repository's root: python scripts/pin.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from image_requirements import find_part_requirements

OLDEST_PYTHON = "3.11"
_UV_OPTIONS = ("--universal", "--generate-hashes", "--no-header", "--no-annotate", "--quiet")


def main() -> int:
    """Write the file; return uv's exit code."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write("\n".join(sorted({*find_part_requirements("dev"), *find_part_requirements("build")})) + "\n")
        file.flush()
        command = [os.environ.get("UV", "uv"), "pip", "compile", *_UV_OPTIONS, "--python-version", OLDEST_PYTHON]
        return subprocess.run([*command, "--output-file", "constraints.txt", file.name], check=False).returncode


if __name__ == "__main__":
    if not Path("constraints.txt").is_file():
        sys.exit("constraints.txt is not here: start this from the repository's root")
    sys.exit(main())
