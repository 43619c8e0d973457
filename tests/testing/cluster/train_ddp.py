"""Fit a small network with DistributedDataParallel: a program that torchrun starts, and that knows of no TrainingJob.

Prints one line a step, and resumes from its newest complete checkpoint:

    torchrun --nproc-per-node 2 train_ddp.py --folder run --steps 100
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, HIDDEN, ROWS = 64, 512, 256


def batch(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of one micro-batch: the same at each run of a step."""
    random = torch.Generator().manual_seed(1_000_003 * step + part)
    rows = torch.randn(ROWS, FEATURES, generator=random)
    return rows, rows.square().mean(dim=1, keepdim=True).sin()


def newest(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 for none."""
    return max((int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/complete")), default=0)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, and its mark once all of it is on the disk."""
    place = folder / f"step-{step}"
    place.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place / "state.pt")
    (place / "complete").touch()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and metrics.jsonl")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument(
        "--seconds-per-step", type=float, default=0.0, help="a pause, to make a step as long as a real one"
    )
    parser.add_argument("--pid-file", type=Path, help="write the process id of the rank to it")
    options = parser.parse_args()
    if options.pid_file is not None:
        options.pid_file.write_text(str(os.getpid()))

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # More micro-batches on fewer ranks: the batch of a step stays the same at each size.
    accumulation = int(os.environ.get("TRAINIUM_ACCUMULATION", "1"))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options.folder.mkdir(parents=True, exist_ok=True)
    step = newest(options.folder)
    if step:
        state = torch.load(options.folder / f"step-{step}" / "state.pt")
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    while step < options.steps:
        total = torch.zeros(())
        for micro in range(accumulation):
            rows, targets = batch(step, rank + micro * world)
            with model.no_sync() if micro + 1 < accumulation else nullcontext():
                loss = nn.functional.mse_loss(model(rows), targets) / accumulation
                torch.autograd.backward(loss)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        dist.all_reduce(total)
        time.sleep(options.seconds_per_step)
        if rank == 0:
            mean = total.item() / world
            sys.stdout.write(f"step: {step} loss: {mean:.6f}\n")
            sys.stdout.flush()
            with (options.folder / "metrics.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": mean, "time": time.time()}) + "\n")
            if step % options.save_every == 0 or step == options.steps:
                save(options.folder, step, network, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
