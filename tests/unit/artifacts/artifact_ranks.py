"""Run ranks and commands in real processes, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess


def start(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


class Quiet:
    def stage(self, *_: object) -> None:
        pass

    def artifact(self, _: object) -> None:
        pass


def write_as_rank(config: str, rank: int, size: int, rendezvous: str, notes: str | None) -> None:
    """One rank of `write_artifacts`; with `notes` it names there each file that it has written, and dawdles."""
    from torch import distributed as dist

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.artifacts import layout, stage, writer
    from trainium_trainer.peers import Peers

    layout.SMALLEST = layout.LARGEST = 6_000
    whole = writer.write_file

    def dawdling(*arguments: Any) -> Any:
        entry = whole(*arguments)
        if notes is not None:
            with Path(notes).open("a") as file:
                file.write(f"{entry.name}\n")
            time.sleep(0.5)
        return entry

    writer.write_file = dawdling
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    parsed = TrainingConfig.model_validate_json(config)
    stage.write_artifacts(parsed, parsed.checkpoint.path, 7, Peers.open(rank, size), Quiet())


def run_command(argv: list[str], log: str, most_bytes: int | None) -> None:
    """A command line whose files can have at most so many bytes, which the kernel answers like a full disk."""
    from trainium_trainer import cli

    with Path(log).open("w") as file:
        sys.stderr = file
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        code = cli.run(argv)
        file.flush()
    os._exit(code)
