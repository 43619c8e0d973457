"""The base model of the second demo: really trained, exported, and kept; tiny here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from trainium_devcluster.errors import ClusterError
from trainium_devcluster.tune import base

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [f"The function number {number} returns the value of the argument." for number in range(300)]
TINY = {
    **base.CONFIGURATION,
    "model": {"numLayers": 1, "hiddenSize": 32, "intermediateSize": 64, "numAttentionHeads": 2, "numKeyValueHeads": 2},
    "data": {"sequenceLength": 16, "tokenizer": {"vocabSize": 300}},
    "batch": {"globalSize": 2, "microSize": 1},
    "steps": 2,
    "schedule": {"kind": "Constant", "warmupSteps": 1},
}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_base_is_trained_once_and_then_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CONFIGURATION", TINY)
    first = base.base_model(TEXTS, lambda _: None, root=tmp_path)
    assert not first.cached
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in first.folder.iterdir()}
    assert json.loads((first.folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert [path.name for path in (tmp_path / "tune").glob("*.partial")] == []
    second = base.base_model(TEXTS, lambda _: None, root=tmp_path)
    assert second.cached
    assert second.folder == first.folder


@pytest.mark.timeout(300)
def test_a_base_that_cannot_be_trained_is_reported_with_its_log_and_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "CONFIGURATION", {**TINY, "steps": 0})
    with pytest.raises(ClusterError, match=r"could not be made, see .*log.txt"):
        base.base_model(TEXTS, lambda _: None, root=tmp_path)
    assert [path.name for path in (tmp_path / "tune").glob("base-*") if path.suffix == ""] == []
