"""A fake of training: it counts steps, keeps them in memory, and saves on SIGTERM.

Files in $FAKE_CONTROL control it: `exit-<rank>` holds an exit code and a last message (read once). `last-step` ends the
run, after an export of as many pieces as `export` holds; exported pieces outlive a process. Every start is written to
`starts.jsonl`.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

from fake_figures import figures, record_start

from trainium_contract.status.results import ArtifactReport, RunStage
from trainium_trainer.monitor.progress import ProgressWriter

STEP_SECONDS = 0.02


def export(progress: ProgressWriter, control: Path, rank: int, step: int) -> bool:
    """Write one more piece; return whether it was the last."""
    command, written = control / "export", control / "exported"
    if not command.exists():
        return True
    done, pieces = (int(written.read_text()) if written.exists() else 0), int(command.read_text())
    if done >= pieces:
        progress.record_artifact(ArtifactReport(kind="Model", path="/out", step=step, bytes=done))
        return True
    progress.enter_stage(RunStage.EXPORT, done / pieces)
    if rank == 0:
        temporary = written.with_suffix(".new")
        temporary.write_text(str(done + 1))
        temporary.rename(written)
    return False


def main(argv: list[str]) -> int:
    started = time.time()
    control, rank, world_size, generation, attempt = record_start(
        ppid=os.getppid(), at=started, argv=argv, nice=os.nice(0)
    )
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))

    from torch.distributed import TCPStore

    from trainium_trainer.monitor.progress import ProgressWriter

    progress = ProgressWriter(Path(os.environ["TRAINIUM_PROGRESS_FILE"]), generation=generation, attempt=attempt)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        False,
        timedelta(seconds=30),
        wait_for_workers=False,
    )
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    memory = control / "memory"  # replaces the memory of the nodes and the copies of peers
    step = int(memory.read_text()) if memory.exists() else 0
    store.set(f"ready-{rank}", "1")
    store.wait([f"ready-{peer}" for peer in range(world_size)], timedelta(seconds=30))
    progress.record_resume(step, tokens=0, samples=0)
    last = control / "last-step"
    while True:
        time.sleep(STEP_SECONDS)
        command = control / f"exit-{rank}"
        if command.exists():
            code, _, last_messages = command.read_text().partition("\n")
            command.unlink()
            print(last_messages or f"rank {rank} leaves with {code}", flush=True)  # noqa: T201 - ranks print
            return int(code)
        if last.exists() and step >= int(last.read_text()):
            if export(progress, control, rank, step):
                return 0
            continue
        step += 1
        progress.record_step(figures(step), seconds=STEP_SECONDS)
        if rank == 0:
            temporary = memory.with_suffix(".new")
            temporary.write_text(str(step))
            temporary.rename(memory)
        if stop:
            store.set("stop", "1")
        if store.check(["stop"]):
            progress.publish(memory_step=step, durable_step=step)
            return 75
