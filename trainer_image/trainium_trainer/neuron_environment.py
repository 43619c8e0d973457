"""Set `neuron` of the configuration as environment variables, before a device library is imported.

Guarantees:
- `list_variables` is a pure function.
- The user's environment is never silently overridden: if it differs, the run ends with an error that names the variable
  and the field.
- This module does not import torch.
"""

from __future__ import annotations

import ctypes
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.trainer.neuron import AutoCast, DistributionStrategy, ModelType, NeuronConfig
from trainium_contract.trainer.parallelism import BackendChoice, DeviceChoice
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from trainium_contract.trainer.config import TrainingConfig

COMPILER_FLAGS = "NEURON_CC_FLAGS"
CAPTURE_ENABLED = "NEURON_RT_INSPECT_ENABLE"
_CAPTURE_FOLDER = "NEURON_RT_INSPECT_OUTPUT_DIR"
_CAPTURED = {
    "NEURON_RT_INSPECT_SYSTEM_PROFILE": "1",  # the newest million events of a core, in a ring buffer
    "NEURON_RT_INSPECT_DEVICE_PROFILE": "1",  # the first execution of each graph on each core
}
"""The variables of a process's capture from its start; the user's environment may set other values (Neuron Explorer
Environment Variables, Neuron SDK 2.33).
"""
_MODEL_TYPES = {ModelType.TRANSFORMER: "transformer", ModelType.GENERIC: "generic"}
_STRATEGIES = {DistributionStrategy.LLM_TRAINING: "llm-training"}
_AUTO_CASTS = {AutoCast.NONE: "none", AutoCast.MATMULT: "matmult", AutoCast.ALL: "all"}
_FIELDS = {
    "--model-type": "neuron.modelType",
    "--distribution-strategy": "neuron.distributionStrategy",
    "--auto-cast": "neuron.autoCast",
    "--optlevel": "neuron.optimizationLevel",
    "--tensorizer-options": "neuron.ccPipelineTilingFactor",
    "--retry_failed_compilation": "neuron.retryFailedCompilation",
    "NEURON_COMPILE_CACHE_URL": "neuron.cacheDirectory",
    "NEURON_FUSE_SOFTMAX": "neuron.fuseSoftmax",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "neuron.stochasticRounding",
    "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "neuron.stochasticRoundingSeed",
    "NEURON_RT_EXEC_TIMEOUT": "neuron.execTimeoutSeconds",
    "MALLOC_ARENA_MAX": "neuron.mallocArenas",
    CAPTURE_ENABLED: "monitor.profile.neuron",
    _CAPTURE_FOLDER: "monitor.profile.neuron",
}
_INFLIGHT, _MAX_INFLIGHT = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "3"
"""Graphs that may wait on the device while the host continues, for NxD, whose SDKs have it."""
_DOWNCASTS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""The file with the EC2 instance type."""
DEVICE_FILES = "neuron[0-9]*"
_M_ARENA_MAX = -8  # of mallopt(3)


def list_compiler_flags(neuron: NeuronConfig) -> list[str]:
    """Return the options of neuronx-cc, one word each."""
    flags = [f"--model-type={_MODEL_TYPES[neuron.model_type]}"]
    if neuron.distribution_strategy in _STRATEGIES:
        flags.append(f"--distribution-strategy={_STRATEGIES[neuron.distribution_strategy]}")
    flags.append(f"--auto-cast={_AUTO_CASTS[neuron.auto_cast]}")
    if neuron.optimization_level is not None:
        flags.append(f"--optlevel={neuron.optimization_level}")
    if neuron.cc_pipeline_tiling_factor is not None:
        overlap = f"--enable-ccop-compute-overlap --cc-pipeline-tiling-factor={neuron.cc_pipeline_tiling_factor}"
        flags.append(f"--tensorizer-options={overlap}")
    if neuron.retry_failed_compilation:
        flags.append("--retry_failed_compilation")
    return flags + list(neuron.extra_compiler_flags or ())


def list_variables(config: TrainingConfig, *, nxd: bool, given: Mapping[str, str]) -> dict[str, str]:
    """Return every variable to set for the backend `Nxd` or TorchNeuron, besides the user's environment `given`.

    The user's compiler flags are kept. Raises UserError if `given` contradicts the configuration.
    """
    neuron = config.neuron
    rounds = config.precision.has_bfloat16_state if neuron.stochastic_rounding is None else neuron.stochastic_rounding
    environment = {
        "NEURON_FUSE_SOFTMAX": str(int(neuron.fuse_softmax)),
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": str(int(rounds)),
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": str(neuron.stochastic_rounding_seed),
        "NEURON_RT_EXEC_TIMEOUT": str(neuron.exec_timeout_seconds),
    }
    if nxd:
        environment[_INFLIGHT] = given.get(_INFLIGHT, _MAX_INFLIGHT)
    if neuron.malloc_arenas is not None:
        environment["MALLOC_ARENA_MAX"] = str(neuron.malloc_arenas)
    if neuron.cache_directory is not None:
        environment["NEURON_COMPILE_CACHE_URL"] = neuron.cache_directory
    _refuse_other_values(environment, given)
    for name in _DOWNCASTS:
        if given.get(name, "0") not in {"0", ""}:
            raise UserError(
                f"environment variable {name} is {given[name]!r}: it would turn float32 master weights and moments "
                "into bfloat16; unset it, `precision` sets the number formats"
            )
    environment[COMPILER_FLAGS] = shlex.join(_merge_flags(list_compiler_flags(neuron), given.get(COMPILER_FLAGS, "")))
    return environment


def apply(
    config: TrainingConfig,
    environment: MutableMapping[str, str] = os.environ,
    *,
    devices: Path = Path("/dev"),
    capture: Path | None = None,
) -> None:
    """Set the variables in this process if it may use Neuron devices; `devices` is the folder of device files.

    `capture`: a folder for the runtime's capture of this process; None for no capture. Raises UserError as
    `list_variables` does.
    """
    if not uses_neuron(config, devices):
        return
    environment.update(list_variables(config, nxd=config.backend is not BackendChoice.NATIVE, given=environment))
    if capture is not None:
        required = {CAPTURE_ENABLED: "1", _CAPTURE_FOLDER: str(capture)}
        _refuse_other_values(required, environment)
        capture.mkdir(parents=True, exist_ok=True)
        environment.update(required | {name: environment.get(name, value) for name, value in _CAPTURED.items()})
    if config.neuron.malloc_arenas is not None:
        # The C library has already read its variables, so the value is set by a call.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, config.neuron.malloc_arenas)


def uses_neuron(config: TrainingConfig, devices: Path = Path("/dev")) -> bool:
    """Return whether this process may use Neuron devices: they are requested, or present and not excluded."""
    requested = config.backend is BackendChoice.NXD or config.device is DeviceChoice.NEURON
    return requested or (config.device is DeviceChoice.AUTO and any(devices.glob(DEVICE_FILES)))


def _refuse_other_values(wanted: Mapping[str, str], present: Mapping[str, str]) -> None:
    """Raise UserError for a variable that the user's environment sets to another value."""
    for name, value in wanted.items():
        if present.get(name, value) != value:
            raise UserError(
                f"environment variable {name} is {present[name]!r}, but {_FIELDS[name]} makes it {value!r}: "
                "unset the variable, or set both to the same value"
            )


