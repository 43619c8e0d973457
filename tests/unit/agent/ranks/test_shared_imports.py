"""Share the modules that ranks import late with other pods."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from trainium_agent.ranks.python_imports import read_recorded
from trainium_agent.ranks.shared_imports import SharedImports
from trainium_contract.wire.messages import MAX_IMPORTED_MODULES, ImportedModules


def write_record(path: Path, *names: str, age: float = 60.0) -> None:
    path.write_text("".join(f"{name}\n" for name in names))
    os.utime(path, (path.stat().st_mtime - age,) * 2)


def test_a_record_is_sent_once_it_is_settled_and_again_when_it_has_grown(tmp_path: Path) -> None:
    imports = SharedImports(str(tmp_path / "imports"))
    assert imports.read() is None
    write_record(tmp_path / "imports", "torch", "torch.optim", "wave", age=0)
    assert imports.read() is None, "ranks still import"
    write_record(tmp_path / "imports", "torch", "torch.optim", "wave")
    first = imports.read()
    assert first == ImportedModules(modules=("torch.optim", "wave")), "importing a module imports its packages"
    assert imports.read() is first
    write_record(tmp_path / "imports", "torch", "torch.optim", "wave", "bdb")
    assert imports.read() == ImportedModules(modules=("torch.optim", "wave", "bdb"))


def test_only_names_of_modules_are_sent_and_a_bounded_number(tmp_path: Path) -> None:
    write_record(tmp_path / "imports", "a-b", "x" * 129, "ünicode", "a..b", *(f"m{n}" for n in range(3000)))
    sent = SharedImports(str(tmp_path / "imports")).read()
    assert sent is not None
    assert sent.modules == tuple(f"m{n}" for n in range(MAX_IMPORTED_MODULES))


@pytest.mark.parametrize("name", ["", "a b", "a-b", "os;x", ".a", "a.", "../x", "1a", "x" * 129, "aé"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"modules\.0"):
        ImportedModules(modules=(name,))


def test_modules_of_another_pod_are_added_to_the_record_once(tmp_path: Path) -> None:
    record = tmp_path / "imports"
    write_record(record, "bdb")
    for _ in range(2):
        SharedImports(str(record)).add(ImportedModules(modules=("wave", "bdb")))
    assert read_recorded(str(record)) == record.read_text().split() == ["bdb", "wave"]


def test_a_program_that_is_not_warm_has_no_record(tmp_path: Path) -> None:
    imports = SharedImports("")
    imports.add(ImportedModules(modules=("wave",)))
    assert imports.read() is None
    unwritable = SharedImports(str(tmp_path / "missing" / "imports"))
    unwritable.add(ImportedModules(modules=("wave",)))
    assert unwritable.read() is None
