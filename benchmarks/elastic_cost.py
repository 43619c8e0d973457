"""Measure what `elastic` adds to a step of `transformers.Trainer`: `python -m benchmarks.elastic_cost`.

Two ranks of DDP train one model with and without the line, in turns, with a memory folder for each rank as in a pod.
The figure is the median of the rounds' median steps, without the first ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ranks import run_ranks

RANKS, STEPS, WARM_UP = 2, 60, 5
SIZES = {"0.3M": (64, 4, 48), "5M": (256, 4, 96), "30M": (512, 8, 128)}
"""Width, layers and tokens of a sample, by the number of parameters."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--rank", nargs=3, metavar=("MODE", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(options.rank[0], options.rank[1], Path(options.rank[2]))
        return
    print("| parameters | step | with `elastic` | added | processor time of a rank | with `elastic` | added |")
    print("|---|---|---|---|---|---|---|")
    for size in options.sizes:
        runs = [(measure("plain", size), measure("elastic", size)) for _ in range(options.rounds)]
        cells = [size]
        for kind in range(2):
            plain, elastic = (statistics.median(run[mode][kind] for run in runs) * 1000 for mode in range(2))
            cells += [f"{plain:.1f} ms", f"{elastic:.1f} ms", f"{elastic - plain:.1f} ms, {elastic / plain - 1:.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def measure(mode: str, size: str) -> tuple[float, float]:
    """Return the median seconds of a step of one run, and those of the first rank's processor time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        run_ranks([sys.executable, "-m", "benchmarks.elastic_cost", "--rank", mode, size, name], RANKS, folder)
        seconds, processor = map(float, (folder / "seconds").read_text().split())
    return seconds, processor


def train(mode: str, size: str, folder: Path) -> None:
    """Run one rank; the first one writes the median seconds of its steps."""
    rank = os.environ["RANK"]
    memory = folder / f"node-{rank}"
    (memory / "progress").mkdir(parents=True)
    os.environ |= {"TRAINIUM_RUN_ID": "run", "TRAINIUM_ATTEMPT": "0", "TRAINIUM_GENERATION": "1"}
    os.environ |= {"TRAINIUM_MEMORY_DIR": str(memory), "TRAINIUM_PROGRESS_FILE": str(memory / "progress" / "g1-r0")}
    import torch  # noqa: PLC0415 - the ranks import it
    from transformers import (  # noqa: PLC0415 - as above
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from trainium_worker.hooks.transformers import elastic  # noqa: PLC0415 - as above

    width, layers, tokens = SIZES[size]
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
        vocab_size=1000, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder / "run"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS,
        logging_steps=10, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Rows(), callbacks=[Clock()])
    (elastic(trainer) if mode == "elastic" else trainer).train()
    if rank == "0":
        pairs = [*zip(starts[WARM_UP:], starts[WARM_UP + 1 :], strict=False)]
        medians = (statistics.median(end[kind] - start[kind] for start, end in pairs) for kind in range(2))
        (folder / "seconds").write_text(" ".join(map(str, medians)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group that nobody destroys aborts some ranks at their end, and destroying it hangs others


if __name__ == "__main__":
    main()