def _merge_flags(ours: list[str], flags: str) -> list[str]:
    """Merge the configured flags with the user's. Raises UserError for a flag with another value."""
    try:
        words = _join_values(shlex.split(flags))
    except ValueError as error:
        raise UserError(
            f"environment variable {COMPILER_FLAGS} is {flags!r}, which is no command line ({error}): correct it, or "
            "use neuron.extraCompilerFlags"
        ) from error
    values = dict(_split_flag(flag) for flag in ours)
    for flag in words:
        name, value = _split_flag(flag)
        if name in values and values[name] != value:
            field = _FIELDS.get(name, "neuron.extraCompilerFlags")
            raise UserError(
                f"environment variable {COMPILER_FLAGS} has {flag}, but {field} makes it "
                f"{_format_flag(name, values[name])}: remove it from the variable and set {field}"
            )
    return ours + [flag for flag in words if _split_flag(flag)[0] not in values]


def _join_values(words: list[str]) -> list[str]:
    """Join options and their values: `--model-type transformer` becomes `--model-type=transformer`."""
    joined: list[str] = []
    for word in words:
        if word.startswith("-") or not joined:
            joined.append(word)
        else:
            joined[-1] += f"{' ' if '=' in joined[-1] else '='}{word}"
    return joined


def _split_flag(flag: str) -> tuple[str, str]:
    if flag.startswith("-O"):
        return "--optlevel", flag.removeprefix("-O").removeprefix("=").strip()
    name, _, value = flag.partition("=")
    return name, value


def _format_flag(name: str, value: str) -> str:
    return f"{name}={value}" if value else name
