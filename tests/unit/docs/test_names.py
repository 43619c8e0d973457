"""One name, one thing: who meets a class by its name need not ask which one is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).parents[3]
CONTRACT = "contract"
PROGRAMS = ("client", "devcluster", "operator", "trainer_image")
"""They never import each other (import-linter), so only the contract's names and their own meet in one file."""
SHARED = ("benchmarks", "tests/testing")
"""These import all of them."""
ONE_WORD = {"DurableTier", "Fleet", "Mesh", "MemoryTier", "Outcome", "Part", "Store", "Supervisor"}
"""Words that have named several things, or mean another one in the glossary: everywhere for one class at most."""
EXCEPTIONS = {
    "TrainingJob": "one job for Python, whose methods are called (`job.py`) or awaited (`aio.py`)",
}
"""Name -> why two modules may define it."""


def classes_of(source: str) -> set[str]:
    """The classes of a module that others may import."""
    return {
        node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def defined_in(folders: Iterable[str]) -> dict[str, set[str]]:
    """Name -> the files that define it."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for name in classes_of(path.read_text(encoding="utf-8")):
                found[name].add(str(path.relative_to(ROOT)))
    return found


def repeated(found: Mapping[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(files) for name, files in found.items() if len(files) > 1}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_class_has_a_name_of_its_own_among_all_that_its_program_can_import(program: str) -> None:
    found = defined_in([CONTRACT, program])
    assert len(found) > 100, "the classes were not found"
    twice = {name: files for name, files in repeated(found).items() if name not in EXCEPTIONS}
    assert not twice, "say what each of them is in its name, or say in EXCEPTIONS why it is one thing"


def test_a_word_that_named_several_things_names_one_at_most() -> None:
    found = repeated(defined_in([CONTRACT, *PROGRAMS, *SHARED]))
    assert not {name: files for name, files in found.items() if name in ONE_WORD}


def test_each_exception_is_one() -> None:
    twice = {name for program in PROGRAMS for name in repeated(defined_in([CONTRACT, program]))}
    assert EXCEPTIONS.keys() <= twice, "take it off the list"


def test_a_name_that_two_modules_define_is_found() -> None:
    modules = {"a.py": "class Part: ...\nclass _Own: ...", "b.py": "class Part: ...\nclass _Own: ...\nclass Whole: ..."}
    found: dict[str, set[str]] = defaultdict(set)
    for file, source in modules.items():
        for name in classes_of(source):
            found[name].add(file)
    assert repeated(found) == {"Part": ["a.py", "b.py"]}
