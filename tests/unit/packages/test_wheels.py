"""Wheels: content, licence, programs, and dependencies that equal the imports."""

import ast
import configparser
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.packages.conftest import Wheel

ROOT = Path(__file__).parents[3]

NAMES = [
    f"trainium-{name}"
    for name in ["agent", "client", "contract", "devcluster", "operator", "simulator", "trainer", "worker"]
]


def test_there_is_a_wheel_for_each_package(wheels: dict[str, Wheel]) -> None:
    assert sorted(wheels) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_contains_exactly_its_package(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    source = wheel.distribution / wheel.package
    files = [file for file in source.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    here = {str(file.relative_to(wheel.distribution)): file.read_bytes() for file in files}
    assert {path: content for path, content in wheel.files.items() if wheel.information not in path} == here
    assert f"{wheel.package}/py.typed" in here


@pytest.mark.parametrize("name", NAMES)
def test_the_programs_of_a_wheel_are_functions_in_it(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    listed = configparser.ConfigParser(delimiters="=")
    listed.optionxform = str  # type: ignore[assignment,method-assign]  # names as they are
    listed.read_string(wheel.files.get(f"{wheel.information}/entry_points.txt", b"[console_scripts]").decode())
    programs = wheel.project.get("scripts", {})
    assert dict(listed["console_scripts"]) == programs
    for place in programs.values():
        module, _, function = place.partition(":")
        tree = ast.parse(wheel.files[f"{module.replace('.', '/')}.py"])
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_contains_the_licence_file(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    assert wheel.files[f"{wheel.information}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert wheel.metadata["License-Expression"] == "Apache-2.0"


def test_all_packages_have_and_require_the_version_of_the_chart(
    wheels: dict[str, Wheel],
) -> None:
    chart = yaml.safe_load((ROOT / "helm/trainium-operator/Chart.yaml").read_text(encoding="utf-8"))
    assert {wheel.metadata["Version"] for wheel in wheels.values()} == {chart["appVersion"]}
    for wheel in wheels.values():
        for need in wheel.metadata.get_all("Requires-Dist", []):
            if need.startswith("trainium-"):
                assert need.partition(";")[0].strip().endswith(f"=={chart['appVersion']}"), need


OF_THE_IMAGE = {"trainium-trainer": {"neuronx_distributed", "torch_neuronx", "torch_xla"}}
"""Modules of the vendor's images, which no index has: `backends/choose.py` asks before `backends/nxd` is imported."""


OF_THE_PROGRAM = {
    "trainium-devcluster": {"accelerate", "tokenizers", "torch", "trainium_worker", "transformers", "trl"},
    "trainium-worker": {"accelerate", "lightning", "numpy", "safetensors", "torch", "transformers"},
}
"""Modules that a training program has, or else imports no module of ours that needs them."""


OF_AN_EXTRA = {"trainium-trainer": {"mlflow": "mlflow-skinny", "wandb": "wandb", "lm_eval": "lm-eval"}}
"""Modules of extras that the environment of the tests lacks -> the distribution that is declared for each."""


FOLDER_OF_AN_EXTRA = {"trainium-contract": "trainium_contract/api_server/"}
"""Package that only programs with its extra import."""

PROGRAMS_OF = {"trainium-devcluster": {"trainium-agent", "trainium-operator", "trainium-trainer"}}
"""Not imported but started: pods of the demos run their programs."""


@dataclass(frozen=True, slots=True, order=True)
class Import:
    """One import that is carried out when the program runs."""

    file: str
    module: str
    """The outermost package."""
    late: bool
    """Within a function: the file itself can be imported without it."""


def imports(wheel: Wheel) -> set[Import]:
    """Return the imports of a wheel's files, with constant `import_module` calls, without those for types alone."""
    used_imports = set()
    for path, content in wheel.files.items():
        if path.endswith(".py"):
            for module, late in _imports(ast.parse(content).body, late=False):
                used_imports.add(Import(path, module, late))
    provided = {wheel.package, *sys.stdlib_module_names}
    return {item for item in used_imports if item.module not in provided}


def _imports(body: list[ast.AST] | list[ast.stmt], *, late: bool) -> Iterator[tuple[str, bool]]:
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from _imports(node.orelse, late=late)
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        for name in names:
            yield name.partition(".")[0], late
        inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(list(ast.iter_child_nodes(node)), late=inside)


_provided_by = cache(packages_distributions)
"""Reads the lists of all that is installed: seconds."""


def distributions(module: str) -> set[str]:
    """Return the distributions that provide a module."""
    if module.startswith("trainium_"):
        return {module.replace("_", "-")}  # an editable installation has no list of its modules
    return {canonicalize_name(name) for name in _provided_by().get(module, ())}


def required_distributions(wheel: Wheel, *, extras: bool) -> set[str]:
    """Return the distributions that a wheel requires, without and with all its extras."""
    needs = [Requirement(text) for text in wheel.metadata.get_all("Requires-Dist", [])]
    return {canonicalize_name(need.name) for need in needs if extras or "extra" not in str(need.marker)}


def is_optional(name: str, used_import: Import) -> bool:
    """Return whether an import may come from an extra: a late one, or one of the extra's own folder."""
    return used_import.late or used_import.file.startswith(FOLDER_OF_AN_EXTRA.get(name, "none/"))


@pytest.mark.parametrize("name", NAMES)
def test_every_imported_module_is_declared(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    always, ever = required_distributions(wheel, extras=False), required_distributions(wheel, extras=True)
    undeclared = {
        used_import
        for used_import in imports(wheel)
        if not distributions(used_import.module) & (ever if is_optional(name, used_import) else always)
        and used_import.module not in {*OF_THE_IMAGE.get(name, ()), *OF_THE_PROGRAM.get(name, ())}
        and not (used_import.late and OF_AN_EXTRA.get(name, {}).get(used_import.module) in ever)
    }
    assert not sorted(undeclared)


@pytest.mark.parametrize("name", NAMES)
def test_every_declared_dependency_is_imported(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    extra = OF_AN_EXTRA.get(name, {})
    used = {
        item
        for used_import in imports(wheel)
        for item in (*distributions(used_import.module), extra.get(used_import.module, ""))
    }
    assert required_distributions(wheel, extras=True) - used == PROGRAMS_OF.get(name, set())


def test_only_the_nxd_backend_imports_modules_of_the_vendor(wheels: dict[str, Wheel]) -> None:
    for name, modules in OF_THE_IMAGE.items():
        files = {
            used_import.file
            for used_import in imports(wheels[name])
            if used_import.module in modules and not used_import.late
        }
        assert files
        assert {place.rpartition("/")[0] for place in files} == {"trainium_trainer/backends/nxd"}


def test_trainium_worker_itself_needs_only_the_standard_library(wheels: dict[str, Wheel]) -> None:
    wheel = wheels["trainium-worker"]
    files = {f"trainium_worker/{name}.py" for name in ("__init__", "progress_record", "pulse")}
    assert files <= set(wheel.files)
    assert not [used_import for used_import in imports(wheel) if used_import.file in files]


def test_an_undeclared_import_is_found(wheels: dict[str, Wheel]) -> None:
    wheel = wheels["trainium-operator"]
    source = b"""
import torch
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import numpy
class Late:
    def method(self):
        import matplotlib.pyplot
        importlib.import_module("yaml.nodes")
try:
    import trainium_agent
except ImportError:
    pass
"""
    wheel = type(wheel)(wheel.distribution, wheel.project, {"x.py": source})
    assert {(used_import.module, used_import.late) for used_import in imports(wheel)} == {
        ("torch", False), ("matplotlib", True), ("yaml", True), ("trainium_agent", False),
    }  # fmt: skip
