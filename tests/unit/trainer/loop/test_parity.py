"""Run the first steps of `make parity`: one rank against `transformers` and AdamW of torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.conftest import Job

OVERRIDES = {
    "HLAT": ["model.tieEmbeddings=false"],
    "Llama 3.1": [
        "schedule.kind=WarmupStableDecay",
        "schedule.decaySteps=4",
        "optimizer.decayScope=Matrices",
        "model.headDim=16",
        "model.ropeTheta=500",
        "model.ropeScaling.originalMaxPositions=64",
    ],
}


@pytest.mark.parametrize("settings", OVERRIDES)
def test_the_curve_is_that_of_transformers_and_the_exported_model_too(
    launch: Callable[..., Job], tmp_path: Path, settings: str
) -> None:
    import torch

    from benchmarks.parity import reference
    from benchmarks.parity.trainer_runs import export_newest
    from trainium_trainer.configuration.config import load

    overrides = [*OVERRIDES[settings], "steps=12"]
    config = load(tmp_path / "trainer.yaml", overrides)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        expected = reference.train_reference(config)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    job = launch(1, "run", overrides).finish()
    assert job.losses() == pytest.approx(expected.losses, rel=1e-5)
    assert job.losses()[-1] < job.losses()[0] - 0.3
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").symlink_to(job.folder)
    exported, model = export_newest(tmp_path / "runs", reference.build_shape(config))
    tokens, _ = next(reference.iterate_batches(config))
    with torch.no_grad():
        logits = model(tokens)
        trained = expected.model(tokens).logits
    torch.testing.assert_close(
        logits, reference.compute_logits(reference.load_model(exported), tokens), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(logits, trained, rtol=1e-3, atol=1e-4)
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_every_row_has_a_separate_name_and_the_passes_that_it_states() -> None:
    from benchmarks.parity.rows import BASE, GROUPS, SETTINGS
    from trainium_contract.models.families import FAMILIES
    from trainium_contract.sizes import count_micro_batches

    rows = [row for group in GROUPS.values() for row in group]
    assert len({row.name for row in rows}) == len(rows)
    compared = {settings.base.family["model_type"] for settings in SETTINGS["families"] if settings.base}
    assert compared == FAMILIES.keys()
    for row in rows:
        micro = int(row.set_options[0].removeprefix("batch.microSize="))
        assert count_micro_batches(BASE["batch"]["globalSize"], micro, row.data_parallel) == row.accumulation


def test_the_page_shows_the_worst_layout_and_failed_rows(tmp_path: Path) -> None:
    from benchmarks.parity.document import write_report

    row: dict[str, Any] = {"date": "2026-01-01", "torch": "1", "loss": 1.0, "trainedLogits": 0.1, "passed": True}
    tuned = row | {"settings": "C", "trainedParameters": 2e-3}
    failed = {"date": "2026-01-02", "torch": "1", "passed": False, "problem": "rank 1 ended with 76"}
    report = {
        "versions": {"transformers": "2"},
        "trl": "3",
        "steps": 2,
        "tolerance": 1e-4,
        "logitsTolerance": 1e-3,
        "adapterTolerance": 1e-4,
        "mergedTolerance": 1e-5,
        "familySteps": 1,
        "adaptersOfPeft": {"C": 1e-7},
        "settings": {"A": "about", "B": "no rows"},
        "tunings": {"C": "tuned"},
        "rows": [
            row | {"name": "a1", "settings": "A", "greatestDifference": 1e-7},
            row | {"name": "a2", "settings": "A", "greatestDifference": 2e-7},
            tuned | {"name": "c1", "greatestDifference": 0.5, "passed": False},
            failed | {"name": "c2", "settings": "C"},
        ],
    }
    write_report(report, tmp_path / "parity.md", tmp_path / "parity.png")
    page = (tmp_path / "parity.md").read_text()
    assert "| A | about | 2 | 1.0000 | 2.0e-07 |  | 1.0e-01 | passed |" in page
    problems = "**failed**: c1, too different; **failed**: c2, rank 1 ended with 76"
    assert f"| C | tuned | 2 | 1.0000 | 5.0e-01 | 2.0e-03 | 1.0e-01 | {problems} |" in page
    assert "no rows" not in page
    assert "2 of 4 layouts passed." in page
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")


def test_every_row_was_run_and_the_page_is_written_from_the_results(tmp_path: Path) -> None:
    from benchmarks.harness.conditions import ROOT
    from benchmarks.parity.__main__ import RESULTS
    from benchmarks.parity.document import write_report
    from benchmarks.parity.rows import GROUPS

    report = json.loads(RESULTS.read_text())
    names = [row.name for group in GROUPS.values() for row in group]
    assert [row["name"] for row in report["rows"]] == names
    write_report(report, tmp_path / "parity.md", tmp_path / "parity.png")
    assert (ROOT / "docs/parity.md").read_text() == (tmp_path / "parity.md").read_text(), "make parity"
