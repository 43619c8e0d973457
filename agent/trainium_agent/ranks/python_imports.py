"""Import ahead what a Python program imports: what its source names, and what its last start imported.

Only installed packages are imported, because modules of the program itself may read the environment of a rank. Device
libraries are left to the ranks: a device that was opened does not survive a fork. The module also runs in the
interpreter of a program's image, so it imports only the standard library, and needs Python 3.10.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_agent.linux import kernel
from trainium_agent.ranks.python_command import split_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec

_DEVICE_LIBRARIES = frozenset(
    (
        "deepspeed", "jax", "jax_neuronx", "jaxlib", "libneuronxla", "nkipy", "tensorflow", "torch_neuronx",
        "torch_xla", "torchtitan",
    )
)  # fmt: skip
"""Libraries of devices, and torchtitan, which asks torch for the device when it is imported (`tools/utils.py`)."""
_MAX_FILES = 256
_MAX_FILE_BYTES = 1 << 20
MAX_NAMES = 8192
"""Modules that are recorded of one program."""
_LIBRARY = "trainium_worker"
"""The library for programs: it reads the environment of a rank at its use, and imports what a hook needs late."""
_CACHES = (("transformers.conversion_mapping", "get_checkpoint_conversion_mapping", ""),)
"""Functions whose first call fills a cache of the process: module, name, argument. The one of transformers 5 compiles
1,010 regular expressions at the first `from_pretrained`.
"""
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def find_imports(arguments: Sequence[str], directory: str) -> list[tuple[str, str]]:
    """Return what the program of an interpreter's arguments imports of installed packages: modules and names in them.

    Files of the program itself and of our library are read, up to 256 and never executed; imports within functions
    count too.
    """
    first, *rest = [*split_options(arguments), ""]
    if first == "-m" and rest[0]:
        folders = [directory, *sys.path]
        spec = _find_spec(rest[0], folders)
        spec = _find_spec(f"{rest[0]}.__main__", folders) if spec and spec.submodule_search_locations else spec
        files = [spec.origin] if spec and spec.origin else []
        packages = [spec.name.rpartition(".")[0]] if spec else []
    elif first and first not in ("-c", "-"):
        file = Path(directory, first)
        folders, files, packages = [str(file.resolve().parent), *sys.path], [str(file)], [""]
    else:
        return []
    found: dict[tuple[str, str], None] = {}
    seen = set(files)
    while files and len(seen) <= _MAX_FILES:
        for module, name in _read_imports(files.pop(0), packages.pop(0)):
            spec = _find_spec(module, folders)
            if spec is None or is_installed(spec):
                found[module, name] = None
            if spec is None or (is_installed(spec) and not _is_of_library(spec)):
                continue
            if spec.origin and spec.origin not in seen:
                seen.add(spec.origin)
                files.append(spec.origin)
                packages.append(module if spec.submodule_search_locations else module.rpartition(".")[0])
    return [*found][:MAX_NAMES]


def _read_imports(path: str, package: str) -> Iterator[tuple[str, str]]:
    try:
        if _read_size(path) > _MAX_FILE_BYTES:
            return
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in _walk_runtime(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if package else []
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names if module else []:
                yield module, "" if alias.name == "*" else alias.name


def _walk_runtime(tree: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes of a tree except those below `if TYPE_CHECKING`."""
    pending = [tree]
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def _find_spec(module: str, folders: list[str]) -> ModuleSpec | None:
    """Find a module without importing its packages."""
    locations, name, spec = folders, "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        with contextlib.suppress(Exception):  # finders of others run here
            spec = None
            spec = PathFinder.find_spec(name, locations)
        if spec is None:
            return None
        locations = [*(spec.submodule_search_locations or ())]
    return spec


def is_installed(spec: ModuleSpec) -> bool:
    """Return whether a module belongs to Python, to an installed package or to our library, not to the program."""
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    if _is_of_library(spec):
        return True
    return "/site-packages/" in origin or "/dist-packages/" in origin or origin.startswith(_find_installed_folders())


