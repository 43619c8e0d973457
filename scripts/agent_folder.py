"""Assemble the folder of the agent's image: the agent, with an interpreter that runs in any container.

Usage: python scripts/agent_folder.py FOLDER [SITE]

Run it with the interpreter to copy, after the installation of the agent. SITE (by default its site-packages) has the
installed packages. A pod mounts the folder into any image and starts it by the folder's own loader, so it needs neither
a C library nor a shell of that image:

    FOLDER/lib/ld.so --library-path FOLDER/lib FOLDER/bin/python -I -m trainium_agent

FOLDER/site has `trainium_worker` alone, which programs in that image import.

Guarantees:
- FOLDER/lib has every shared library that a copied file needs.
- All modules of FOLDER/lib are compiled: a pod mounts the folder read-only, so each start would compile them again.
"""

from __future__ import annotations

import compileall
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

UNUSED_PARTS = (
    "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data", "distutils", "sqlite3",
    "site-packages", "config-*", "__pycache__", "_test*.so", "_tkinter*.so", "_sqlite3*.so", "_dbm*.so", "_gdbm*.so",
    "_curses*.so", "readline*.so", "pip", "setuptools", "wheel", "pip-*", "setuptools-*", "wheel-*", "*.pth",
)  # fmt: skip
"""Parts of the standard library and of site-packages that the agent does not import."""
UNUSED_CONTRACT = ("api_server", "definition", "pages", "views")
"""Packages of the contract that it does not import either (an import rule in pyproject.toml)."""
_LIBRARY_PATH = re.compile(r"(?:=>\s*)?(/\S+) \(0x")


def find_shared_libraries(file: Path) -> set[Path]:
    """Return the shared libraries that a program or library needs, including the loader."""
    output = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
    return {Path(path) for path in _LIBRARY_PATH.findall(output)}


def main(folder: Path, site: Path) -> None:
    """Copy interpreter, standard library, packages and shared libraries into the folder."""
    if folder.exists():
        sys.exit(f"{folder} exists already; remove it, or name another folder")
    python = Path(sys.executable).resolve()
    stdlib = Path(sysconfig.get_path("stdlib"))
    library = folder / "lib" / stdlib.name
    ignored = shutil.ignore_patterns(*UNUSED_PARTS)
    shutil.copytree(stdlib, library, ignore=ignored)
    # Not in a folder site-packages, which Debian's Python does not search.
    shutil.copytree(site, library, ignore=ignored, dirs_exist_ok=True)
    for name in UNUSED_CONTRACT:
        shutil.rmtree(library / "trainium_contract" / name, ignore_errors=True)
    worker = library / "trainium_worker"
    if worker.exists():
        shutil.copytree(worker, folder / "site" / "trainium_worker")
    (folder / "bin").mkdir()
    shutil.copy2(python, folder / "bin" / "python")
    for path in find_shared_libraries(python).union(*(find_shared_libraries(file) for file in library.rglob("*.so"))):
        is_loader = path.name.startswith("ld-")
        shutil.copy2(path.resolve(), folder / "lib" / ("ld.so" if is_loader else path.name))
    # Image layers and copies change the times of files, so Python would consider timestamp-based .pyc files stale.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if not compileall.compile_dir(library, quiet=1, invalidation_mode=mode):
        sys.exit("a module above cannot be compiled; leave it out, or use a version for this Python")


if __name__ == "__main__":
    if len(sys.argv) not in {2, 3}:
        sys.exit("usage: python scripts/agent_folder.py FOLDER [SITE]")
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) == 3 else sysconfig.get_path("purelib")))
