"""Where the compiled form of a configuration lives on this node and beyond it, and what else its key depends on."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.trainer.addresses import is_address
from trainium_contract.wire import worker_env
from trainium_trainer.compile.cache import LocalCache, SharedCache
from trainium_trainer.compile.key import graphs_of, key
from trainium_trainer.exits import UserError
from trainium_trainer.neuron_environment import COMPILER_FLAGS, uses_neuron

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.configuration.config import Settings

CACHE_URL = "NEURON_COMPILE_CACHE_URL"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_NEURON_DEFAULT = "/var/tmp/neuron-compile-cache"  # noqa: S108 - Neuron's own default
_COMPILERS = ("trainium-trainer", "torch", "neuronx-cc", "torch-neuronx", "torch-xla", "neuronx-distributed")
_NOT_IN_KEY = ("--retry_failed_compilation", "--cache_dir")


def local_cache(config: TrainingConfig, environment: Mapping[str, str] = os.environ) -> LocalCache | None:
    """The compiler's folder on this node; None for one in S3, which the compiler reads and writes by itself."""
    if uses_neuron(config):
        place = config.neuron.cache_directory or environment.get(CACHE_URL) or _NEURON_DEFAULT
        return None if is_address(place) else LocalCache(Path(place))
    own = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return LocalCache(Path(environment.get(INDUCTOR_CACHE) or f"{own}/trainium/compiled"))


def shared_cache(config: TrainingConfig) -> SharedCache | None:
    """The folder that nodes share; None where none is configured."""
    place = config.neuron.shared_cache_directory
    return SharedCache(Path(place)) if place else None


def key_of(settings: Settings, environment: Mapping[str, str] = os.environ) -> str:
    """The key of a configuration at the size of its launch, after its variables were set."""
    flags = shlex.split(environment.get(COMPILER_FLAGS, "")) if uses_neuron(settings.config) else []
    kept = [flag for flag in flags if not flag.startswith(_NOT_IN_KEY)]
    return key(graphs_of(settings, image=environment.get(worker_env.ENV_IMAGE) or _software(), flags=kept))


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
