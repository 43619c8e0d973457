"""Compute the cache key of the graphs of a job at one size, and fill the node's cache from the shared one.

Guarantees:
- `key` is a pure function of its `GraphInputs`.
- Settings that do not change a graph (data, steps, learning rate, location of checkpoints) are not in it, so that runs
  with other data share compiled graphs.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.addresses import is_address
from trainium_contract.trainer.parallelism import BackendChoice
from trainium_contract.trainer.tuning import TuningConfig
from trainium_contract.wire import worker_env
from trainium_contract.worker_process.compile_cache import LocalCache, SharedCache
from trainium_trainer.backends.nxd.extraction import find_ranks_with_distinct_graphs
from trainium_trainer.exits import UserError
from trainium_trainer.neuron_environment import COMPILER_FLAGS, uses_neuron

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.configuration.config import Settings


_LENGTH = 32
_NOT_COMPILED = frozenset({"learning_rate"})  # an input of the update


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInputs:
    """Everything on which the graphs of one size depend."""

    image: str
    """The trainer's image, preferably with its digest; it identifies compiler and libraries."""
    flags: tuple[str, ...]
    """The options of the compiler, in order."""
    model: dict[str, Any]
    """Every field of the model's shape."""
    compute: dict[str, Any]
    """Precision, recomputation, parallelism, sequence length, masks, micro-batch, optimizer."""
    world_size: int
    """The ranks of the job at this size, because groups of ranks are part of a graph."""


def describe_graphs(settings: Settings, *, image: str, flags: Sequence[str]) -> GraphInputs:
    """Return the graphs of a configuration at the size of its launch."""
    config = settings.config
    optimizer = {name: value for name, value in config.optimizer if name not in _NOT_COMPILED}
    compute = {
        "backend": config.backend,
        "device": config.device,
        "precision": config.precision,
        "recompute": config.recompute,
        "torchCompile": config.torch_compile,
        "dataParallel": config.data_parallel,
        "parallelism": config.parallelism.to_wire(),
        "sequenceLength": config.data.sequence_length,
        "maskDocuments": config.data.masked,
        "microSize": config.batch.micro_size,
        "optimizer": optimizer,
        # A pipeline's schedule depends on their number; elsewhere all have the same graph.
        "microBatches": settings.passes if config.parallelism.pipeline > 1 else 0,
    }
    # Entries of versions that compiled only one kind of data-parallel rank are incomplete.
    if config.backend is not BackendChoice.NATIVE and (kinds := find_ranks_with_distinct_graphs(settings)) != (0,):
        compute["dataRanks"] = kinds
    if config.tuning != TuningConfig():
        compute["tuning"] = config.tuning.to_wire()
    return GraphInputs(
        image=image,
        flags=tuple(flags),
        model=settings.shape.to_json(),
        compute=compute,
        world_size=settings.launch.world_size,
    )


def hash_graphs(graphs: GraphInputs) -> str:
    """Return a key of 32 hexadecimal digits that is equal only for equal graphs."""
    text = json.dumps(asdict(graphs), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


CACHE_URL = "NEURON_COMPILE_CACHE_URL"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_NEURON_DEFAULT = "/var/tmp/neuron-compile-cache"  # noqa: S108 - Neuron's own default
_COMPILERS = ("trainium-trainer", "torch", "neuronx-cc", "torch-neuronx", "torch-xla", "neuronx-distributed")
_NOT_IN_KEY = ("--retry_failed_compilation", "--cache_dir")


def find_local_cache(config: TrainingConfig) -> LocalCache | None:
    """Return the compiler's folder on this node; None for one in S3, which the compiler accesses itself."""
    if uses_neuron(config):
        location = config.neuron.cache_directory or os.environ.get(CACHE_URL) or _NEURON_DEFAULT
        return None if is_address(location) else LocalCache(Path(location))
    cache_home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return LocalCache(Path(os.environ.get(INDUCTOR_CACHE) or f"{cache_home}/trainium/compiled"))


def find_shared_cache(config: TrainingConfig) -> SharedCache | None:
    """Return the folder that nodes share; None if none is configured."""
    location = config.neuron.shared_cache_directory
    return SharedCache(Path(location)) if location else None


def compute_key(settings: Settings) -> str:
    """Return the key of a configuration at the size of its launch, after its variables were set."""
    flags = shlex.split(os.environ.get(COMPILER_FLAGS, "")) if uses_neuron(settings.config) else []
    flags_in_key = [flag for flag in flags if not flag.startswith(_NOT_IN_KEY)]
    return hash_graphs(
        describe_graphs(settings, image=os.environ.get(worker_env.ENV_IMAGE) or _read_versions(), flags=flags_in_key)
    )


def _read_versions() -> str:
    """Return the versions of the compiler and libraries, for runs without an image name."""
    versions = {}
    for name in _COMPILERS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" not in versions:
        raise UserError("torch is not installed: run this in the trainer's image")
    return " ".join(f"{name}={version}" for name, version in versions.items())


_EXTRACTION = "NEURON_EXTRACT_GRAPHS_ONLY"
_log = logging.getLogger("trainium.compile")


def refuse_extraction() -> None:
    """Raise UserError under neuron_parallel_compile, because training would save meaningless values."""
    if os.environ.get(_EXTRACTION, "0") not in {"", "0"}:
        raise UserError(
            f"{_EXTRACTION} is set (neuron_parallel_compile does that): results would mean nothing, and be saved; use "
            "`trainium-trainer precompile`, which writes nothing but compiled graphs"
        )


def fill_local_cache(settings: Settings) -> None:
    """Copy the graphs of this run's size from the shared cache, where both caches are folders."""
    shared, local = find_shared_cache(settings.config), find_local_cache(settings.config)
    if shared is None or local is None:
        return
    key = compute_key(settings)
    try:
        local.folder.mkdir(parents=True, exist_ok=True)
        with (local.folder / ".trainium-fill").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # removed when the process ends
            if local.has(key):
                return
            entry = shared.fetch(key, local)
    except OSError as error:
        _log.warning("the shared cache of compiled graphs cannot be used (%s); compiling where needed", error)
        return
    if entry is None:
        _log.info("compiled graphs: none are shared for this size (key %s); compiling where needed", key)
    else:
        _log.info("compiled graphs: %d files of key %s copied in", len(entry.files), key)
