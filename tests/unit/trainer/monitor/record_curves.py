"""Record curves.json.gz: losses and gradient norms of ordinary and diverging real runs at tiny batches.

`python tests/unit/trainer/monitor/record_curves.py` takes some minutes. Ordinary: a small model on the documentation
of Python, batches of 1, 2 and 4 samples, three seeds each; and one run whose learning rate falls at the end.
Broken: after 500 ordinary steps at batch 4 the run continues with a learning rate 50 or 150 times as high.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

CURVES = Path(__file__).with_name("curves.json.gz")
_RATE = 2e-3


def config(folder: Path, *, batch: int, seed: int, steps: int, schedule: dict[str, Any]) -> dict[str, Any]:
    return {
        "steps": steps,
        "seed": seed,
        "batch": {"globalSize": batch, "microSize": batch},
        "data": {
            "source": "python-docs",
            "sequenceLength": 64,
            "cacheDirectory": str(folder / "cache"),
            "tokenizer": {"vocabSize": 1024},
        },
        "model": {
            "numLayers": 2,
            "hiddenSize": 64,
            "intermediateSize": 128,
            "numAttentionHeads": 4,
            "numKeyValueHeads": 4,
        },
        "optimizer": {"learningRate": _RATE},
        "schedule": {"warmupSteps": 50} | schedule,
        "checkpoint": {"durable": {"everySeconds": None}},
        "monitor": {"tensorboard": False},
    }


def train(folder: Path, name: str, settings: dict[str, Any]) -> list[list[float]]:
    """Return the loss and gradient norm of each step; a second run of the same name resumes."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings | {"checkpoint": settings["checkpoint"] | {"path": str(folder / name)}}))
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    command = [sys.executable, "-m", "trainium_trainer", "train", "--config", str(file)]
    subprocess.run(command, env=os.environ | variables, check=True, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [[float(f"{line[key]:.5g}") for key in ("loss", "gradNorm")] for line in lines]


def main() -> None:
    curves: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="curves-") as name:
        folder = Path(name)
        for seed in (1, 2, 3):
            for batch in (1, 2, 4):
                settings = config(folder, batch=batch, seed=seed, steps=1500, schedule={})
                curves[f"ordinary, batch {batch}, seed {seed}"] = train(folder, f"b{batch}-s{seed}", settings)
        falling_rate = {"kind": "WarmupStableDecay", "warmupSteps": 100, "decaySteps": 1200, "finalRatio": 0.02}
        settings = config(folder, batch=4, seed=1, steps=3000, schedule=falling_rate) | {
            "optimizer": {"learningRate": 2.5e-3}
        }
        curves["ordinary, batch 4, rate falls"] = train(folder, "fall", settings)
        for times in (50, 150):
            constant_rate = {"kind": "WarmupStableDecay", "decaySteps": 1}
            settings = config(folder, batch=4, seed=1, steps=500, schedule=constant_rate)
            train(folder, f"broken-{times}", settings)
            settings |= {"steps": 900, "optimizer": {"learningRate": times * _RATE}}
            curves[f"broken, rate x {times}"] = train(folder, f"broken-{times}", settings)
    CURVES.write_bytes(gzip.compress(json.dumps(curves, separators=(",", ":")).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
