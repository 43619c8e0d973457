"""Run ranks and commands in real processes, forked from a server that has imported torch once."""

import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.testing.trainer.fork_server import fork_context


def start_process(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = fork_context().Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def write_artifacts_as_rank(config: str, rank: int, size: int, rendezvous: str, written_names: str | None) -> None:
    """Run `write_artifacts` as one rank; with `written_names`, wait after each file and append its name there."""
    from torch import distributed as dist

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.artifacts import data_files, stage, writer
    from trainium_trainer.monitor.progress import ProgressWriter
    from trainium_trainer.peers import Peers

    data_files.SMALLEST = data_files.LARGEST = 6_000
    write_file = data_files.write_file

    def write_slowly(*arguments: Any) -> Any:
        entry = write_file(*arguments)
        if written_names is not None:
            with Path(written_names).open("a") as file:
                file.write(f"{entry.name}\n")
            time.sleep(0.5)
        return entry

    writer.write_file = write_slowly  # type: ignore[attr-defined]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    parsed = TrainingConfig.model_validate_json(config)
    stage.write_artifacts(parsed, parsed.checkpoint.path, 7, Peers.open(rank, size), ProgressWriter(None))


def run_command(argv: list[str], log: str, max_file_bytes: int | None) -> None:
    """Run a command line with a limit for the size of its files, in place of a full disk."""
    from trainium_trainer import cli

    with Path(log).open("w") as file:
        sys.stderr = file
        if max_file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        code = cli.run(argv)
        file.flush()
    os._exit(code)
