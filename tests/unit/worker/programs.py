"""Run training processes on simulated nodes: a memory folder for each node, a process for each rank.

The program trains with DDP or FSDP2 and saves each step to memory, as in `docs/program.md`.
"""

import atexit
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainium_worker
from tests.testing.suite.timeouts import scaled
from tests.testing.trainer.fork_server import fork_context
from trainium_worker import memory
from trainium_worker.dcp import MemoryReader, MemoryWriter, commit, repeated
from trainium_worker.save_request import request_save
from trainium_worker.snapshots import copies
from trainium_worker.snapshots.files import HEADER_BYTES
from trainium_worker.snapshots.store import run_directory

GLOBAL_BATCH = 8


class Unsavable:
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class Program:
    """A model, its optimizer and its step."""

    def __init__(self, mode: str, width: int) -> None:
        torch.manual_seed(7)
        module = torch.nn.Sequential(torch.nn.Linear(12, width), torch.nn.Tanh(), torch.nn.Linear(width, 3, bias=False))
        self.model: Any = DistributedDataParallel(module) if mode == "ddp" else fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.done = 0

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "extra": {"note": "steps", "done": self.done}}

    def load(self, reader: MemoryReader) -> None:
        loaded = self.state()
        dcp.load(loaded, storage_reader=reader)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        assert loaded["extra"] == {"note": "steps", "done": reader.step}
        self.done = loaded["extra"]["done"]

    def backward(self) -> float:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(self.done)
        inputs = torch.randn(GLOBAL_BATCH, 12, generator=generator).chunk(world_size)[rank]
        targets = torch.randn(GLOBAL_BATCH, 3, generator=generator).chunk(world_size)[rank]
        loss = (self.model(inputs) - targets).pow(2).mean()
        loss.backward()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        return float(mean)


def train(results: Path, *, mode: str, steps: int, width: int = 34, **options: Any) -> None:
    rank = dist.get_rank()
    saving_group = dist.new_group(backend="gloo")
    program = Program(mode, width)
    durable, directory = options.get("durable"), options.get("directory")
    reader = MemoryReader(durable, directory=directory)
    if reader.step is not None:
        program.load(reader)
    report = {"resumed": reader.step, "source": reader.source, "losses": {}, "failures": {}}
    report_file = results / f"rank-{rank}.json"
    _write_atomically(report_file, report)
    saving = None
    while program.done < steps:
        loss = program.backward()
        if saving is not None:
            failed = saving.exception()
            if failed is not None:
                report["failures"][program.done] = str(failed)
        program.optimizer.step()
        program.optimizer.zero_grad()
        program.done += 1
        report["losses"][program.done] = loss
        if options.get("kill") == [rank, program.done]:
            os.kill(os.getpid(), signal.SIGKILL)
        writer, state = MemoryWriter(program.done, directory=directory), program.state()
        if options.get("unsavable_at") == [rank, program.done]:
            state["extra"]["unsavable"] = Unsavable()
        if options.get("synchronous"):
            dcp.save(state, storage_writer=writer, process_group=saving_group)
        else:
            saving = dcp.async_save(state, storage_writer=writer, process_group=saving_group)
        if program.done in options.get("durable_at", ()):
            if saving is not None:
                saving.result()
            dcp.save(program.state(), checkpoint_id=durable.format(step=program.done), process_group=saving_group)
        _write_atomically(report_file, report)
    if saving is not None:
        saving.result()


