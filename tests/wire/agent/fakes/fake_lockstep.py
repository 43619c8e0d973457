"""A fake of training whose ranks wait for each other in a real all-reduce in each step.

Files in $FAKE_CONTROL, each read once by the rank in its name, block that rank for the seconds that the file holds, or
forever: `sleep-<rank>` in the rank's work, `save-<rank>` in a call that waits for storage. `hide-<rank>` holds the step
before which the rank blocks as if it waited for its peers.
"""

import os
import time
from pathlib import Path

from fake_figures import figures, record_start

from trainium_worker.pulse import Pulse

STEP_SECONDS = 0.05


def main(argv: list[str]) -> int:
    control, rank, _, generation, attempt = record_start()

    import torch
    from torch import distributed as dist

    from trainium_trainer.exits import find_exit_code
    from trainium_trainer.monitor.progress import ProgressWriter

    progress = ProgressWriter(Path(os.environ["TRAINIUM_PROGRESS_FILE"]), generation=generation, attempt=attempt)
    pulse = progress.pulse
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    memory = control / "memory"
    try:
        with pulse.waiting_for_peers:
            dist.init_process_group("gloo")
            start = torch.tensor([int(memory.read_text()) if memory.exists() else 0])
            dist.broadcast(start, 0)
        step = int(start)
        progress.record_resume(step, tokens=0, samples=0)
        while True:
            started_at = time.perf_counter()
            do_own_work(control, rank, pulse)
            with pulse.waiting_for_peers:
                if should_hide(control, rank, step):
                    time.sleep(3600)
                dist.all_reduce(torch.ones(1))
            step += 1
            progress.record_step(figures(step), seconds=time.perf_counter() - started_at)
            if rank == 0:
                draft = memory.with_suffix(".new")
                draft.write_text(str(step))
                draft.rename(memory)
    except RuntimeError as error:
        return find_exit_code(error)


def do_own_work(control: Path, rank: int, pulse: Pulse) -> None:
    time.sleep(STEP_SECONDS)
    if (seconds := read_command(control, "sleep", rank)) is not None:
        time.sleep(seconds)
    if (seconds := read_command(control, "save", rank)) is not None:
        with pulse.saving():
            time.sleep(seconds)


def should_hide(control: Path, rank: int, step: int) -> bool:
    """Return whether this rank has a command to block before this step."""
    command = control / f"hide-{rank}"
    if not command.exists() or step < int(command.read_text()):
        return False
    command.unlink()
    return True


def read_command(control: Path, name: str, rank: int) -> float | None:
    command = control / f"{name}-{rank}"
    if not command.exists():
        return None
    text = command.read_text()
    command.unlink()
    return float(text or 3600)
