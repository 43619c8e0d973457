"""Benchmarks run seldom: what they take from the packages is there, so none is found broken when it is needed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

from benchmarks.run import MODULES

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
PACKAGES = (
    "tests",
    "benchmarks",
    "trainium_contract",
    "trainium_operator",
    "trainium_trainer",
    "trainium_devcluster",
    "trainium_client",
)


def has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_everything_that_a_benchmark_imports_from_the_packages_is_there(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module and node.module.partition(".")[0] in PACKAGES]
    missing = [
        f"{node.module}.{each.name}" for node in ours for each in node.names if not has(str(node.module), each.name)
    ]
    assert missing == []


@pytest.mark.parametrize("name", MODULES)
def test_make_bench_finds_each_benchmark(name: str) -> None:
    assert importlib.util.find_spec(MODULES[name]) is not None
