"""A loop with torch's DDP that keeps each step in memory; rank 1 gets a signal once, at a given step."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainium_worker
from trainium_worker import memory

STEPS, FAULT_STEP, FAULT = int(sys.argv[1]), int(sys.argv[2]), signal.Signals[sys.argv[3]]
MARKER = Path(sys.argv[4])


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, _ = memory.load(model, optimizer)
    print(f"resumed after step {step}", flush=True)  # noqa: T201 - programs print
    while step < STEPS:
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        memory.wait()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(0.02)
        trainium_worker.step(step, total_steps=STEPS)
        if (rank, step) == (1, FAULT_STEP) and not MARKER.exists():
            MARKER.touch()
            os.kill(os.getpid(), FAULT)
        memory.save(step, model, optimizer)
    memory.wait()


main()
