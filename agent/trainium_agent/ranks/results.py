"""Read the results of a run, artifacts and evaluation, that a training process leaves beside its progress record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.results import RunResults

if TYPE_CHECKING:
    from pathlib import Path


def results_path(progress: Path) -> Path:
    """Return the path of the results that belong to a record: a `RunResults` in JSON."""
    return progress.with_name(f"{progress.name}.results")


def read_results(progress: Path) -> RunResults:
    """Read the results beside a record; empty where they cannot be read."""
    try:
        return RunResults.model_validate_json(results_path(progress).read_bytes())
    except (OSError, ValueError):
        return RunResults()
