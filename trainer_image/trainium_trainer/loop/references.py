"""Compute the reference model's log-probabilities of all answers before training and store them with the examples.

    reference-<key>.f32    the log-probability of each example's answer; NaN until it is computed

The key is a digest of the reference's files, the resolved model and the configuration without the fields that do not
affect the values. A value may be computed again for a field that does not matter; it is never one of another model.

Guarantees:
- Each answer is computed once per job, at any number of ranks and restarts: a block of answers is written as soon as it
  is computed, and a node receives from another node what it lacks.
- All ranks use the same values.
- The reference model needs no extra memory: it occupies the state before the run's weights are loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed as dist

from trainium_trainer.data.batches.samples import SampleRules, Samples
from trainium_trainer.data.loader import build_micro_batch
from trainium_trainer.exits import NumericalError
from trainium_trainer.storage.posix import PosixStorage

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from trainium_trainer.backends.base import Backend, Mesh
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.data.dataset import Dataset
    from trainium_trainer.data.examples.sample_sources import PairSampleSource
    from trainium_trainer.weights.base import BaseWeights

_log = logging.getLogger("trainium.train")
_ROUNDS = 32
"""Micro-batches of each rank between two writes."""
_WITHOUT_EFFECT: dict[str, Any] = {
    "steps": True,
    "epochs": True,
    "optimizer": True,
    "schedule": True,
    "nonFiniteTolerance": True,
    "seed": True,
    "artifacts": True,
    "evaluate": True,
    "monitor": True,
    "checkpoint": True,
    "batch": {"globalSize": True, "tolerance": True},
    "data": {"cacheDirectory": True, "seed": True, "workers": True, "prefetchSteps": True},
    "tuning": {"objective": {"beta": True, "labelSmoothing": True}},
}
"""Fields of the configuration that do not affect a reference's log-probabilities; every other one is in the key."""


def load_references(settings: Settings, data: Dataset, reference: BaseWeights, backend: Backend) -> None:
    """Add the log-probabilities of their answers to the samples; compute those that no rank has. Collective.

    The values of the backend's state are undefined afterwards. Raises UserError, StorageError, NumericalError.
    """
    assert isinstance(data.training, Samples)
    sample_sources: list[PairSampleSource] = [
        *data.training.sources,
        *(data.validation.sources if data.validation is not None else ()),
    ]
    key = _compute_key(settings, reference, backend.mesh.device)
    filled = False
    log_probs: dict[Path, NDArray[np.float32]] = {}
    for sample_source in sample_sources:
        folder = sample_source.stored.folder
        if folder not in log_probs:
            table = _Table(folder / f"reference-{key}.f32", len(sample_source.stored), settings, backend.mesh)
            table.exchange()
            if len(table.find_missing()) and not filled:
                backend.initialize(settings.config.seed, reference)
                backend.load_frozen(reference)
                filled = True
            _compute(sample_source, table, data.training.rules, settings.config.batch.micro_size, backend)
            log_probs[folder] = table.values
        sample_source.references = log_probs[folder]


def _compute_key(settings: Settings, reference: BaseWeights, device: torch.device) -> str:
    """Return the digest of all that determines the log-probabilities of examples by a reference."""
    config = _drop_fields(settings.config.to_wire(), _WITHOUT_EFFECT)
    parts = [reference.digest, reference.versions, settings.shape.to_json(), config, torch.__version__, device.type]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _drop_fields(fields: dict[str, Any], left_out: dict[str, Any]) -> dict[str, Any]:
    """Return nested fields without those that `left_out` marks."""
    return {
        name: _drop_fields(value, mark) if isinstance(mark := left_out.get(name, {}), dict) and mark else value
        for name, value in fields.items()
        if left_out.get(name) is not True
    }


def _compute(
    sample_source: PairSampleSource, table: _Table, rules: SampleRules, micro_size: int, backend: Backend
) -> None:
    """Compute the missing log-probabilities block by block. Collective."""
    mesh, missing = backend.mesh, table.find_missing()
    block = _ROUNDS * micro_size * mesh.data_size
    for start in range(0, len(missing), block):
        pairs = missing[start : start + block]
        if mesh.rank == 0:
            _log.info("reference: %d of %d pairs of %s", start, len(missing), sample_source.name)
        rounds = -(-len(pairs) // (micro_size * mesh.data_size))
        own_pairs = pairs[mesh.data_rank * rounds * micro_size : (mesh.data_rank + 1) * rounds * micro_size]
        batches = []
        for first in range(0, rounds * micro_size, micro_size):
            samples = [
                sample_source.read_pair(rules, 0, 2 * int(pair)) for pair in own_pairs[first : first + micro_size]
            ]
            batches.append(build_micro_batch([*samples, *[None] * (micro_size - len(samples))], rules))
        log_probs = backend.compute_reference_log_probs(batches).numpy()[: 2 * len(own_pairs)]
        table.values.reshape(-1, 2)[own_pairs] = log_probs.reshape(-1, 2)
        table.exchange(pairs)
        if not np.isfinite(table.values.reshape(-1, 2)[pairs]).all():
            raise NumericalError(
                f"the reference model gives an answer of {sample_source.name} a probability that is no number: check "
                "the folder's weights, or set precision to Float32"
            )
        table.write()


class _Table:
    """The log-probabilities of one folder of examples, on this rank and in its node's cache."""

    def __init__(self, file: Path, examples: int, settings: Settings, mesh: Mesh) -> None:
        """Read the values in the cache. Raises OSError."""
        self._file = file
        self._group = mesh.world if mesh.world_size > 1 else None
        self._writes = settings.launch.local_rank == 0
        self.values: NDArray[np.float32] = np.full(examples, np.nan, np.float32)
        if file.is_file() and file.stat().st_size == self.values.nbytes:
            self.values = np.fromfile(file, np.float32)

    def find_missing(self) -> NDArray[np.int64]:
        """Return the indices of the pairs without a value."""
        return np.flatnonzero(np.isnan(self.values.reshape(-1, 2)).any(1))

    def exchange(self, pairs: NDArray[np.int64] | None = None) -> None:
        """Receive the values that other ranks have, of some pairs or of all. Collective."""
        if self._group is None:
            return
        table = self.values.reshape(-1, 2)
        chosen = slice(None) if pairs is None else pairs
        shared = torch.from_numpy(np.nan_to_num(table[chosen], nan=-np.inf, neginf=-np.inf))
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        table[chosen] = np.where(np.isinf(shared.numpy()), np.nan, shared.numpy())

    def write(self) -> None:
        """Replace the file in the cache, on one rank of the node; a cache that cannot be written stops nothing."""
        if not self._writes:
            return
        try:
            PosixStorage(self._file.parent).write(self._file.name, self.values.tobytes())
        except OSError as error:
            self._writes = False
            _log.warning("%s: cannot be written (%s), so a restart computes it again", self._file, error.strerror)
