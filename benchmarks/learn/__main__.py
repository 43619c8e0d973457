"""Train on Python's documentation and compare with n-grams; write JSON, page and picture.

Measures the speed of this machine first and trains as many steps as fit `--minutes`. Ends with 1 when the validation
loss is not below that of the yardstick, or no longer falls.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.learn import document
from benchmarks.learn.ngram import KneserNey
from benchmarks.parity.ours import run_trainer
from trainium_contract.models.parameters import count_parameters
from trainium_trainer.compile.rehearsal import launch_at
from trainium_trainer.configuration import config as configuration
from trainium_trainer.data.batches.samples import Samples, TextSample
from trainium_trainer.data.opening import open_data

ROOT = Path(__file__).parents[2]
ORDERS = (1, 2, 3, 5)
MEASUREMENTS = 10
"""Number of validations of the run."""
TRIAL_STEPS = 24
YARDSTICKS = {"cpu": 2, "cuda": 3}
"""Order of the n-grams to beat, by device."""
BASE: dict[str, Any] = {
    "model": {
        "numLayers": 4,
        "hiddenSize": 192,
        "intermediateSize": 512,
        "numAttentionHeads": 6,
        "numKeyValueHeads": 6,
    },
    "data": {
        "source": "python-docs",
        "sequenceLength": 128,
        "tokenizer": {"vocabSize": 4096},
        "validation": {"fraction": 0.1, "samples": 100_000},
    },
    "batch": {"globalSize": 8, "microSize": 4},
    "optimizer": {"learningRate": 2.5e-3, "beta2": 0.99},
    "schedule": {"kind": "WarmupStableDecay", "finalRatio": 0.02},
    "checkpoint": {"durable": {"everySeconds": None}},
    "monitor": {"tensorboard": False},
}
CUDA: dict[str, Any] = {
    "model": {
        "numLayers": 6,
        "hiddenSize": 384,
        "intermediateSize": 1024,
        "numAttentionHeads": 6,
        "numKeyValueHeads": 6,
    },
    "batch": {"globalSize": 32, "microSize": 32},
    "optimizer": {"learningRate": 1.5e-3, "beta2": 0.99, "weightDecay": 0.3},
}
"""Settings that differ on a CUDA device."""


def main() -> int:
    """Train, measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the training (default %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="so many steps, however long they take")
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0: one for each of the first 8 cores")
    parser.add_argument("--out", type=Path, default=ROOT / "out/learn", help="folder of the run and its JSON")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of learning.md and its picture")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = 1 if device == "cuda" else options.ranks or 2 ** int(math.log2(min(8, os.cpu_count() or 1)))
    for name in ("trial", "run"):
        shutil.rmtree(options.out / name, ignore_errors=True)
    settings = BASE | (CUDA if device == "cuda" else {})

    trial = write_config(settings, options.out, TRIAL_STEPS)
    grams, tokens = yardsticks(trial)
    print(f"n-grams: {', '.join(f'{order}: {loss:.3f}' for order, loss in grams.items())}", flush=True)
    batch = settings["batch"]["globalSize"] * settings["data"]["sequenceLength"]
    steps = max(MEASUREMENTS, options.steps // MEASUREMENTS * MEASUREMENTS) if options.steps else 0
    if not steps:
        run_trainer(trial, ["data.validation.everySteps=1000"], ranks=ranks, folder=options.out / "trial")
        speed = last_speed(options.out / "trial" / "run" / "metrics.jsonl")
        # A validation costs about a third of training on as many tokens: there is no backward pass.
        fitting = (60 * options.minutes * speed - MEASUREMENTS * tokens["validation"] / 3) / batch
        steps = max(1, int(fitting / MEASUREMENTS)) * MEASUREMENTS
        print(f"{speed:,.0f} tokens/s on {ranks} {device} processes: {steps} steps", flush=True)

    began, computed = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run_trainer(write_config(settings, options.out, steps), [], ranks=ranks, folder=options.out / "run")
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [json.loads(line) for line in (options.out / "run" / "run" / "metrics.jsonl").read_text().splitlines()]
    report = {
        "benchmark": "learn",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}" if device == "cpu" else torch.cuda.get_device_name(),
        "ranks": ranks,
        "seconds": round(seconds, 1),
        "processorSeconds": round(after.ru_utime + after.ru_stime - computed.ru_utime - computed.ru_stime, 1),
        "settings": settings,
        "parameters": count_parameters(
            configuration.resolve_settings(configuration.load(trial), launch_at(0, ranks)).shape
        ),
        "steps": steps,
        "tokens": tokens | {"batch": batch, "trained": lines[-1]["tokens"]},
        "nGrams": {str(order): loss for order, loss in grams.items()},
        "yardstick": YARDSTICKS[device],
        "curve": curve(lines),
    }
    report["passed"] = passed(report)
    (options.out / "learn.json").write_text(json.dumps(report, indent=1) + "\n")
    document.write(report, options.docs / "learning.md", options.docs / "images/learning.png")
    print(document.sentence(report), flush=True)
    return 0 if report["passed"] else 1


