"""The nxd backend without its packages, whole or in part: one sentence, and nothing else is touched."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, cast

import pytest

from trainium_contract.trainer.parallelism import BackendChoice
from trainium_trainer.backends.choose import make_backend
from trainium_trainer.backends.nxd.presence import PACKAGES
from trainium_trainer.exits import UserError, find_exit_code

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainium_trainer.configuration.config import Settings


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is looked through for packages before all others."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in (*PACKAGES, "trainium_trainer.backends.nxd.backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in PACKAGES:  # transformers takes what it finds there for the real ones
        sys.modules.pop(name, None)


def refusal() -> UserError:
    with pytest.raises(UserError) as refused:
        make_backend(BackendChoice.NXD, cast("Settings", None))
    return refused.value


@pytest.mark.skipif(any(map(importlib.util.find_spec, PACKAGES)), reason="packages of backend Nxd are installed")
def test_importing_the_backend_names_what_is_missing_and_where_it_is(packages: Path) -> None:
    error = refusal()
    assert "backend is Nxd, but torch_xla cannot be imported" in str(error)
    assert "Neuron SDK 2.30" in str(error)
    assert find_exit_code(error) == 64


def test_a_package_that_lacks_another_is_reported_by_the_missing_one(packages: Path) -> None:
    (packages / "torch_xla.py").touch()
    (packages / "neuronx_distributed.py").write_text("import torch_neuronx_of_no_machine\n")
    assert "but torch_neuronx_of_no_machine cannot be imported" in str(refusal())
