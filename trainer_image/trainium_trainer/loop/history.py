"""Rewind and complete the history of a run at the position where its state was resumed, then the monitors'.

Guarantees:
- A history that cannot be read or written is reported and stops nothing.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from torch import distributed as dist

from trainium_trainer.checkpoint.root.metrics_copy import RecordCopies
from trainium_trainer.exits import StorageError
from trainium_trainer.loop.schedule import compute_learning_rate
from trainium_trainer.monitor.efficiency import compute_flops_per_token, find_peak_flops
from trainium_trainer.monitor.step_metrics import StepMetrics
from trainium_trainer.monitor.step_monitor import (
    JobDevices,
    MonitorState,
    StepMonitor,
    create_stability_rules,
    read_monitor_state,
)
from trainium_trainer.monitor.writers import Recorder
from trainium_trainer.storage import open_storage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.backends.base import Mesh
    from trainium_trainer.checkpoint.interfaces import Position
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.data.dataset import Dataset
    from trainium_trainer.loop.run_length import RunLength
    from trainium_trainer.monitor.progress import ProgressWriter

_log = logging.getLogger("trainium.train")


class History:
    """The files below `root`; lines that cannot be written there wait in `fallback`, on the node."""

    def __init__(self, root: Path, memory_directory: Path | None, progress: ProgressWriter) -> None:
        self._root = root
        self._progress = progress
        self.fallback = None if memory_directory is None else memory_directory / "aside"

    def notify(self, message: str) -> None:
        """Report the problems of the files."""
        _log.warning("%s", message)
        self._progress.write_notice(message)

    def open(
        self, settings: Settings, run_length: RunLength, position: Position, data: Dataset, mesh: Mesh
    ) -> StepMonitor:
        """Cut the files to the history up to `position`, on rank 0, then the monitors'. Collective."""
        config, state = settings.config, MonitorState()
        if mesh.rank == 0:
            RecordCopies(config.checkpoint, open_storage(config.checkpoint.path)).fetch()
            with self._report_errors():
                Recorder.rewind(self._root, position.step)
            with self._report_errors():
                state = read_monitor_state(
                    self._root, create_stability_rules(config.monitor), self.fallback, last=position.step
                )
        monitor = _build_monitor(settings, state, mesh)
        waiting = self._read_fallback_samples(mesh, position.step) if config.monitor.record_samples else {}
        if mesh.rank == 0:
            with self._report_errors():
                self._append_missing_line(config, run_length, position, data, monitor, waiting)
        return monitor

    def _read_fallback_samples(self, mesh: Mesh, step: int) -> dict[str, list[int]]:
        """Return on rank 0 the recorded samples of a step that wait on any node. Collective."""
        own_records = Recorder.read_fallback_samples(step, self.fallback)
        if mesh.world_size == 1:
            return own_records
        gathered: list[dict[str, list[int]]] | None = [{} for _ in range(mesh.world_size)] if mesh.rank == 0 else None
        dist.gather_object(own_records, gathered, dst=0, group=mesh.world)
        return {name: samples for records in gathered or () for name, samples in records.items()}

    @contextlib.contextmanager
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self.notify(f"{error}; training continues without the earlier history")

    def _append_missing_line(
        self,
        config: TrainingConfig,
        run_length: RunLength,
        position: Position,
        data: Dataset,
        monitor: StepMonitor,
        waiting: dict[str, list[int]],
    ) -> None:
        """Write the line of the resumed step if the rank that should have written it failed right after the step."""
        if position.loss is None or position.grad_norm is None:
            return
        batch = position.batch or config.batch.global_size
        if Recorder.is_missing_line(self._root, position.step, self.fallback):
            measured = StepMetrics(
                step=position.step,
                loss=position.loss,
                grad_norm=position.grad_norm,
                learning_rate=compute_learning_rate(config, run_length.count_completed_steps(position) - 1),
                tokens=position.tokens,
                samples=position.samples,
                batch=batch,
            )
            metrics, _ = monitor.step(measured)
            Recorder.append_missing_line(self._root, metrics, self.fallback)
        if config.monitor.record_samples:
            numbers = data.training.list_numbers(position.samples - batch, batch)
            Recorder.append_missing_samples(self._root, position.step, numbers, self.fallback, waiting)


def _build_monitor(settings: Settings, state: MonitorState, mesh: Mesh) -> StepMonitor:
    config = settings.config
    peak = config.monitor.peak_tflops
    return StepMonitor(
        config.monitor,
        state,
        JobDevices(
            device=mesh.device,
            count=mesh.world_size,
            nodes=mesh.world_size // settings.launch.local_world_size,
            peak=find_peak_flops(mesh.device) if peak is None else peak * 1e12,
        ),
        flops_per_token=compute_flops_per_token(
            settings.shape,
            config.data.sequence_length,
            trained=settings.trainable.trained if config.tuning.freezes else None,
        ),
        of_pairs=config.tuning.objective is not None,
    )