def write_config(settings: dict[str, Any], out: Path, steps: int) -> Path:
    """Write the YAML file of a run of `steps` steps: 5 % warm-up, 40 % decay at the end."""
    content = json.loads(json.dumps(settings))
    content["steps"] = steps
    content["data"]["cacheDirectory"] = str(out / "cache")
    content["data"]["validation"]["everySteps"] = max(1, steps // MEASUREMENTS)
    content["schedule"] |= {"warmupSteps": max(1, steps // 20), "decaySteps": max(1, 2 * steps // 5)}
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"steps-{steps}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def yardsticks(file: Path) -> tuple[dict[int, float], dict[str, int]]:
    """Return the losses of n-grams on the validation tokens, and the number of tokens.

    The n-grams look back as far as they want; the model only to the beginning of its sample.
    """
    config = configuration.load(file)
    data = open_data(config.data, config.batch.global_size)
    assert isinstance(data.training, Samples)
    (part,) = data.training.parts
    training = part.run.read(0, part.run.tokens).astype(np.int64)
    assert data.validation is not None
    samples = [sample.tokens for sample in data.validation.share(0, 1) if isinstance(sample, TextSample)]
    held = np.concatenate([samples[0][:1], *(sample[1:] for sample in samples)]).astype(np.int64)
    vocabulary = config.data.tokenizer.vocab_size
    grams = {order: KneserNey(training, order=order, vocabulary=vocabulary).loss(held) for order in ORDERS}
    return grams, {"training": len(training), "validation": len(held) - 1}


def last_speed(metrics: Path) -> float:
    """Return the tokens per second over the second half of a trial, whose first steps are slower."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    half = lines[len(lines) // 2 :]
    return float((half[-1]["tokens"] - half[0]["tokens"]) / sum(line["seconds"] for line in half[1:]))


def curve(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return time since the first step, tokens and losses of each validation."""
    began = lines[0]["time"] - lines[0]["seconds"]
    found, since = [], 0
    for number, line in enumerate(lines):
        if "validationLoss" in line:
            window = [one["loss"] for one in lines[since : number + 1]]
            since = number + 1
            found.append(
                {
                    "step": line["step"],
                    "seconds": round(line["time"] - began, 1),
                    "tokens": line["tokens"],
                    "learningRate": line["learningRate"],
                    "training": sum(window) / len(window),
                    "validation": line["validationLoss"],
                }
            )
    return found


def passed(report: dict[str, Any]) -> bool:
    """Return whether the last validation loss is the lowest one and below the baseline's."""
    losses = [point["validation"] for point in report["curve"]]
    return bool(losses[-1] < report["nGrams"][str(report["yardstick"])] and losses[-1] == min(losses) < losses[-2])


if __name__ == "__main__":
    sys.exit(main())
