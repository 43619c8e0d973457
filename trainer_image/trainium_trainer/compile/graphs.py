"""Name the compiled graphs of one size of a job, find the folders that keep them, and fill the node's from the shared.

Guarantees:
- `key` is a pure function of its `Graphs`.
- What does not change a graph (data, steps, learning rate, where checkpoints are) is not in it, so that a run with
  other data finds what an earlier one compiled.
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
from trainium_trainer.backends.nxd.extraction import data_ranks
from trainium_trainer.compile.cache import LocalCache, SharedCache
from trainium_trainer.exits import UserError
from trainium_trainer.neuron_environment import COMPILER_FLAGS, uses_neuron

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.configuration.config import Settings


_LENGTH = 32
_NOT_COMPILED = frozenset({"learning_rate"})  # reaches the update as data


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """Everything that the graphs of one size depend on."""

    image: str
    """The trainer's image, best with its digest; it stands for compiler and libraries."""
    flags: tuple[str, ...]
    """Options of the compiler, in order."""
    model: dict[str, Any]
    """Every number of the model's shape."""
    compute: dict[str, Any]
    """Number formats, recomputation, parallelism, sequence length, masks, micro-batch, optimizer."""
    world_size: int
    """Ranks of the job at this size: groups of ranks are part of a graph."""


def describe_graphs(settings: Settings, *, image: str, flags: Sequence[str]) -> Graphs:
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
        # A pipeline's schedule knows how many there are; elsewhere each is the same graph.
        "microBatches": micro_batches(settings) if config.parallelism.pipeline > 1 else 0,
    }
    # Entries of versions that compiled one kind of data-parallel rank only are not complete.
    if config.backend is not BackendChoice.NATIVE and (kinds := data_ranks(settings)) != (0,):
        compute["dataRanks"] = kinds
    if config.tuning != TuningConfig():
        compute["tuning"] = config.tuning.to_wire()
    return Graphs(
        image=image,
        flags=tuple(flags),
        model=settings.shape.to_json(),
        compute=compute,
        world_size=settings.launch.world_size,
    )


def micro_batches(settings: Settings) -> int:
    """Micro-batches of one step on one data-parallel rank."""
    return settings.passes


def digest_of_graphs(graphs: Graphs) -> str:
    """Return a name of 32 hexadecimal digits: equal exactly for equal graphs."""
    text = json.dumps(asdict(graphs), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


CACHE_URL = "NEURON_COMPILE_CACHE_URL"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_NEURON_DEFAULT = "/var/tmp/neuron-compile-cache"  # noqa: S108 - Neuron's own default
_COMPILERS = ("trainium-trainer", "torch", "neuronx-cc", "torch-neuronx", "torch-xla", "neuronx-distributed")
_NOT_IN_KEY = ("--retry_failed_compilation", "--cache_dir")


def local_cache(config: TrainingConfig, environment: Mapping[str, str] = os.environ) -> LocalCache | None:
    """Return the compiler's folder on this node; None for one in S3, which the compiler accesses itself."""
    if uses_neuron(config):
        place = config.neuron.cache_directory or environment.get(CACHE_URL) or _NEURON_DEFAULT
        return None if is_address(place) else LocalCache(Path(place))
    own = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return LocalCache(Path(environment.get(INDUCTOR_CACHE) or f"{own}/trainium/compiled"))


def shared_cache(config: TrainingConfig) -> SharedCache | None:
    """Return the folder that nodes share; None where none is configured."""
    place = config.neuron.shared_cache_directory
    return SharedCache(Path(place)) if place else None


def compute_key(settings: Settings, environment: Mapping[str, str] = os.environ) -> str:
    """Return the key of a configuration at the size of its launch, after its variables were set."""
    flags = shlex.split(environment.get(COMPILER_FLAGS, "")) if uses_neuron(settings.config) else []
    kept = [flag for flag in flags if not flag.startswith(_NOT_IN_KEY)]
    return digest_of_graphs(
        describe_graphs(settings, image=environment.get(worker_env.ENV_IMAGE) or _software(), flags=kept)
    )


def _software() -> str:
    """Versions of all that compiles, where no image is named."""
    found = {}
    for name in _COMPILERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" not in found:
        raise UserError("torch is not installed: run this in the trainer's image")
    return " ".join(f"{name}={version}" for name, version in found.items())


_EXTRACTION = "NEURON_EXTRACT_GRAPHS_ONLY"
_log = logging.getLogger("trainium.compile")


def refuse_extraction(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError under neuron_parallel_compile: training would save what was never computed."""
    if environment.get(_EXTRACTION, "0") not in {"", "0"}:
        raise UserError(
            f"{_EXTRACTION} is set (neuron_parallel_compile does that): results would mean nothing, and be saved; use "
            "`trainium-trainer precompile`, which writes nothing but compiled graphs"
        )


def fill_local_cache(settings: Settings) -> None:
    """Copy the graphs of this run's size from the shared cache, where both caches are folders."""
    shared, local = shared_cache(settings.config), local_cache(settings.config)
    if shared is None or local is None:
        return
    key = compute_key(settings)
    try:
        local.folder.mkdir(parents=True, exist_ok=True)
        with (local.folder / ".trainium-fill").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # ends with the process
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
