"""Names that mypy checks by the project's plugin, although Python itself takes any name.

The fields of a model that are changed (`replaced`), and those that are read of a status as JSON (`StatusReader`).
"""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from trainium_contract.job import GoodputStatus

ROOT = Path(__file__).parents[3]
PLUGIN = "scripts/mypy_contract.py"
_VALID = """
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.status.conditions import Phase

written = TrainingJobStatus().replaced(phase=Phase.RUNNING, waiting_since=None)
ledger = GoodputStatus().replaced(starting=True)
reveal_type(written)
"""
_READING = """
from trainium_contract.status.public import PublicStatus
from trainium_contract.views.status_reader import read_public_status

view = read_public_status({})
reveal_type(view.read_part("goodput").read_parts("sizes"))
reveal_type(view.read_part("failedSpec"))
print(view.read_text("phase"), view.read_part("goodput").read_number("ratio"), PublicStatus().desired)
"""
_REFUSED_READS = (
    'view.read_text("waitingSince")',
    'view.read_text("phasse")',
    'view.read_part("gang")',
    'view.read_part("goodput").read_number("countedStep")',
    'view.read_part("goodput").read_parts("sizes")[0].read_integer("step")',
    "PublicStatus().next_pod_ordinal",
)


def run_mypy(folder: Path, **programs: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of errors in each program, and all output, of one run of mypy, whose start takes longest."""
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    settings = folder / "pyproject.toml"
    settings.write_text(
        f'[tool.mypy]\nstrict = true\nmypy_path = "{ROOT / "contract"}"\n'
        f'plugins = ["pydantic.mypy", "{ROOT / PLUGIN}"]\n',
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(folder / "cache")]
    files = [f"{name}.py" for name in programs]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    return {name: [line for line in errors if line.startswith(f"{name}.py:")] for name in programs}, done.stdout


@pytest.mark.timeout(300)
def test_mypy_rejects_misspelt_and_internal_fields_and_wrong_types(tmp_path: Path) -> None:
    wrong = _VALID.replace("waiting_since=None", "waitingsince=None").replace("=True", '="yes"')
    invalid = wrong + _READING + "\n".join(_REFUSED_READS) + "\n"
    errors, output = run_mypy(tmp_path, valid=_VALID + _READING, invalid=invalid)
    assert errors["valid"] == []
    revealed = "\n".join(line for line in output.splitlines() if line.startswith("valid.py:"))
    assert 'note: Revealed type is "trainium_contract.job.TrainingJobStatus"' in revealed
    assert "StatusReader[trainium_contract.status.ledger.SizeAccount]]" in revealed
    assert "StatusReader[trainium_contract.status.failed_spec.FailedSpecStatus]" in revealed
    unexpected, incompatible, *refused = errors["invalid"]
    assert 'Unexpected keyword argument "waitingsince"' in unexpected
    wanted = 'Argument "starting" to "replaced" of "ContractModel" has incompatible type "str"; expected "bool"'
    assert wanted in incompatible
    first = (_VALID + _READING).count("\n") + 1
    assert [int(line.split(":")[1]) for line in refused] == list(range(first, first + len(_REFUSED_READS))), output


def test_replaced_equals_model_copy() -> None:
    before = GoodputStatus(starting=True, lost_seconds={"Crash": 2.0})
    replaced, copied = before.replaced(wall_seconds=5.0), before.model_copy(update={"wall_seconds": 5.0})

    assert replaced == copied
    assert type(replaced) is GoodputStatus
    assert replaced.model_fields_set == copied.model_fields_set == {"starting", "lost_seconds", "wall_seconds"}
    assert replaced.to_wire() == copied.to_wire()
    assert replaced.lost_seconds is before.lost_seconds
    assert (before.wall_seconds, before.model_fields_set) == (0.0, {"starting", "lost_seconds"})
    with pytest.raises(ValidationError):
        replaced.starting = False  # type: ignore[misc]


def test_operator_and_contract_never_call_model_copy() -> None:
    untyped = [
        str(path.relative_to(ROOT))
        for folder in ("contract", "operator")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "model_copy(" in path.read_text(encoding="utf-8")
    ]
    assert untyped == []
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{PLUGIN}"' in settings
