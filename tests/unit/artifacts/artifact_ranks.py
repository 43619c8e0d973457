"""Run ranks and commands in real processes, forked from a server that has imported torch once."""

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


def start(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def configure_rank_logging(config: str, rank: int, size: int, rendezvous: str, notes: str | None) -> None:
    """Run `write_artifacts` as one rank; with `notes`, slowly, and name each written file there."""
    from torch import distributed as dist

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.artifacts import data_files, stage, writer
    from trainium_trainer.monitor.progress import ProgressWriter
    from trainium_trainer.peers import Peers

    data_files.SMALLEST = data_files.LARGEST = 6_000
    whole = data_files.write_file

    def delayed(*arguments: Any) -> Any:
        entry = whole(*arguments)
        if notes is not None:
            with Path(notes).open("a") as file:
                file.write(f"{entry.name}\n")
            time.sleep(0.5)
        return entry

    writer.write_file = delayed  # type: ignore[attr-defined]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    parsed = TrainingConfig.model_validate_json(config)
    stage.write_artifacts(parsed, parsed.checkpoint.path, 7, Peers.open(rank, size), ProgressWriter(None))


def run_command(argv: list[str], log: str, most_bytes: int | None) -> None:
    """Run a command line whose files have a limit of bytes, which has the effect of a full disk."""
    from trainium_trainer import cli

    with Path(log).open("w") as file:
        sys.stderr = file
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        code = cli.run(argv)
        file.flush()
    os._exit(code)
