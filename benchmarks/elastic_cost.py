"""Measure what `elastic` adds to a step of `transformers.Trainer`: `python -m benchmarks.elastic_cost`.

Two ranks of DDP train one model with and without the line, in turns.
A round compares the median steps of two runs, without the first ones. Each rank has a node with a memory folder, so
that saves are also copied. Medians have none of the copies, which `trainium_worker.memory` makes for 1 % of the time.
Processor time depends less on what else runs on the machine than the wall clock does.
The floor is one copy of the model and of the optimizer's state, with the checksums of the copy, on each rank: a node
needs all of it to replace a lost one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.figures import Report, create_parser
from benchmarks.harness.ranks import build_node_environment, run_ranks

RANKS, WARM_UP = 2, 5
_FLOOR_COPIES = 9
SIZES = {"0.3M": (64, 4, 48, 60), "5M": (256, 4, 96, 40), "30M": (512, 8, 128, 20)}
"""Width, layers, tokens of a sample, and steps, by the approximate number of parameters."""
_ADDED_GOAL, _RATIO_GOAL = 5.0, 1.01


def main() -> None:
    """Measure, print the figures and write them."""
    parser = create_parser("elastic_cost", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--rank", nargs=3, metavar=("MODE", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(options.rank[0], options.rank[1], Path(options.rank[2]))
        return
    report = Report("elastic_cost", options.quick)
    for size in options.sizes[:1] if options.quick else options.sizes:
        for _ in range(1 if options.quick else options.rounds):
            add_figures(report, measure("plain", size), measure("elastic", size))
            report.write(options.json)
    report.print()


def add_figures(report: Report, plain: StepCost, elastic: StepCost) -> None:
    """Add the figures of a round, in milliseconds."""
    parameters = plain.parameters
    report.add("a step", parameters, "ms", plain.step)
    report.add("a step with `elastic`", parameters, "ms", elastic.step)
    report.add("`elastic` adds to a step", parameters, "ms", elastic.step - plain.step, goal=_ADDED_GOAL)
    report.add("a step with `elastic` over one without", parameters, "x", elastic.step / plain.step, goal=_RATIO_GOAL)
    report.add("processor time of a rank's step", parameters, "ms", plain.processor)
    report.add("processor time of one copy of the state and its checksum", parameters, "ms", plain.floor)
    added = elastic.processor - plain.processor
    report.add("`elastic` adds to the processor time of a rank's step", parameters, "ms", added, goal=_ADDED_GOAL)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians of the steps of one run: milliseconds of the wall clock, and of the first rank's processors."""

    parameters: int
    step: float
    processor: float
    floor: float
    """Milliseconds of a processor for one copy of the state into shared memory, and its checksum."""


def measure(mode: str, size: str) -> StepCost:
    """Run two ranks and return what the first one measured."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        run_ranks([sys.executable, "-m", "benchmarks.elastic_cost", "--rank", mode, size, name], RANKS, folder)
        return StepCost(**json.loads((folder / "measured").read_text()))


def train(mode: str, size: str, folder: Path) -> None:
    """Run one rank; the first one writes what it has measured."""
    rank = int(os.environ["RANK"])
    os.environ |= build_node_environment(folder, rank)
    import torch  # noqa: PLC0415 - the ranks import it
    from transformers import (  # noqa: PLC0415 - as above
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from trainium_worker.hooks.transformers import elastic  # noqa: PLC0415 - as above

    width, layers, tokens, steps = SIZES[size]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    starts: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
            starts.append((time.perf_counter(), time.process_time()))

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4000

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = torch.randint(0, 1000, (tokens,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": row, "labels": row.clone()}

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        logging_steps=10,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[Clock()])
    (elastic(trainer) if mode == "elastic" else trainer).train()
    if rank == 0:
        pairs = [*zip(starts[WARM_UP:], starts[WARM_UP + 1 :], strict=False)]
        step, processor = (
            1000 * statistics.median(end[kind] - start[kind] for start, end in pairs) for kind in range(2)
        )
        measured = StepCost(model.num_parameters(), step, processor, measure_floor(trainer, folder / "floor"))
        (folder / "measured").write_text(json.dumps(asdict(measured)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group that nobody destroys aborts some ranks at their end, and destroying it hangs others


def measure_floor(trainer: Any, path: Path) -> float:
    """Return the milliseconds of a processor for a copy of a trainer's state in a file, and its checksum."""
    import torch  # noqa: PLC0415 - as in `train`

    from trainium_worker.snapshots.files import ALIGNMENT_BYTES, BLOCK_BYTES, SnapshotFile, checksum, round_up  # noqa: PLC0415

    states = trainer.optimizer.state_dict()["state"].values()
    tensors = [tensor.detach().contiguous() for tensor in trainer.model.parameters()]
    tensors += [tensor for values in states for tensor in values.values()]
    sizes = [round_up(tensor.nbytes, ALIGNMENT_BYTES) for tensor in tensors]
    payload = SnapshotFile.create(path, round_up(sum(sizes), BLOCK_BYTES)).payload
    targets = [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(tensors, torch.split(payload[: sum(sizes)], sizes), strict=True)
    ]
    times = []
    for _ in range(_FLOOR_COPIES):
        start = time.thread_time()
        torch._foreach_copy_(targets, tensors)
        checksum(payload)
        times.append(1000 * (time.thread_time() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
