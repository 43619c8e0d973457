"""Loading a base, and writing artifacts, against reading and copying the same files in the same run; and their memory.

In turns, in fresh processes: the base's files are read into memory, and a rank fills all its parameters from them; the
base is copied (`cp`, with fsync), a checkpoint of its size is consolidated to a Hugging Face folder, and an adapter is
merged into the base. Caches of the files are dropped before each, so that reads come from the device. A ratio is what
our code reaches of the plain work that was measured right before it, in bytes of the files that are read or written.
Memory is what a process has beyond its imports at its worst moment, in units of the largest tensor (float32).

    python -m benchmarks.training.artifacts [--mebibytes 1024] [--rounds 3] [--root DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision
from trainium_contract.trainer.model import ModelConfig
from trainium_contract.trainer.tuning import TuningConfig
from trainium_trainer.artifacts.export import export
from trainium_trainer.artifacts.writer import Alone, Blueprint, write_artifact
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.storage.opening import open_storage
from trainium_trainer.checkpoint.storage.protocol import Retry
from trainium_trainer.checkpoint.whole_tensors import TensorSource, write_whole
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.huggingface import to_config
from trainium_trainer.tuning.choice import choose, parameter_sizes
from trainium_trainer.weights import BaseWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.models.shapes import ModelShape

_MEBIBYTE = 2**20
_GOAL_RATIO = 0.7
_GOAL_TENSORS = 2.0
_VOCABULARY = 32_000
_WIDTH = 2048


def shape_for(mebibytes: int) -> ModelShape:
    """A model of about that size in bfloat16."""
    layer = (4 * _WIDTH * _WIDTH + 3 * _WIDTH * 5504) * 2
    layers = max(1, (mebibytes * _MEBIBYTE - _VOCABULARY * _WIDTH * 2) // layer)
    fields = {"hiddenSize": _WIDTH, "intermediateSize": 5504, "numLayers": layers, "vocabSize": _VOCABULARY}
    heads = {"numAttentionHeads": 16, "numKeyValueHeads": 16}
    return resolve_shape(ModelConfig.model_validate(fields | heads), _VOCABULARY)


def tuning() -> TuningConfig:
    """Adapters beside every projection: as much merging as there can be."""
    return TuningConfig.model_validate({"method": "LoRA", "lora": {"rank": 16, "targets": ["*_proj"]}})


def make_base(folder: Path, shape: ModelShape) -> None:
    """A Hugging Face folder in bfloat16, of files of half a gigabyte."""
    blueprint = Blueprint(
        kind=ArtifactKind.MODEL,
        step=0,
        identity="",
        stem="model",
        dtype="BF16",
        sizes=parameter_sizes(shape),
        rows=lambda name, _, count, dtype: torch.randn(count, *parameter_sizes(shape)[name][1:]).to(dtype),
        companions=lambda: {"config.json": json.dumps(to_config(shape)).encode()},
        largest=500_000_000,
    )
    write_artifact(blueprint, open_storage(str(folder)), Alone(), retry=Retry())


def _random(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size).to(dtype)


def make_runs(folder: Path, shape: ModelShape) -> None:
    """A checkpoint of all weights in bfloat16, and one of adapters with the base's digest."""
    digest = BaseWeights.open(str(folder / "base")).digest
    adapters: dict[str, Any] = {"tuning": tuning().to_wire(), "weights": digest}
    for name, sizes, dtype, settings in (
        ("full", parameter_sizes(shape), torch.bfloat16, {}),
        ("lora", choose(shape, tuning()).sizes, torch.float32, adapters),
    ):
        sources = [
            TensorSource(f"model.{key}", dtype, torch.Size(size), partial(_random, size, dtype))
            for key, size in sizes.items()
        ]
        position = Position(step=1, samples=1, tokens=1)
        fixed = {"model": shape.to_json(), "seed": 0} | settings
        write_whole(open_storage(str(folder / name)), sources, position, fixed, Retry())


def read_all(folder: Path) -> None:
    """The files as they are, into memory."""
    for path in sorted((folder / "base").glob("*.safetensors")):
        path.read_bytes()


