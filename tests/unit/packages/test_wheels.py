"""Content of each wheel: one package, its licence, its programs, and nothing of the others."""

from __future__ import annotations

import ast
import configparser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from conftest import Wheel

ROOT = Path(__file__).parents[3]

HELD = {
    "trainium-agent": (
        "trainium_agent",
        {"checks", "coordinator", "exits", "generation", "hang", "lifecycle", "linux", "ranks", "workload"},
        {"py.typed"},
    ),
    "trainium-client": ("trainium_client", {"commands", "render", "views"}, {"py.typed"}),
    "trainium-contract": (
        "trainium_contract",
        {
            "api_server", "definition", "faults", "models", "pages", "requirements", "spec", "status", "trainer",
            "views", "wire",
        },
        {"py.typed"},
    ),
    "trainium-devcluster": (
        "trainium_devcluster",
        {"binaries", "controlplane", "fleet", "node", "nodepool", "processes", "demos", "tune"},
        {"py.typed", "tune/job.yaml"},
    ),
    "trainium-operator": (
        "trainium_operator",
        {"cluster", "coordinator", "endpoints", "http", "monitoring", "plan"},
        {"py.typed"},
    ),
    "trainium-simulator": ("trainium_simulator", {"virtual"}, {"py.typed"}),
    "trainium-trainer": (
        "trainium_trainer",
        {
            "artifacts", "backends", "checkpoint", "checks", "commands", "compile", "configuration", "data", "evaluate",
            "loop", "models", "monitor", "storage", "trackers", "tuning", "weights",
        },
        {"py.typed"},
    ),
    "trainium-worker": ("trainium_worker", {"dcp", "hooks"}, {"py.typed"}),
}  # fmt: skip
"""Distribution -> its package, the folders in it, its files that are not Python."""

PROGRAMS = {
    "trainium-agent": {"trainium-agent": "trainium_agent.__main__:main"},
    "trainium-client": {
        "kubectl-trn": "trainium_client.commands.main:main",
        "kubectl_complete-trn": "trainium_client.commands.complete:main",
    },
    "trainium-contract": {},
    "trainium-devcluster": {"trainium-devcluster": "trainium_devcluster.cli:main"},
    "trainium-operator": {"trainium-operator": "trainium_operator.main:main"},
    "trainium-simulator": {},
    "trainium-trainer": {
        "trainium-trainer": "trainium_trainer.cli:main",
    },
    "trainium-worker": {},
}


def test_there_is_a_wheel_for_each_package(wheels: dict[str, Wheel]) -> None:
    assert set(wheels) == set(HELD) == set(PROGRAMS)
    assert {wheel.distribution.name for wheel in wheels.values()} == {
        "agent", "client", "contract", "devcluster", "operator", "simulator", "trainer_image", "worker",
    }  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_a_wheel_holds_the_folders_that_are_listed_here(wheels: dict[str, Wheel], name: str) -> None:
    package, folders, others = HELD[name]
    wheel = wheels[name]
    top = {path.partition("/")[0] for path in wheel.files}
    assert top == {package, wheel.information}
    inside = {path.removeprefix(f"{package}/") for path in wheel.files if path.startswith(f"{package}/")}
    assert {path.partition("/")[0] for path in inside if "/" in path} == folders
    assert {path for path in inside if not path.endswith(".py")} == others


@pytest.mark.parametrize("name", HELD)
def test_no_module_of_a_package_is_left_out_or_changed(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    source = wheel.distribution / wheel.package
    here = {str(file.relative_to(wheel.distribution)): file.read_bytes() for file in source.rglob("*.py")}
    assert {path: content for path, content in wheel.files.items() if path.endswith(".py")} == here


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wheel_has_its_programs_and_each_is_a_function_in_it(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    listed = configparser.ConfigParser(delimiters="=")
    listed.optionxform = str  # type: ignore[assignment,method-assign]  # names as they are
    listed.read_string(wheel.files.get(f"{wheel.information}/entry_points.txt", b"[console_scripts]").decode())
    assert dict(listed["console_scripts"]) == PROGRAMS[name]
    for place in PROGRAMS[name].values():
        module, _, function = place.partition(":")
        tree = ast.parse(wheel.files[f"{module.replace('.', '/')}.py"])
        assert function in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("name", HELD)
def test_a_wheel_has_the_licence_itself_not_a_link_to_it(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    assert wheel.files[f"{wheel.information}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert wheel.metadata["License-Expression"] == "Apache-2.0"


def test_all_packages_have_the_version_of_the_chart_and_ask_for_each_other_at_that_one(
    wheels: dict[str, Wheel],
) -> None:
    chart = yaml.safe_load((ROOT / "helm/trainium-operator/Chart.yaml").read_text(encoding="utf-8"))
    assert {wheel.metadata["Version"] for wheel in wheels.values()} == {chart["appVersion"]}
    for wheel in wheels.values():
        for need in wheel.metadata.get_all("Requires-Dist", []):
            if need.startswith("trainium-"):
                assert need.partition(";")[0].strip().endswith(f"=={chart['appVersion']}"), need
