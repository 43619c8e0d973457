"""Imports of benchmarks, which run rarely, exist in the packages."""

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
def test_imports_of_a_benchmark_exist(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module and node.module.partition(".")[0] in PACKAGES]
    missing = [
        f"{node.module}.{alias.name}" for node in ours for alias in node.names if not has(str(node.module), alias.name)
    ]
    assert missing == []


@pytest.mark.parametrize("name", MODULES)
def test_the_module_of_each_benchmark_exists(name: str) -> None:
    assert importlib.util.find_spec(MODULES[name]) is not None
