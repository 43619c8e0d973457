"""From `kubectl apply` to the end of the first step: pretraining, full fine-tuning and LoRA of one model, in turns.

Two workers on a real control plane share this machine's cores. The model is the same for all three; the fine-tunes read
it from a folder, pretraining draws it. Text and its tokens are in a cache that all jobs mount, so that what is measured
is the start; the first round, which fills it, does not count.

    python -m benchmarks.cluster.first_step [--repeat 3] --json FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_contract.trainer.model import ModelConfig
from trainium_devcluster.cluster import Cluster, node_specs, system_node
from trainium_devcluster.story.jobs import NAMESPACE, Story
from trainium_devcluster.story.view import View
from trainium_trainer.artifacts.writer import Alone, Blueprint, write_artifact
from trainium_trainer.checkpoint.storage.opening import open_storage
from trainium_trainer.checkpoint.storage.protocol import Retry
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.huggingface import to_config
from trainium_trainer.tuning.choice import parameter_sizes

ROOT = Path(__file__).parents[2]
VOCABULARY = 1024
MODEL = {"hiddenSize": 512, "intermediateSize": 1376, "numLayers": 8, "numAttentionHeads": 8, "numKeyValueHeads": 8}
LORA = {"method": "LoRA", "lora": {"rank": 16, "targets": ["q_proj", "v_proj"]}}
KINDS: dict[str, dict[str, Any]] = {
    "pretraining": {"model": MODEL},
    "full fine-tune": {"model": {"weights": "/material/base"}},
    "LoRA": {"model": {"weights": "/material/base"}, "tuning": LORA},
}
"""Name -> what its trainer's configuration has of its own."""
SHARED: dict[str, Any] = {
    "steps": 2,
    "batch": {"globalSize": 2, "microSize": 1},
    "data": {
        "source": "python-docs",
        "sequenceLength": 64,
        "tokenizer": {"vocabSize": VOCABULARY},
        "cacheDirectory": "/cache",
    },
    "schedule": {"warmupSteps": 0},
    "artifacts": {"kinds": []},
}


class StartStory(Story):
    """Jobs that are applied, make their first step and go."""

    command = "python -m benchmarks.cluster.first_step"

    def manifest(self, name: str) -> dict[str, Any]:
        """A job of two workers without a configuration of the trainer."""
        mounts = [{"name": "material", "mountPath": "/material"}, {"name": "cache", "mountPath": "/cache"}]
        volumes = [
            {"name": mount["name"], "hostPath": {"path": str(self.out / mount["name"]), "type": "DirectoryOrCreate"}}
            for mount in mounts
        ]
        template = {"spec": {"containers": [{"name": "worker", "volumeMounts": mounts}], "volumes": volumes}}
        storage = {"hostPath": {"path": str(self.out / "checkpoints")}, "subPath": name}
        return {
            "apiVersion": "trainium.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "workers": {"replicas": 2, "accelerator": {"device": "cpu"}, "template": template},
                "trainer": SHARED,
                "checkpoint": {"storage": storage},
            },
        }

    def first_step(self, name: str, trainer: dict[str, Any]) -> float:
        """Seconds from before `kubectl apply` to the end of the first step."""
        job = self.manifest(name)
        job["spec"]["trainer"] = SHARED | trainer
        began = time.time()
        with self.run(job) as run:
            self.until(run, "the end", lambda: run.finished)
            run.log.refresh()
            ended = run.log.time_of(1)
        self.cluster.kubectl("delete", "trainingjob", name, "-n", NAMESPACE, "--wait=true")
        assert ended is not None
        return ended - began


def make_base(folder: Path) -> int:
    """A Hugging Face folder of the model; its parameters."""
    heads = {"numAttentionHeads": 8, "numKeyValueHeads": 8}
    shape = resolve_shape(ModelConfig.model_validate(MODEL | heads | {"vocabSize": VOCABULARY}), VOCABULARY)
    sizes = parameter_sizes(shape)

    def fill(name: str, _: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(count, *sizes[name][1:]) * 0.02).to(dtype)

    blueprint = Blueprint(
        kind=ArtifactKind.MODEL,
        step=0,
        identity="",
        stem="model",
        dtype="BF16",
        sizes=sizes,
        rows=fill,
        companions=lambda: {"config.json": json.dumps(to_config(shape)).encode()},
    )
    folder.mkdir(parents=True)
    write_artifact(blueprint, open_storage(str(folder)), Alone(), retry=Retry())
    return sum(torch.Size(size).numel() for size in sizes.values())


def measured(repeat: int, out: Path) -> tuple[int, dict[str, list[float]]]:
    """Parameters of the model, and the seconds of each kind; kinds take turns."""
    parameters = make_base(out / "material" / "base")
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with (
        View(Console()) as view,
        Cluster.start(nodes=[*node_specs(2, cpu="4", memory="8Gi"), system_node()], write=view.say) as cluster,
    ):
        story = StartStory(cluster, view, ROOT, out)
        story.install()
        for number in range(repeat + 1):
            for index, (kind, trainer) in enumerate(KINDS.items()):
                took = story.first_step(f"start-{number}-{index}", trainer)
                view.say(f"{kind}: {took:.2f} s")
                if number:
                    seconds[kind].append(took)
    return parameters, seconds


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainium-bench-") as folder:
        parameters, seconds = measured(options.repeat, Path(folder))
    floor = statistics.median(seconds["pretraining"])
    table = Table(title="From kubectl apply to the end of the first step")
    for heading in ("job", "median", "fastest", "slowest", "of pretraining"):
        table.add_column(heading, justify="left" if heading == "job" else "right")
    for kind, found in seconds.items():
        middle = statistics.median(found)
        table.add_row(kind, f"{middle:.2f} s", f"{min(found):.2f} s", f"{max(found):.2f} s", f"{middle / floor:.2f}")
    Console().print(table)
    options.json.write_text(json.dumps({"parameters": parameters, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
