"""Compiler and runtime of Neuron devices: `neuron` of the trainer's configuration.

The defaults are those of HLAT (arXiv 2404.10630) and of AWS's pretraining examples for it.

Invariants: these fields have no effect on machines without Neuron devices. An omitted field leaves the choice to the
environment and to the library's default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel, MatchesPattern

CompilerFlag = Annotated[
    str,
    Field(min_length=2, max_length=512),
    MatchesPattern(r"-.*", "write one option as on a command line, for instance --enable-saturate-infinity"),
]
"""One option of neuronx-cc as on a command line, for instance `--enable-saturate-infinity`."""

_TYPED_FLAGS = {
    "--model-type": "neuron.modelType",
    "--distribution-strategy": "neuron.distributionStrategy",
    "--auto-cast": "neuron.autoCast",
    "--optlevel": "neuron.optimizationLevel",
    "-O": "neuron.optimizationLevel",
    "--retry_failed_compilation": "neuron.retryFailedCompilation",
    "--cache_dir": "neuron.cacheDirectory",
    "--tensorizer-options": "neuron.ccPipelineTilingFactor",
}


class ModelType(StrEnum):
    """The compiler's assumption about the model (`--model-type`)."""

    TRANSFORMER = "Transformer"
    GENERIC = "Generic"


class DistributionStrategy(StrEnum):
    """Distribution of the model, for the compiler's scheduling of collectives (`--distribution-strategy`)."""

    LLM_TRAINING = "LlmTraining"
    """Large language models with sharded optimizer states."""
    UNSPECIFIED = "Unspecified"
    """Without the flag."""


class AutoCast(StrEnum):
    """Float32 operations that the compiler computes in lower precision (`--auto-cast`)."""

    NONE = "None"
    """None: number formats are those of `precision`."""
    MATMULT = "Matmult"
    """Matrix multiplications, to bfloat16; the compiler's own default in older releases."""
    ALL = "All"
    """All."""


class NeuronConfig(ContractModel):
    """Flags of the compiler (neuronx-cc) and variables of the runtime; no effect on other devices."""

    model_type: ModelType = ModelType.TRANSFORMER
    """Kind of model that the compiler optimizes for."""
    distribution_strategy: DistributionStrategy = DistributionStrategy.LLM_TRAINING
    """Kind of distribution that the compiler optimizes for."""
    optimization_level: Annotated[int, Field(ge=1, le=3)] | None = None
    """1 compiles fastest, 3 runs fastest; omitted: the compiler's default, 2."""
    auto_cast: AutoCast = AutoCast.NONE
    """Operations that the compiler may compute in bfloat16 although they are float32."""
    cc_pipeline_tiling_factor: Annotated[int, Field(ge=1, le=64)] | None = None
    """Pieces into which the compiler divides a collective and the computation beside it, so that they overlap; omitted:
    not divided."""
    retry_failed_compilation: bool = True
    """Compile again what the cache records as failed, because a killed compilation leaves such an entry."""
    extra_compiler_flags: Annotated[tuple[CompilerFlag, ...], Field(max_length=32)] | None = None
    """Further options of neuronx-cc, in order; options with a separate field are refused here."""
    cache_directory: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Folder or s3:// address of the compiler's persistent cache; omitted: NEURON_COMPILE_CACHE_URL, else Neuron's
    own. A folder shared by nodes is slow and can be corrupted: prefer the node's disk."""
    shared_cache_directory: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Folder that all nodes see, for instance on FSx: each node's cache is filled from it before training, and
    `trainium-trainer precompile` adds to it. The compiler itself never works in it."""
    fuse_softmax: bool = True
    """Lower softmax as one operation (NEURON_FUSE_SOFTMAX)."""
    stochastic_rounding: bool | None = None
    """Round float32 to bfloat16 at random instead of to the nearest; omitted: on exactly when `precision` keeps weights
    and moments in bfloat16."""
    stochastic_rounding_seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the stochastic rounding."""
    exec_timeout_seconds: Annotated[int, Field(ge=2, le=86_400)] = 4000
    """Time-out of the runtime for one execution, which includes waiting for other ranks that still compile; the
    operator detects hangs long before."""
    malloc_arenas: Annotated[int, Field(ge=1, le=1024)] | None = 64
    """Maximum number of heaps of the C library per process (MALLOC_ARENA_MAX), because many threads would otherwise
    fragment the host's memory; omitted: the C library's default."""

    @model_validator(mode="after")
    def _check_extra_flags(self) -> Self:
        for flag in self.extra_compiler_flags or ():
            name = flag.partition("=")[0].split()[0]
            field = _TYPED_FLAGS.get("-O" if name.startswith("-O") else name)
            if field is not None:
                msg = f"neuron.extraCompilerFlags has {flag}: remove it there and set {field}"
                raise ValueError(msg)
        return self
