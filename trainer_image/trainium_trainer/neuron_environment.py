"""Set `neuron` of the configuration as environment variables, before a device library is imported.

Guarantees:
- `variables` is a pure function.
- The user's own environment is never overridden in silence: where it differs, the run ends with a sentence that names
  the variable and the field.
- Nothing here imports torch.
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
    "NEURON_RT_INSPECT_SYSTEM_PROFILE": "1",  # newest million events of a core, in a ring buffer
    "NEURON_RT_INSPECT_DEVICE_PROFILE": "1",  # first execution of each graph on each core
}
"""Variables of the capture of a process, from its start; the user's environment may set other values (Neuron Explorer
Environment Variables, Neuron SDK 2.33)."""
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
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "neuron.asyncExecInflightRequests",
    "NEURON_RT_EXEC_TIMEOUT": "neuron.execTimeoutSeconds",
    "MALLOC_ARENA_MAX": "neuron.mallocArenas",
    CAPTURE_ENABLED: "monitor.profile.neuron",
    _CAPTURE_FOLDER: "monitor.profile.neuron",
}
_DOWNCASTS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""Names the EC2 instance type."""
LOGICAL_CORE = "NEURON_LOGICAL_NC_CONFIG"
"""How many physical cores make one that a process sees."""
DEVICE_FILES = "neuron[0-9]*"
_M_ARENA_MAX = -8  # of mallopt(3)


def compiler_flags(neuron: NeuronConfig) -> list[str]:
    """Return the options of neuronx-cc, each as one word."""
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


def variables(config: TrainingConfig, *, nxd: bool, given: Mapping[str, str]) -> dict[str, str]:
    """Every variable to set, for the backend `Nxd` or for TorchNeuron, beside the user's own environment `given`.

    Compiler flags of the user are kept beside ours. Raises UserError where `given` contradicts the configuration.
    """
    neuron = config.neuron
    rounds = config.precision.keeps_half if neuron.stochastic_rounding is None else neuron.stochastic_rounding
    found = {
        "NEURON_FUSE_SOFTMAX": str(int(neuron.fuse_softmax)),
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": str(int(rounds)),
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": str(neuron.stochastic_rounding_seed),
        "NEURON_RT_EXEC_TIMEOUT": str(neuron.exec_timeout_seconds),
    }
    if nxd:
        found["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] = str(neuron.async_exec_inflight_requests)
    if neuron.malloc_arenas is not None:
        found["MALLOC_ARENA_MAX"] = str(neuron.malloc_arenas)
    if neuron.cache_directory is not None:
        found["NEURON_COMPILE_CACHE_URL"] = neuron.cache_directory
    _refuse_other_values(found, given)
    for name in _DOWNCASTS:
        if given.get(name, "0") not in {"0", ""}:
            raise UserError(
                f"environment variable {name} is {given[name]!r}: it would turn float32 master weights and moments "
                "into bfloat16; unset it, `precision` sets the number formats"
            )
    found[COMPILER_FLAGS] = shlex.join(_merged(compiler_flags(neuron), given.get(COMPILER_FLAGS, "")))
    return found


def apply(
    config: TrainingConfig,
    environment: MutableMapping[str, str] = os.environ,
    *,
    devices: Path = Path("/dev"),
    capture: Path | None = None,
) -> None:
    """Set the variables in this process, where it may use Neuron devices; `devices` is the folder of device files.

    `capture`: a folder for what the runtime captures of this process; None for nothing. Raises UserError as `variables`
    does.
    """
    if not uses_neuron(config, devices):
        return
    environment.update(variables(config, nxd=config.backend is not BackendChoice.NATIVE, given=environment))
    if capture is not None:
        required = {CAPTURE_ENABLED: "1", _CAPTURE_FOLDER: str(capture)}
        _refuse_other_values(required, environment)
        capture.mkdir(parents=True, exist_ok=True)
        environment.update(required | {name: environment.get(name, value) for name, value in _CAPTURED.items()})
    if config.neuron.malloc_arenas is not None:
        # The C library has read its variables already; this is how it learns later.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, config.neuron.malloc_arenas)


def uses_neuron(config: TrainingConfig, devices: Path = Path("/dev")) -> bool:
    """Return whether this process may use Neuron devices: they are requested, or here and not excluded."""
    asked = config.backend is BackendChoice.NXD or config.device is DeviceChoice.NEURON
    return asked or (config.device is DeviceChoice.AUTO and any(devices.glob(DEVICE_FILES)))


def _refuse_other_values(found: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raise UserError for a variable that the user's environment sets to another value."""
    for name, value in found.items():
        if given.get(name, value) != value:
            raise UserError(
                f"environment variable {name} is {given[name]!r}, but {_FIELDS[name]} makes it {value!r}: "
                "unset the variable, or set both to the same value"
            )


def _merged(ours: list[str], given: str) -> list[str]:
    """Our flags, then those of the user that are not among them; UserError for one with another value."""
    try:
        words = _joined(shlex.split(given))
    except ValueError as error:
        raise UserError(
            f"environment variable {COMPILER_FLAGS} is {given!r}, which is no command line ({error}): correct it, or "
            "use neuron.extraCompilerFlags"
        ) from error
    values = dict(_name_and_value(flag) for flag in ours)
    for flag in words:
        name, value = _name_and_value(flag)
        if name in values and values[name] != value:
            field = _FIELDS.get(name, "neuron.extraCompilerFlags")
            raise UserError(
                f"environment variable {COMPILER_FLAGS} has {flag}, but {field} makes it {_flag(name, values[name])}: "
                f"remove it from the variable and set {field}"
            )
    return ours + [flag for flag in words if _name_and_value(flag)[0] not in values]


def _joined(words: list[str]) -> list[str]:
    """Options and their values as one word each: `--model-type transformer` becomes `--model-type=transformer`."""
    joined: list[str] = []
    for word in words:
        if word.startswith("-") or not joined:
            joined.append(word)
        else:
            joined[-1] += f"{' ' if '=' in joined[-1] else '='}{word}"
    return joined


def _name_and_value(flag: str) -> tuple[str, str]:
    if flag.startswith("-O"):
        return "--optlevel", flag.removeprefix("-O").removeprefix("=").strip()
    name, _, value = flag.partition("=")
    return name, value


def _flag(name: str, value: str) -> str:
    return f"{name}={value}" if value else name
