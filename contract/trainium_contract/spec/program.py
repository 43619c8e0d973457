"""`spec.program`: any training program in place of the built-in trainer.

The operator writes it as JSON into the environment variable `TRAINIUM_PROGRAM` of the worker, where the agent reads it.
`recovery.gracePeriodSeconds` is the time for a program to save and exit after SIGTERM, as for the trainer.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from trainium_contract.base import ContractModel, MatchesPattern

MAX_COMMAND = 16_384
"""Characters of the command and its arguments together: Linux limits the length of the variable that passes them."""
STEP_GROUP = "step"
"""Group of `progress.pattern` that holds the number of the step."""
_STEP_PLACE = "{step}"
_Argument = Annotated[str, Field(max_length=4096)]
_Arguments = Annotated[tuple[_Argument, ...], Field(max_length=256)]
_AbsolutePath = Annotated[
    str, Field(max_length=1024), MatchesPattern(r"/[^\x00]*", "write an absolute path, for instance /checkpoints/run")
]
_Samples = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _check_pattern(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"the pattern is no regular expression: {error}; correct it") from None
    if STEP_GROUP not in groups:
        raise ValueError(r"the pattern has no group (?P<step>\d+) that holds the number of the step: add it")
    return pattern


class ProgramResize(StrEnum):
    """Behaviour of a program when the number of nodes changes."""

    RESTART = "Restart"
    """It starts again at the new world size and resumes from its checkpoint."""
    NEVER = "Never"
    """Its checkpoints fit one world size: the job waits for a missing worker, and the size is fixed while it runs."""


class ProgramWarm(StrEnum):
    """The way in which ranks of a program start."""

    AUTO = "Auto"
    """For a command that starts Python, also with `sh -c 'exec python ...'`: a standby process of each node imports
    what the program's source names and what its last start imported, and ranks are forked from it. Other commands,
    and programs whose modules start threads while they are imported, are executed."""
    NEVER = "Never"
    """The command is executed at each start."""


class ProgramProgress(ContractModel):
    """Source of the program's steps. What it reports through the library `trainium_worker` takes precedence."""

    pattern: Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_check_pattern)] | None = None
    r"""Regular expression, in the common syntax of Python and RE2, that is searched for in each line of output, for
    instance `step: *(?P<step>\d+).*loss: *(?P<loss>\S+)`. The group `step` is required; `loss`, `tokens_per_second`
    and `samples_per_second` are optional. Omitted: only the reports through the library."""


class ProgramCheckpoints(ContractModel):
    """Checkpoints of the program. They are observed, and never written, moved or deleted."""

    path: _AbsolutePath
    """Folder in the container, on the volume of checkpoint.storage (/checkpoints) or another one that outlives the
    pod."""
    committed: Annotated[
        str,
        Field(max_length=512),
        MatchesPattern(
            r"[^/{}\x00][^{}\x00]*(\{step\}[^{}\x00]*)?|\{step\}[^{}\x00]*",
            "write a path below checkpoints.path with {step} at most once, for instance step-{step}/.metadata",
        ),
    ]
    """File or folder below `path` that exists once the checkpoint of a step is complete; `{step}` stands for the
    digits of the step. Without `{step}`: a file that each save replaces, such as last.ckpt; its step is the newest one
    that had been reported when it was written."""

    @property
    def is_replaced(self) -> bool:
        """Whether each save replaces the file of the last one."""
        return _STEP_PLACE not in self.committed

    def committed_pattern(self) -> re.Pattern[str]:
        """Return the expression that a path relative to `path` must match as a whole; its group `step` is the step."""
        before, _, after = map(re.escape, self.committed.partition(_STEP_PLACE))
        return re.compile(rf"{before}(?P<{STEP_GROUP}>[0-9]+){after}")


class ProgramBatch(ContractModel):
    """The program's batch, so that it can stay the same at each size."""

    global_size: _Samples
    """Samples of one optimizer step over all data-parallel ranks."""
    micro_size: _Samples = 1
    """Samples of one forward and backward pass of one data-parallel rank."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.micro_size > self.global_size:
            raise ValueError(
                f"program.batch.microSize is {self.micro_size} but globalSize is {self.global_size}: lower microSize"
            )
        return self


class ProgramPrecompileSizes(StrEnum):
    """Numbers of nodes to compile for."""

    AUTO = "Auto"
    """Every useful size between workers.minReplicas and workers.maxReplicas, the initial one first."""
    START = "Start"
    """The size that the job starts at."""


class ProgramPrecompile(ContractModel):
    """Compilation of the program's graphs before a worker joins, once for all nodes that share a volume.

    An init container runs the command for each size. It keeps the files of the compiler in the folder `compiled` on the
    checkpoints' volume, if that is mounted, and copies them to each node.
    """

    command: Annotated[_Arguments, Field(min_length=1)]
    """Program and arguments that compile for one size and end with 0, for instance a run of a few steps on one node.
    The size is in TRAINIUM_NODES and TRAINIUM_WORLD_SIZE, the compiler's folder in NEURON_COMPILE_CACHE_URL and
    TORCHINDUCTOR_CACHE_DIR."""
    sizes: ProgramPrecompileSizes = ProgramPrecompileSizes.AUTO
    """Numbers of nodes to compile for. Other sizes compile in their first step."""
    timeout_seconds: Annotated[int, Field(ge=1, le=604_800)] = 7200
    """Longest time for one size; then the command is killed, and the worker does not start."""


class ProgramSpec(ContractModel):
    """A training program that the operator starts and restarts."""

    image: Annotated[str, Field(min_length=1, max_length=1024)]
    """Image of the container `worker`. It needs neither Python nor a shell: an init container adds the agent."""
    command: Annotated[_Arguments, Field(min_length=1)]
    """Program and arguments of each process, without a shell; a name without a slash is searched for in the image's
    PATH."""
    args: _Arguments = ()
    """Arguments after those of `command`."""
    working_directory: _AbsolutePath | None = None
    """Folder in which the program starts; omitted: the image's."""
    processes_per_node: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes that the agent starts on each node, each with the environment that torchrun gives to a rank. Omitted:
    one for each core of workers.accelerator. 1: also for a program that starts its own ranks."""
    progress: ProgramProgress = ProgramProgress()
    """Where steps are read."""
    checkpoints: ProgramCheckpoints | None = None
    """Where the program writes checkpoints; omitted: unknown, so that neither the status nor the goodput
    ledger has a checkpoint."""
    resize: ProgramResize = ProgramResize.RESTART
    """Whether the program can continue at another number of nodes."""
    warm: ProgramWarm = ProgramWarm.AUTO
    """Whether ranks are forked from a process of each node that has imported the program's modules ahead."""
    precompile: ProgramPrecompile | None = None
    """Compilation before a worker joins; omitted: each size compiles in its first step."""
    batch: ProgramBatch | None = None
    """The program's batch. The program then reads TRAINIUM_ACCUMULATION, and only sizes that divide the batch are
    legal. Omitted: the batch may change with the size, and the status reports that."""

    @model_validator(mode="after")
    def _check_command(self) -> Self:
        dry_run = self.precompile.command if self.precompile is not None else ()
        length = sum(map(len, (*self.command, *self.args, *dry_run)))
        if length > MAX_COMMAND:
            raise ValueError(
                f"program.command, args and precompile.command have {length} characters together, and at most "
                f"{MAX_COMMAND} are possible: move what is long into a file"
            )
        return self