def save_each_step(
    results: Path,
    *,
    steps: int,
    case: str = "",
    kill: list[int] | None = None,
    fault: signal.Signals = signal.SIGKILL,
) -> None:
    """Train with `memory.save` after each step; report the steps saved, the bytes sent for each, and the weights.

    kill: rank, or -1 for all, and step after whose optimizer it gets the signal `fault`.
    """
    rank = dist.get_rank()
    report: dict[str, Any] = {"saved": [], "sent": []}
    send, transfer, saved = copies.send_part, copies.transfer, trainium_worker.saved

    def record_send(*arguments: Any) -> bool:
        report["sent"].append(len(arguments[-1]))
        return send(*arguments)

    def record_transfer(*arguments: Any, sends: Any, into: Any) -> None:
        report["sent"] += [len(message) - HEADER_BYTES for _, message in sends]
        transfer(*arguments, sends=sends, into=into)

    def record_saved(step: int, location: str) -> None:
        report["saved"].append(step)
        saved(step, location)

    vars(commit)["send_part"], vars(repeated)["transfer"] = record_send, record_transfer
    trainium_worker.saved = record_saved
    torch.manual_seed(7)
    layers = [torch.nn.Linear(12, 34), torch.nn.BatchNorm1d(34), torch.nn.Linear(34, 3)]
    module: Any = torch.nn.Sequential(*(layers if case == "buffers" else layers[::2]))
    model: Any = fully_shard(module) if case == "fsdp" else DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, values = memory.load(model, optimizer)
    report |= {"resumed": step, "values": [len(value or "") for value in values]}
    while step < steps:
        rows = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        inputs = rows.chunk(dist.get_world_size())[rank]
        model(inputs).pow(2).mean().backward()
        memory.wait()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if kill in ([rank, step], [-1, step]):
            _write_atomically(results / f"rank-{rank}.json", report)
            os.kill(os.getpid(), fault)
        if step == 4 and case in ("new tensor", f"new tensor of rank {rank}"):
            module.register_buffer("extra", torch.ones(5))
        values = "." * 800 * step if case == "values" and rank == 0 else ""
        memory.save(step, model, optimizer, None if case == "same" else values)
    memory.wait()
    tensors = (getattr(tensor, "full_tensor", tensor.detach)() for tensor in module.parameters())
    report["weights"] = [tensor.tolist() for tensor in tensors]
    _write_atomically(results / f"rank-{rank}.json", report)


def _write_atomically(path: Path, report: dict[str, Any]) -> None:
    """Replace the file atomically, so that a killed rank leaves no partial file."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(report))
    draft.replace(path)


def _run_rank(environment: dict[str, str], store: str, errors: str, results: Path, options: dict[str, Any]) -> None:
    os.environ.update(environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    torch.set_num_threads(1)
    limit = options.pop("file_limit", {}).get(int(environment["RANK"]))
    if limit is not None:  # larger files fail as on a full volume
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(environment["RANK"]), world_size=int(environment["WORLD_SIZE"])
    )
    try:
        options.pop("train", train)(results, **options)
    except Exception:  # noqa: BLE001 - any error of a test program
        traceback.print_exc()
        atexit._run_exitfuncs()  # as at the end of an interpreter
        os._exit(1)
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)


@dataclass
class SimulatedJob:
    """The nodes of a job, and the reports of their ranks in the newest attempt."""

    root: Path
    attempt: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)
    errors: str = ""

    def memory(self, node: int) -> Path:
        return self.root / f"node-{node}"

    def progress(self, node: int, local_rank: int = 0) -> Path:
        return self.memory(node) / "progress" / f"g1-r{local_rank}"

    def snapshots(self, node: int) -> list[Path]:
        return sorted(self.memory(node).rglob("*.snapshot"))

    def directory(self, node: int) -> Path:
        return run_directory(self.memory(node), "run")

    def lose_node(self, node: int) -> None:
        shutil.rmtree(self.memory(node))

    def run(self, *, nodes: list[int], per_node: int = 1, agent: bool = True, **options: Any) -> list[int | None]:
        """Run one attempt, end all ranks as the agent does once one has failed or stopped, and return the codes."""
        self.attempt += 1
        results = self.root / f"results-{self.attempt}"
        results.mkdir()
        errors = [self.root / f"errors-{self.attempt}-{rank}" for rank in range(len(nodes) * per_node)]
        context = fork_context()
        processes = []
        for rank, path in enumerate(errors):
            node, local = nodes[rank // per_node], rank % per_node
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(errors)),
                "TRAINIUM_RUN_ID": "run",
                "TRAINIUM_ATTEMPT": str(self.attempt),
                "TRAINIUM_MEMORY_DIR": str(self.memory(node)),
            }
            if agent:
                environment["TRAINIUM_PROGRESS_FILE"] = str(self.progress(node, local))
            store = str(self.root / f"store-{self.attempt}")
            arguments = (environment, store, str(path), results, options)
            processes.append(context.Process(target=_run_rank, args=arguments, daemon=True))
        for process in processes:
            process.start()
        deadline = time.monotonic() + scaled(60)
        while any(process.is_alive() for process in processes):
            if any(process.exitcode or _is_stopped(process) for process in processes) or time.monotonic() > deadline:
                for rank, process in enumerate(processes):
                    if agent and process.is_alive() and not _is_stopped(process):
                        request_save(self.progress(nodes[rank // per_node], rank % per_node), scaled(20))
                    process.kill()
            time.sleep(0.02)
        self.errors = "".join(path.read_text() for path in errors if path.exists())
        paths = [results / f"rank-{rank}.json" for rank in range(len(errors))]
        self.reports = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        return [process.exitcode for process in processes]


def _is_stopped(process: BaseProcess) -> bool:
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False
