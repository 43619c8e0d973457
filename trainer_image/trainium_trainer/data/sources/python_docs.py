"""Read the documentation that ships with Python: real text that every machine has.

Guarantees:
- The standard library is parsed, not imported or run.
- Documents are ordered by path and position in the source, so the stream of a Python build is the same everywhere.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Record, TextPiece
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator


_FORMAT = 1
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__", "pydoc_data"}
)
_SHORTEST = 40  # in characters; shorter docstrings add little to the name


class PythonDocs(DocumentSource):
    """Language reference topics first, then one document per standard-library module."""

    name = "python-docs"
    has_lines = True

    def compute_identity(self, cache_folder: Path | None) -> str:  # noqa: ARG002 - as above
        """Return the Python build, which identifies the files."""
        return hashlib.sha256(f"python-docs\0{_FORMAT}\0{sys.version}".encode()).hexdigest()

    def iterate_records(self, block: FileBlock) -> Iterator[Record]:  # noqa: ARG002 - as above
        """Refuse: running text has no records."""
        raise UserError(
            "data.source python-docs: is running text, which has no records: set data.format to Text, or data.source "
            "to records"
        )

    def read(self, block: FileBlock) -> Iterator[TextPiece]:  # noqa: ARG002 - as above
        """Yield topics and docstrings."""
        root = Path(sysconfig.get_path("stdlib"))
        topics = root / "pydoc_data" / "topics.py"
        if topics.exists():
            yield from _read_topics(topics)
        for file in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
            parts = file.relative_to(root).parts
            if _SKIPPED.isdisjoint(parts) and not parts[0].startswith("config-"):
                text = _read_module(file, ".".join(parts).removesuffix(".py").removesuffix(".__init__"))
                if text:
                    yield TextPiece(text)


def _parse(file: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the standard library do not matter here
            return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None


def _read_topics(file: Path) -> Iterator[TextPiece]:
    """Yield the texts of the dictionary in `pydoc_data/topics.py`."""
    tree = _parse(file)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield TextPiece(value.value)
            return


def _read_module(file: Path, name: str) -> str:
    """Return the docstrings of a module and its definitions, each under its name."""
    tree = _parse(file)
    if tree is None:
        return ""
    sections = list(_read_sections(tree, name))
    return "\n\n\n".join(sections)


def _read_sections(node: ast.AST, name: str) -> Iterator[str]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        if len(text) >= _SHORTEST:
            yield f"{name}\n{'-' * len(name)}\n{text}"
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _read_sections(child, f"{name}.{child.name}")
