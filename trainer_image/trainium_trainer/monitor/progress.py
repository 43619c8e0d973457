"""Publish the progress of the trainer to its agent: the record of `trainium_worker`, and results next to it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trainium_contract.status.results import FIGURES, RunResults, get_results_path, read_results
from trainium_worker import progress_record
from trainium_worker.progress_record import replace_text

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_contract.status.results import ArtifactReport, EvaluationFigure
    from trainium_trainer.monitor.step_metrics import StepMetrics


class ProgressWriter(progress_record.ProgressWriter):
    """Writes the record and the results of this process; opening it announces generation and attempt at once."""

    def __init__(self, path: Path | None, *, generation: int = 0, attempt: int = 0) -> None:
        """Create or reuse the files; without a path the record has no reader. Raises OSError."""
        super().__init__(path, generation=generation, attempt=attempt)
        self._results_path = None if path is None else get_results_path(path)
        self._results = read_results(path) if path is not None and self.continues else RunResults()

    def record_step(self, figures: StepMetrics, *, seconds: float) -> None:
        """Record a completed step that took `seconds`."""
        self.complete_step(
            {name: getattr(figures, name) for name in ("step", "tokens", "samples", *FIGURES)}, seconds=seconds
        )

    def record_artifact(self, report: ArtifactReport) -> None:
        """Record a complete artifact next to the progress record. Raises OSError."""
        self._write_results(self._results.add_artifact(report))

    def record_evaluation(self, figures: tuple[EvaluationFigure, ...]) -> None:
        """Write the figures of an evaluation next to the progress record. Raises OSError."""
        self._write_results(self._results.set_evaluation(figures))

    def _write_results(self, results: RunResults) -> None:
        self._results = results
        if self._results_path is not None:
            replace_text(self._results_path, json.dumps(results.to_wire()))
