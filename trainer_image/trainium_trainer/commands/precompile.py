"""Compile every useful size of a job once, for all nodes: `trainium-trainer precompile`.

Guarantees:
- Importing this module imports no torch.
- Sizes that are ready are not compiled again.
- A size counts as ready only when each of its distinct graphs was compiled, in parallel as far as memory allows
  (`process_pool.py`).
- Only the compiler's folder, the shared folder and the log are written.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainium_contract.trainer.parallelism import BackendChoice
from trainium_contract.wire import worker_env
from trainium_contract.worker_process import log_lines
from trainium_contract.worker_process.compile_cache import CompileOutcome, fill_cache
from trainium_contract.worker_process.write_access import FORBIDDEN, explain_forbidden
from trainium_trainer import neuron_environment
from trainium_trainer.backends.choose import choose_backend, refuse_unsupported
from trainium_trainer.backends.nxd import extraction
from trainium_trainer.commands.options import DEFAULT_CONFIG, ConfigFile, Overrides
from trainium_trainer.compile import graphs
from trainium_trainer.compile.dry_run import (
    DryRunRequest,
    create_dry_run_launch,
    list_ranks_to_compile,
)
from trainium_trainer.compile.process_pool import ProcessPool
from trainium_trainer.compile.sizes import resolve_sizes
from trainium_trainer.configuration.config import Settings, read_document, resolve_settings
from trainium_trainer.exits import StorageError, TrainerError, UserError

if TYPE_CHECKING:
    from trainium_contract.worker_process.compile_cache import LocalCache, SharedCache

_TAIL = 2000
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def precompile(
    config: ConfigFile = DEFAULT_CONFIG,
    overrides: Overrides = None,
    sizes: Annotated[
        str, typer.Option(help="Numbers of nodes, separated by commas; default: every useful size of the TrainingJob.")
    ] = "",
    cores_per_node: Annotated[
        int | None, typer.Option(min=1, max=256, help="Processes per node; default: the TrainingJob's, else 1.")
    ] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Compile also what is ready.")] = False,
) -> None:
    """Compile the graphs of every size of a job before it runs, into this node's cache and the shared one."""
    requested = _parse_numbers(sizes)
    plan = resolve_sizes(
        config, read_document(config), overrides or (), requested=requested, cores_per_node=cores_per_node
    )
    launches = []
    for nodes in plan.nodes:  # check all sizes before the first one is compiled
        settings = resolve_settings(
            plan.config, create_dry_run_launch(0, nodes * plan.cores_per_node, plan.cores_per_node)
        )
        refuse_unsupported(settings)
        launches.append(settings)
    neuron_environment.apply(plan.config)
    local, shared = graphs.find_local_cache(plan.config), graphs.find_shared_cache(plan.config)
    for nodes, settings in zip(plan.nodes, launches, strict=True):
        began = time.monotonic()
        try:
            outcome = ensure_compiled(settings, local, shared, force=force)
        except OSError as error:
            advice = explain_forbidden(error.errno) if error.errno in FORBIDDEN else "make room"
            raise StorageError(
                f"the compiler's cache: {error.strerror or error} ({error.filename}): {advice}, or name another "
                "folder (neuron.cacheDirectory, neuron.sharedCacheDirectory)"
            ) from error
        summary = (
            f"{nodes} node{'s' if nodes > 1 else ''}: data parallel {settings.dp_size}, "
            f"{len(_list_ranks(settings))} place(s) in the model: {outcome} in {time.monotonic() - began:.1f} s"
        )
        typer.echo(log_lines.format_sentence(summary, logger=__name__))


def ensure_compiled(
    settings: Settings, local: LocalCache | None, shared: SharedCache | None, *, force: bool = False
) -> CompileOutcome:
    """Ensure that the node has the graphs of one size: find, else copy, else compile and share them."""
    if local is None:  # the compiler accesses a cache in S3 by itself
        _compile(settings, None)
        return CompileOutcome.COMPILED
    return fill_cache(graphs.compute_key(settings), local, shared, lambda: _compile(settings, local), force=force)


def _compile(settings: Settings, local: LocalCache | None) -> None:
    """Compile the distinct graphs of a size in parallel."""
    # Each process uses a core of the device exclusively, as the ranks of a node do.
    pool = ProcessPool(settings.launch.local_world_size if _is_nxd(settings) else len(os.sched_getaffinity(0)))
    pool.call_for_each(
        _list_ranks(settings),
        lambda rank, slot: compile_rank(settings, rank, local, pool, slot),
    )


def compile_rank(settings: Settings, rank: int, local: LocalCache | None, pool: ProcessPool, slot: int) -> None:
    """Compile the graphs of one rank in a child process. Raises the error of the process.

    `slot` is a number that is unique among the parallel processes.
    """
    world = settings.launch.world_size
    local_world = settings.launch.local_world_size
    nxd = _is_nxd(settings)
    request = DryRunRequest(config=settings.config.to_wire(), rank=rank, world_size=world, local_world_size=local_world)
    command = [sys.executable, "-m", "trainium_trainer.compile.dry_run"]
    environment = dict(os.environ)
    # This process parses the output, so it is text at any log format.
    for name in (*_OF_A_RANK, worker_env.ENV_PROGRESS_FILE, worker_env.ENV_LOG_FORMAT):
        environment.pop(name, None)
    if local is not None and not neuron_environment.uses_neuron(settings.config):
        environment[graphs.INDUCTOR_CACHE] = str(local.folder)
    with tempfile.TemporaryDirectory(prefix="trainium-compile-") as scratch:
        if nxd:
            command = extraction.build_tool_command(command, scratch)
            environment |= extraction.build_environment(rank, world, local_world) | {
                "NEURON_RT_VISIBLE_CORES": str(slot)
            }
        try:
            done = pool.run(command, request.model_dump_json(), environment)
        except FileNotFoundError as error:
            raise UserError(
                f"{extraction.TOOL} is not installed: it comes with torch-neuronx in the image of the Neuron SDK"
            ) from error
    if done.returncode:
        lines = [line for line in done.stderr[-_TAIL:].splitlines() if line.strip()]
        reason = lines[-1] if lines else "the process ended without a word"
        # The error is raised with the exit code of the process.
        kind = next((kind for kind in TrainerError.__subclasses__() if kind.code == done.returncode), UserError)
        raise kind(f"compiling for {world} ranks, rank {rank}: {reason}")


def _list_ranks(settings: Settings) -> tuple[int, ...]:
    """Return a rank for each distinct graph."""
    world_size = settings.launch.world_size
    if not _is_nxd(settings):
        return list_ranks_to_compile(settings.config, world_size)
    return list_ranks_to_compile(
        settings.config,
        world_size,
        data_ranks=extraction.find_ranks_with_distinct_graphs(settings),
        tensor_stride=extraction.compute_tensor_rank_stride(settings),
    )


def _is_nxd(settings: Settings) -> bool:
    return choose_backend(settings.config.backend, settings.config.device) is BackendChoice.NXD


def _parse_numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--sizes is {text!r}: write numbers of nodes, for instance --sizes 64,128")
    return tuple(int(part) for part in parts)
