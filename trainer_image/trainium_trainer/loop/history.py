"""The history that people read, taken up where the state was resumed: rewound, mended, and the monitors after it.

Guarantees:
- A history that cannot be read or written is reported and stops nothing.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from torch import distributed as dist

from trainium_trainer.exits import StorageError
from trainium_trainer.loop.schedule import learning_rate
from trainium_trainer.monitor.efficiency import flops_per_token, peak_flops
from trainium_trainer.monitor.watch import JobDevices, Past, Watch, read_past, stability_rules
from trainium_trainer.monitor.writers import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.backends.base import Mesh
    from trainium_trainer.checkpoint.interfaces import Position
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.data.opening import Data
    from trainium_trainer.loop.run_progress import RunProgress
    from trainium_trainer.monitor.progress import ProgressWriter

_log = logging.getLogger("trainium.train")


class History:
    """The files below `root`; lines that they do not take wait in `aside`, on the node."""

    def __init__(self, root: Path, memory_directory: Path | None, progress: ProgressWriter) -> None:
        self._root = root
        self._progress = progress
        self.aside = None if memory_directory is None else memory_directory / "aside"

    def notify(self, sentence: str) -> None:
        """Report what is wrong with the files."""
        _log.warning("%s", sentence)
        self._progress.notice(sentence)

    def open(self, settings: Settings, course: RunProgress, position: Position, data: Data, mesh: Mesh) -> Watch:
        """Make the files the history up to `position`, on rank 0; the monitors after it. Collective."""
        config, past = settings.config, Past()
        if mesh.rank == 0:
            with self._tolerant():
                Recorder.rewind(self._root, position.step)
            with self._tolerant():
                past = read_past(self._root, stability_rules(config.monitor), self.aside, last=position.step)
        watch = _watch(settings, past, mesh)
        waiting = self._samples_aside(mesh, position.step) if config.monitor.record_samples else {}
        if mesh.rank == 0:
            with self._tolerant():
                self._mend(config, course, position, data, watch, waiting)
        return watch

    def _samples_aside(self, mesh: Mesh, step: int) -> dict[str, list[int]]:
        """Return, on rank 0, the samples of a step that wait on any node. Collective."""
        mine = Recorder.samples_aside(step, self.aside)
        if mesh.world_size == 1:
            return mine
        gathered: list[dict[str, list[int]]] | None = [{} for _ in range(mesh.world_size)] if mesh.rank == 0 else None
        dist.gather_object(mine, gathered, dst=0, group=mesh.world)
        return {name: samples for found in gathered or () for name, samples in found.items()}

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self.notify(f"{error}; training goes on without the earlier history")

    def _mend(
        self,
        config: TrainingConfig,
        course: RunProgress,
        position: Position,
        data: Data,
        watch: Watch,
        waiting: dict[str, list[int]],
    ) -> None:
        """Write what a rank that was lost right after the resumed step did not get to write of it."""
        if position.loss is None or position.grad_norm is None:
            return
        batch = position.batch or config.batch.global_size
        if Recorder.lacks(self._root, position.step, self.aside):
            figures, _ = watch.step(
                step=position.step,
                loss=position.loss,
                grad_norm=position.grad_norm,
                learning_rate=learning_rate(config, course.done(position) - 1),
                tokens=position.tokens,
                samples=position.samples,
                batch=batch,
            )
            Recorder.mend(self._root, figures, self.aside)
        if config.monitor.record_samples:
            numbers = data.training.numbers(position.samples - batch, batch)
            Recorder.mend_samples(self._root, position.step, numbers, self.aside, waiting)


def _watch(settings: Settings, past: Past, mesh: Mesh) -> Watch:
    config = settings.config
    peak = config.monitor.peak_tflops
    return Watch(
        config.monitor,
        past,
        JobDevices(
            device=mesh.device,
            count=mesh.world_size,
            nodes=mesh.world_size // settings.launch.local_world_size,
            peak=peak_flops(mesh.device) if peak is None else peak * 1e12,
        ),
        flops_per_token=flops_per_token(
            settings.shape,
            config.data.sequence_length,
            trained=settings.choice.trained if config.tuning.freezes else None,
        ),
        of_pairs=config.tuning.objective is not None,
    )
