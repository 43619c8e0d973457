"""Names that mypy checks by the project's plugin, although Python itself takes any name.

The fields of a model that are changed (`replaced`), and those that are read of a status as JSON (`StatusReader`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from trainium_contract.job import GoodputStatus

ROOT = Path(__file__).parents[3]
PLUGIN = "scripts/mypy_contract.py"
_WELL = """
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.status.conditions import Phase

status = TrainingJobStatus().replaced(phase=Phase.RUNNING, waiting_since=None)
ledger = GoodputStatus().replaced(starting=True)
reveal_type(status)
"""
_READING = """
from trainium_contract.status.public import PublicStatus
from trainium_contract.views.status_reader import public_status

status = public_status({})
reveal_type(status.part("goodput").parts("sizes"))
reveal_type(status.part("failedSpec"))
print(status.text("phase"), status.part("goodput").number("ratio"), PublicStatus().desired)
"""
_REFUSED = (
    'status.text("waitingSince")',
    'status.text("phasse")',
    'status.part("gang")',
    'status.part("goodput").number("countedStep")',
    'status.part("goodput").parts("sizes")[0].whole("step")',
    "PublicStatus().next_pod_ordinal",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: what mypy knows of Python and of the contract is kept there."""
    return tmp_path_factory.mktemp("checked")


def checked(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Return the messages of mypy about a file with this text."""
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    settings = folder / "pyproject.toml"
    settings.write_text(
        f'[tool.mypy]\nstrict = true\nmypy_path = "{ROOT / "contract"}"\n'
        f'plugins = ["pydantic.mypy", "{ROOT / PLUGIN}"]\n',
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(folder / "cache")]
    return subprocess.run([*command, str(program)], capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.timeout(300)
def test_a_misspelt_field_and_a_value_of_another_type_are_errors(folder: Path) -> None:
    well = checked(_WELL, folder)
    assert well.returncode == 0, well.stdout + well.stderr
    assert 'note: Revealed type is "trainium_contract.job.TrainingJobStatus"' in well.stdout
    ill = checked(_WELL.replace("waiting_since=None", "waitingsince=None").replace("=True", '="yes"'), folder)
    assert ill.returncode == 1
    assert 'Unexpected keyword argument "waitingsince"' in ill.stdout
    assert 'Argument "starting" to "replaced" of "ContractModel" has incompatible type "str"; expected "bool"' in (
        ill.stdout
    )
    assert "Found 2 errors" in ill.stdout


@pytest.mark.timeout(300)
def test_mypy_refuses_a_view_that_reads_the_memory_or_misspells_a_field(folder: Path) -> None:
    well = checked(_READING, folder)
    assert well.returncode == 0, well.stdout + well.stderr
    assert "StatusReader[trainium_contract.status.ledger.SizeAccount]]" in well.stdout
    assert "StatusReader[trainium_contract.status.failed_spec.FailedSpecStatus]" in well.stdout
    ill = checked(_READING + "\n".join(_REFUSED) + "\n", folder)
    assert ill.returncode == 1
    lines = [int(line.split(":")[1]) for line in ill.stdout.splitlines() if ": error: " in line]
    first = _READING.count("\n") + 1
    assert lines == list(range(first, first + len(_REFUSED))), ill.stdout


def test_a_copy_is_the_one_that_pydantic_would_make_and_leaves_the_model_as_it_was() -> None:
    before = GoodputStatus(starting=True, lost_seconds={"Crash": 2.0})
    ours, theirs = before.replaced(wall_seconds=5.0), before.model_copy(update={"wall_seconds": 5.0})

    assert ours == theirs
    assert type(ours) is GoodputStatus
    assert ours.model_fields_set == theirs.model_fields_set == {"starting", "lost_seconds", "wall_seconds"}
    assert ours.to_wire() == theirs.to_wire()
    assert ours.lost_seconds is before.lost_seconds
    assert (before.wall_seconds, before.model_fields_set) == (0.0, {"starting", "lost_seconds"})
    with pytest.raises(ValidationError):
        ours.starting = False  # type: ignore[misc]


def test_the_operator_and_the_contract_change_models_in_no_other_way() -> None:
    untyped = [
        str(path.relative_to(ROOT))
        for folder in ("contract", "operator")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "model_copy(" in path.read_text(encoding="utf-8")
    ]
    assert untyped == []
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{PLUGIN}"' in settings
