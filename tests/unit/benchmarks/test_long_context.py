"""The memory of a rank at 32,768 tokens, alone and with the sequence divided."""

from pathlib import Path

import pytest

from benchmarks.training_speed.runs import Task, run_trainer, write_text

LONG = 32_768
NARROW = {
    "hiddenSize": 64,
    "intermediateSize": 4096,
    "numLayers": 2,
    "numAttentionHeads": 1,
    "numKeyValueHeads": 1,
    "vocabSize": 4096,
    "maxPositions": LONG,
}
"""A model whose activations are most of its memory, and whose attention is quick."""


def memory_of_a_rank(folder: Path, ranks: int) -> int:
    folder.mkdir()
    task = Task(
        ranks=ranks, device="cpu", model=NARROW, sequence_length=LONG, micro_batch_size=1, accumulation=1, steps=1,
        half=False, sharded=False, recompute=False, compiled=False,
    )  # fmt: skip
    overrides = ["batch.globalSize=1", f"parallelism.context={ranks}"]
    return run_trainer(task, folder, write_text(folder), overrides).host_bytes


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_long_sequence_that_is_divided_takes_less_than_half_of_the_memory(tmp_path: Path) -> None:
    assert memory_of_a_rank(tmp_path / "divided", 4) < 0.5 * memory_of_a_rank(tmp_path / "alone", 1)
