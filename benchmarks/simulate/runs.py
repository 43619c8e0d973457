"""Training runs whose figures are published, as jobs of this operator: nodes, failures, what we assume.

Rates are interruptions per 1,000 node-days. What a publication does not tell is an assumption and named as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.job import TrainingJobSpec
from trainium_operator.simulate.stages import StageTimes, read_stages
from trainium_operator.simulate.virtual.failures import Mix

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = 2**31 - 1
LLAMA3_RATE = 419 / (54 * 2048) * 1000
"""3.8 unexpected interruptions."""
ALL_CAUSES_RATE = 22.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run, and what stands for it."""

    name: str
    published: str
    source: str
    nodes: int
    spares: int
    rate: float
    mix: Mix
    days: float
    """Of its publication; the table may have fewer."""
    spec: dict[str, Any]
    stages: dict[str, float]
    """In place of those of the file for trn1."""
    assumed: str

    def job(self) -> TrainingJobSpec:
        """The job, endless."""
        return TrainingJobSpec.model_validate(
            {
                **self.spec,
                "workers": {**self.spec.get("workers", {}), "replicas": self.nodes, "spares": self.spares},
                "trainer": {**self.spec.get("trainer", {}), "steps": ENDLESS, "nonFiniteTolerance": 3},
                "recovery": {"rescaleAfterSeconds": 600},
            }
        )

    def times(self, file: Path) -> StageTimes:
        """The stages: those of the file, with what is known to differ."""
        return read_stages(file, StageTimes()).replaced_by(self.stages)


_GPUS = {"accelerator": {"device": "cuda", "coresPerNode": 8}}


def _spec(workers: dict[str, Any], parallelism: dict[str, Any], batch: int) -> dict[str, Any]:
    return {
        "workers": workers,
        "parallelism": parallelism,
        "trainer": {
            "model": {"preset": "Llama2-7B"},
            "data": {"sequenceLength": 4096},
            "batch": {"globalSize": batch, "microSize": 1},
            "dataParallel": "ShardedOptimizer",
        },
        "checkpoint": {"durable": {"everySeconds": 600}},
        "precompile": {"enabled": True, "sizes": "All"},
    }


RUNS = (
    Run(
        name="HLAT 7B, 128 trn1 nodes",
        published="98.81 % uptime",
        source="AWS; arXiv 2404.10630",
        nodes=128,
        spares=2,
        rate=4.0,
        mix=Mix.HARDWARE,
        days=30.0,
        spec=_spec({"minReplicas": 64, "accelerator": {"instanceType": "trn1.32xlarge"}}, {"tensor": 8}, 1024),
        stages={},
        assumed="the rate, that of Llama 3 (HLAT tells none); 2.2 s a step",
    ),
    Run(
        name="Llama 3 405B, 2,048 nodes of 8",
        published="> 90 % effective time, 419 interruptions in 54 days",
        source="arXiv 2407.21783",
        nodes=2048,
        spares=16,
        rate=LLAMA3_RATE,
        mix=Mix.HARDWARE,
        days=54.0,
        spec=_spec({"minReplicas": 1024, **_GPUS}, {"tensor": 8, "pipeline": 16}, 2048),
        stages={
            "compileSeconds": 0.0,
            "stepSeconds": 6.0,
            "rendezvousSeconds": 30.0,
            "loadPeerSeconds": 20.0,
            "loadDurableSeconds": 180.0,
        },
        assumed="16 spares, 6 s a step, pipelines over 16 nodes, a rendezvous of 30 s",
    ),
    Run(
        name="ByteRobust, dense, 1,200 nodes of 8",
        published="97 % ETTR over three months",
        source="arXiv 2509.16293",
        nodes=1200,
        spares=12,
        rate=ALL_CAUSES_RATE,
        mix=Mix.ALL_CAUSES,
        days=90.0,
        spec=_spec({"minReplicas": 600, **_GPUS}, {"tensor": 8}, 2400),
        stages={
            "compileSeconds": 0.0,
            "stepSeconds": 6.0,
            "rendezvousSeconds": 20.0,
            "loadPeerSeconds": 20.0,
            "loadDurableSeconds": 120.0,
        },
        assumed="the rate, that of its fleet (20 to 22); 12 spares, 6 s a step, a rendezvous of 20 s",
    ),
    Run(
        name="Olmo Hybrid 7B, 64 nodes of 8",
        published="97 % active time, recoveries 3 min 42 s in the median",
        source="Ai2 and Lambda",
        nodes=64,
        spares=2,
        rate=ALL_CAUSES_RATE,
        mix=Mix.ALL_CAUSES,
        days=7.0,
        spec=_spec({"minReplicas": 32, **_GPUS}, {"tensor": 1}, 2048),
        stages={"compileSeconds": 0.0, "stepSeconds": 3.0},
        assumed="the rate of all causes (it tells none), 2 spares, 3 s a step",
    ),
)
