"""What mypy says of a program, by the project's own settings and plugins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PLUGINS = ("mypy_replaced.py", "mypy_status_part.py")


def checked(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What mypy says about a file with this text; `folder` is an empty one."""
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    settings = folder / "pyproject.toml"
    plugins = ", ".join(f'"{ROOT / "scripts" / name}"' for name in PLUGINS)
    settings.write_text(
        f'[tool.mypy]\nstrict = true\nmypy_path = "{ROOT / "contract"}"\nplugins = ["pydantic.mypy", {plugins}]\n',
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(folder / "cache")]
    return subprocess.run([*command, str(program)], capture_output=True, text=True, check=False, cwd=folder)
