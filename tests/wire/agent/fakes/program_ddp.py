"""A training program independent of this project: a linear model with torch's DDP and gloo.

It prints its steps, saves each one, resumes from the newest, and kills itself once at a given step.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1])
FOLDER = Path(sys.argv[2])
KILL_RANK, KILL_STEP = (int(text) for text in sys.argv[3].split(":"))


def newest() -> int:
    return max((int(path.stem.partition("-")[2]) for path in FOLDER.glob("step-*.pt")), default=0)


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = newest()
    if step:
        model.load_state_dict(torch.load(FOLDER / f"step-{step}.pt"))
    dist.barrier()
    while step < STEPS:
        step += 1
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
        if rank == 0:
            draft = FOLDER / "draft"
            torch.save(model.state_dict(), draft)
            draft.rename(FOLDER / f"step-{step}.pt")
            print(f"step: {step} loss: {loss.item():.6f}", flush=True)  # noqa: T201 - programs print
        if (rank, step) == (KILL_RANK, KILL_STEP) and not (FOLDER / "killed").exists():
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()


main()