def _is_of_library(spec: ModuleSpec) -> bool:
    return spec.name.partition(".")[0] == _LIBRARY


@functools.cache
def _find_installed_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(f"{folder}/" for folder in folders if folder)


class ProgramImports:
    """The modules that a standby imports for a program, in several passes."""

    def __init__(self, arguments: Sequence[str], directory: str, record: str) -> None:
        """Take the arguments of the interpreter, the working directory, and the file of an `ImportRecorder`."""
        self._start = (arguments, directory or str(Path.cwd()))
        self._record = record
        self._size = -1
        self._known: set[str] = set()
        self.suspect = ""
        """The first module whose import left a thread; empty for none."""

    @property
    def has_new(self) -> bool:
        """Whether ranks have recorded modules since the last pass."""
        return _read_size(self._record) != self._size

    def import_new(self) -> None:
        """Import what the source names, in the first pass, and what ranks have recorded since the last one."""
        names = find_imports(*self._start) if self._size < 0 else []
        self._size = _read_size(self._record)
        recorded = [name for name in read_recorded(self._record) if name not in self._known]
        self._known.update(recorded)
        names += [(name, "") for name in recorded if (spec := _find_spec(name, sys.path)) and is_installed(spec)]
        suspect = import_ahead(names)
        self.suspect = self.suspect or suspect
        fill_caches()


def _read_size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def import_ahead(names: Sequence[tuple[str, str]]) -> str:
    """Import modules, and submodules that their names load; return the first one that left a thread, or nothing.

    An error is left to the rank, which meets it again.
    """
    suspect = ""
    os.environ.setdefault(_NVML, "1")  # otherwise the question whether CUDA is available opens the driver
    autoload, os.environ[_AUTOLOAD] = os.environ.get(_AUTOLOAD), "0"
    try:
        for module, name in names:
            if module.partition(".")[0] in _DEVICE_LIBRARIES:
                continue
            threads = len(kernel.list_thread_names())
            with contextlib.suppress(Exception, SystemExit):  # the rank reports it
                _import(module, name)
            if not suspect and len(kernel.list_thread_names()) > threads:
                suspect = module
    finally:
        del os.environ[_AUTOLOAD]
        if autoload is not None:
            os.environ[_AUTOLOAD] = autoload
    return suspect


def _import(module: str, name: str) -> None:
    imported = importlib.import_module(module)
    if name and not hasattr(imported, name):  # hasattr loads what a package loads at its first use
        importlib.import_module(f"{module}.{name}")


def fill_caches() -> None:
    """Fill caches of the libraries that are imported, which each rank would fill again."""
    for module, name, argument in _CACHES:
        function = getattr(sys.modules.get(module), name, None)
        if function is not None:
            with contextlib.suppress(Exception):  # another version: the rank calls it by itself
                function(argument)


def prepare_fork() -> None:
    """Do in a rank what its imports would have done: load torch's device backends, and draw new random states."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and os.environ.get(_AUTOLOAD, "1") == "1" and hasattr(torch, "_import_device_backends"):
        torch._import_device_backends()  # noqa: SLF001 - what `import torch` calls
    if numpy is not None:
        numpy.random.seed()


class ImportRecorder:
    """Appends the names of installed modules that this process imports to a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = len(read_recorded(path))

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:  # noqa: ARG002
        """Record an import, and leave the search to the next finder."""
        if self._count < MAX_NAMES and name.partition(".")[0] not in _DEVICE_LIBRARIES:
            self._count += 1
            with contextlib.suppress(OSError), Path(self._path).open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")


def read_recorded(path: str) -> list[str]:
    """Return the recorded names in their order; nothing if they cannot be read."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return [*dict.fromkeys(file.read(MAX_NAMES * 128).split())][:MAX_NAMES]
    except OSError:
        return []
