"""Parse the source of the standard library: modules, classes and functions, with signature and docstring.

Guarantees:
- Files are parsed, never imported or run.
- The order is that of sorted paths and of the source, so a Python build always gives the same library.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__", "pydoc_data"}
)
_RECEIVERS = frozenset({"self", "cls"})


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method."""

    name: str
    owner: str
    """Dotted name of the class, with enclosing classes; empty for a function of the module."""
    arguments: str
    """Parameters as in the source, without annotations, `self` and `cls`: `a, b=1, *rest`."""
    names: tuple[str, ...]
    """Names of the parameters, without stars."""
    text: str
    """Docstring without indentation; empty if there is none."""

    @property
    def signature(self) -> str:
        """The signature, `name(a, b=1)`."""
        return f"{self.name}({self.arguments})"

    @property
    def is_public(self) -> bool:
        """Whether the function and its classes are public."""
        return not self.name.startswith("_") and not any(part.startswith("_") for part in self.owner.split("."))


@dataclass(frozen=True, slots=True)
class Module:
    """A module and its functions."""

    name: str
    text: str
    """Docstring."""
    functions: tuple[Function, ...]


def read_standard_library(root: Path | None = None) -> list[Module]:
    """Return the modules below `root` (default: those of this Python), without unparsable files."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    modules = []
    for file in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts = file.relative_to(root).parts
        if _SKIPPED.isdisjoint(parts) and not parts[0].startswith("config-"):
            tree = _parse(file)
            if tree is not None:
                name = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
                modules.append(Module(name, _get_docstring(tree), tuple(_iterate_functions(tree.body, ""))))
    return modules


def _parse(file: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore invalid escapes in old files
            return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None


def _get_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def _iterate_functions(body: list[ast.stmt], owner: str) -> Iterator[Function]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _iterate_functions(node.body, f"{owner}.{node.name}".lstrip("."))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if owner:
                _remove_receiver(node.args)
            arguments = _list_parameters(node.args)
            for argument in arguments:
                argument.annotation = None
            names = tuple(argument.arg for argument in arguments)
            yield Function(node.name, owner, ast.unparse(node.args), names, _get_docstring(node))


def _remove_receiver(arguments: ast.arguments) -> None:
    positional = arguments.posonlyargs or arguments.args
    if positional and positional[0].arg in _RECEIVERS:
        del positional[0]


def _list_parameters(arguments: ast.arguments) -> list[ast.arg]:
    """Return the parameters in order, without those of a lambda as a default."""
    variadic = [arguments.vararg] if arguments.vararg else []
    keywords = [arguments.kwarg] if arguments.kwarg else []
    return [*arguments.posonlyargs, *arguments.args, *variadic, *arguments.kwonlyargs, *keywords]
