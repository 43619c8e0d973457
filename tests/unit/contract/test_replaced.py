"""Changing a field of a model is checked by mypy, although Python itself takes any name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checked_by_mypy import PLUGINS, ROOT, checked
from pydantic import ValidationError

from trainium_contract.job import GoodputStatus

if TYPE_CHECKING:
    from pathlib import Path

_WELL = """
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.status.conditions import Phase

status = TrainingJobStatus().replaced(phase=Phase.RUNNING, waiting_since=None)
ledger = GoodputStatus().replaced(starting=True)
reveal_type(status)
"""


@pytest.mark.timeout(300)
def test_a_misspelt_field_and_a_value_of_another_type_are_errors(tmp_path: Path) -> None:
    well = checked(_WELL, tmp_path)
    assert well.returncode == 0, well.stdout + well.stderr
    assert 'note: Revealed type is "trainium_contract.job.TrainingJobStatus"' in well.stdout
    ill = checked(_WELL.replace("waiting_since=None", "waitingsince=None").replace("=True", '="yes"'), tmp_path)
    assert ill.returncode == 1
    assert 'Unexpected keyword argument "waitingsince"' in ill.stdout
    assert 'Argument "starting" to "replaced" of "ContractModel" has incompatible type "str"; expected "bool"' in (
        ill.stdout
    )
    assert "Found 2 errors" in ill.stdout


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
        for room in ("contract", "operator")
        for path in sorted((ROOT / room).rglob("*.py"))
        if "model_copy(" in path.read_text(encoding="utf-8")
    ]
    assert untyped == []
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"scripts/{plugin}"' in settings for plugin in PLUGINS)
