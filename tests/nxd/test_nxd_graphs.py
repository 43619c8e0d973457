"""Run on the lazy device of torch_xla: one graph per micro-batch, compiled in the first step, and one read per step."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.torch_xla, pytest.mark.timeout(900)]

STEPS = 5
ACCUMULATION = 4


def run_steps(config: dict[str, Any], folder: Path, *overrides: str, memory: bool = False) -> list[dict[str, Any]]:
    file = folder / "trainer.yaml"
    file.write_text(yaml.safe_dump(config))
    argv = ["train", "--config", str(file), "--set", f"checkpoint.path={folder / 'checkpoints'}"]
    for override in ("backend=Nxd", "schedule.kind=Constant", "monitor.parameterNormSteps=0", *overrides):
        argv += ["--set", override]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if memory:
        environment["TRAINIUM_MEMORY_DIR"] = str(folder / "memory")
    script = Path(__file__).with_name("graphs.py")
    completed = subprocess.run(
        [sys.executable, str(script), *argv], env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]


def assert_graphs_are_reused(counts: list[dict[str, Any]], *, fetches: int) -> None:
    assert len(counts) == STEPS
    for before, after in itertools.pairwise(counts):
        assert after["compiled"] == before["compiled"]
        assert after["launched"] - before["launched"] == ACCUMULATION
        assert after["fetched"] - before["fetched"] == fetches


@pytest.mark.parametrize("mode", ["Replicated", "FullySharded"])
def test_steps_reuse_their_graphs_and_are_read_once(base_config: dict[str, Any], tmp_path: Path, mode: str) -> None:
    counts = run_steps(
        base_config, tmp_path, f"steps={STEPS}", f"dataParallel={mode}", "checkpoint.memory.everySteps=0"
    )
    assert_graphs_are_reused(counts, fetches=1)
    assert counts[-1]["not lowered"] == []


@pytest.mark.parametrize("mode", ["Replicated", "ShardedOptimizer"])
def test_a_tuning_with_dropout_reuses_its_graphs(
    base_config: dict[str, Any], base: Path, tmp_path: Path, mode: str
) -> None:
    tuning = "tuning={method: LoRA, trainable: [norm], lora: {rank: 4, dropout: 0.2, targets: ['*_proj', lm_head]}}"
    settings = [f"steps={STEPS}", f"dataParallel={mode}", "checkpoint.memory.everySteps=0", "recompute=Full", tuning]
    counts = run_steps(base_config, tmp_path, f"model.weights={base}", *settings)
    assert_graphs_are_reused(counts, fetches=1)
    assert counts[-1]["not lowered"] == []


def test_dropout_masks_equal_those_of_a_cpu() -> None:
    completed = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dropout_masks.py"))],
        env=os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout) == {"same": [True] * 4, "hasInt64": [False] * 4}


def test_a_memory_snapshot_adds_no_graph(base_config: dict[str, Any], tmp_path: Path) -> None:
    counts = run_steps(base_config, tmp_path, f"steps={STEPS}", memory=True)
    assert_graphs_are_reused(counts, fetches=2)


def test_losses_continue_after_save_and_resume_on_the_device(base_config: dict[str, Any], tmp_path: Path) -> None:
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    uninterrupted.mkdir()
    resumed.mkdir()
    sharded = "dataParallel=FullySharded"
    expected = run_steps(base_config, uninterrupted, "steps=6", sharded)
    first = run_steps(base_config, resumed, "steps=3", sharded)
    second = run_steps(base_config, resumed, "steps=6", sharded)
    assert [step["loss"] for step in (*first, *second)] == [step["loss"] for step in expected]
