"""Run the trainer as users do (one process per rank, a YAML file, `--set`), and read its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from trainium_contract.trainer.artifacts import ArtifactPrecision
from trainium_devcluster.ports import reserved_port
from trainium_trainer.artifacts.export import export
from trainium_trainer.models.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainium_contract.models.shape import ModelShape


class RunFailedError(Exception):
    """A rank failed; the message has the end of its log."""


def run_trainer(config: Path, overrides: Sequence[str], *, ranks: int, folder: Path) -> list[float]:
    """Train with `ranks` processes below `folder` and return the loss of every step. Raises RunFailedError."""
    folder.mkdir(parents=True)
    port = reserved_port()
    argv = [sys.executable, "-m", "trainium_trainer", "train", "--config", str(config)]
    for override in (*overrides, f"checkpoint.path={folder / 'run'}"):
        argv += ["--set", override]
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with (folder / f"rank-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(argv, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=1800) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        lines = (folder / f"rank-{rank}.log").read_text().splitlines()
        raise RunFailedError(f"rank {rank} ended with {codes[rank]}: {' / '.join(lines[-3:])}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def export_newest(folder: Path, shape: ModelShape) -> tuple[Path, Llama]:
    """Export the newest checkpoint as a Hugging Face folder, and load it as a model of the trainer."""
    export(str(folder / "run"), folder / "exported", precision=ArtifactPrecision.FLOAT32)
    model = Llama(shape)
    model.load_state_dict(load_file(folder / "exported" / "model.safetensors"), strict=not shape.tie_embeddings)
    return folder / "exported", model