def load_all(folder: Path) -> None:
    """A rank that holds the whole model fills it."""
    weights = BaseWeights.open(str(folder / "base"))
    for name, size in parameter_sizes(weights.shape).items():
        weights.fill(name, (0,) * len(size), torch.empty(size, dtype=torch.bfloat16))


def copy_all(folder: Path) -> None:
    """What `cp` does, synchronised."""
    (folder / "out").mkdir()
    for path in sorted((folder / "base").glob("*.safetensors")):
        target = folder / "out" / path.name
        shutil.copyfile(path, target)
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def consolidate(folder: Path) -> None:
    """A checkpoint becomes a folder of the same size."""
    export(str(folder / "full"), folder / "out", precision=ArtifactPrecision.BFLOAT16)


def merge_all(folder: Path) -> None:
    """A checkpoint of adapters and its base become a folder of the base's size."""
    base = str(folder / "base")
    export(str(folder / "lora"), folder / "out", base=base, precision=ArtifactPrecision.BFLOAT16)


WORK: dict[str, Callable[[Path], None]] = {
    "read": read_all,
    "load": load_all,
    "copy": copy_all,
    "consolidate": consolidate,
    "merge": merge_all,
}
PAIRS = (("load", "read"), ("consolidate", "copy"), ("merge", "copy"))
"""What is measured, and what right before it."""


def cool(folder: Path) -> None:
    """Drop the cached pages of all files in a folder."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def resident(key: str) -> int:
    """Bytes of this process by its status: VmRSS now, VmHWM at most."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split(f"{key}:")[1].split()[0]) * 1024


def child(name: str, folder: Path, results: Any) -> None:
    """One piece of work in a process of its own."""
    torch.randn(256, 256) @ torch.randn(256, 256)  # what a library makes when it is first used
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    began = time.perf_counter()
    WORK[name](folder)
    results.put((time.perf_counter() - began, resident("VmHWM") - before))


def play(name: str, folder: Path) -> tuple[float, int]:
    """Seconds and bytes of memory of one piece of work, from cold caches."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    cool(folder)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=child, args=(name, folder, results), daemon=True)
    process.start()
    found: tuple[float, int] = results.get(timeout=3600)
    process.join()
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--mebibytes", type=int, default=1024, help="of the base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, help="folder on the device to measure; by default the temporary one")
    options = parser.parse_args()
    shape = shape_for(options.mebibytes)
    largest = _VOCABULARY * _WIDTH * 4
    rows = []
    with tempfile.TemporaryDirectory(prefix="artifacts-", dir=options.root) as name:
        folder = Path(name)
        make_base(folder / "base", shape)
        make_runs(folder, shape)
        size = sum(path.stat().st_size for path in (folder / "base").glob("*.safetensors"))
        for ours, plain in PAIRS:
            pairs = [(play(plain, folder), play(ours, folder)) for _ in range(options.rounds)]
            rows.append(
                {
                    "name": ours,
                    "against": plain,
                    "ratio": round(statistics.median(one[0] / two[0] for one, two in pairs), 3),
                    "ownMiBs": round(size / _MEBIBYTE / statistics.median(two[0] for _, two in pairs), 1),
                    "plainMiBs": round(size / _MEBIBYTE / statistics.median(one[0] for one, _ in pairs), 1),
                    "tensors": round(max(two[1] for _, two in pairs) / largest, 2),
                }
            )
    report: dict[str, Any] = {
        "benchmark": "artifacts",
        "baseMiB": round(size / _MEBIBYTE),
        "rounds": options.rounds,
        "largestTensorMiB": round(largest / _MEBIBYTE),
        "goalRatio": _GOAL_RATIO,
        "goalTensors": _GOAL_TENSORS,
        "loadAverage": round(os.getloadavg()[0], 1),
        "figures": rows,
    }
    for row in rows:
        print(
            f"{row['name']:12} {row['ratio']:5.2f} x of {row['against']} ({row['plainMiBs']:,.0f} MiB/s), "
            f"{row['tensors']:.2f} tensors of memory",
            file=sys.stderr,
        )
    text = json.dumps(report, indent=2)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
