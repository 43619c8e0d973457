"""Estimate open files, raise the limit of a process, and refuse a limit that is too small."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.conftest import Launcher
from trainium_contract.requirements import descriptors


@given(st.integers(1, 100_000), st.integers(1, 3000))
def test_only_the_first_rank_needs_more_files_in_larger_jobs(world_size: int, nodes: int) -> None:
    assert descriptors.count_required_files(world_size + 1, nodes) >= descriptors.count_required_files(
        world_size, nodes
    )
    assert descriptors.count_files_of_rank(world_size) < 180
    assert descriptors.count_required_files(world_size, nodes) > world_size


def test_a_sufficient_or_absent_limit_is_not_reported() -> None:
    required = descriptors.count_required_files(4096, 128)
    assert not descriptors.explain_file_limit(required, 4096, 128)
    assert not descriptors.explain_file_limit(-1, 4096, 128)
    assert f"{required:,} are needed with 4,096 training processes" in descriptors.explain_file_limit(
        required - 1, 4096, 128
    )


def limit_files(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_raises_its_soft_limit_to_the_hard_one() -> None:
    code = "from trainium_contract.worker_process import open_files as f; print(f.raise_limit(), f.read_limit())"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=limit_files(256, 900), check=False
    )
    assert completed.stdout.split() == ["900", "900"]


def test_ranks_with_a_limit_that_is_too_small_end_with_64_and_one_sentence(launch: Launcher) -> None:
    batch = ["batch.globalSize=512", "batch.microSize=1"]
    job = launch(1, "run", batch, WORLD_SIZE="512", MASTER_PORT="1", TEST_OPEN_FILES="[256, 600]")
    assert job.wait() == [64], job.log()
    (line,) = (line for line in job.log().splitlines() if "ulimit" in line)
    assert "a process may open 600 files at most" in line
    assert "with 512 training processes: raise" in line


def test_ranks_hold_few_connections_to_each_other(launch: Launcher) -> None:
    job = launch(8, "world", ["steps=100000", "batch.globalSize=8", "batch.microSize=1"])
    job.wait_for_step(3)
    open_files = [sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()) for pid in job.pids]
    for pid in job.pids:
        os.kill(pid, 9)
    job.wait()
    assert open_files[0] <= descriptors.count_files_of_first_rank(8)
    meshes = 3 * 7  # connections of three groups to each other rank
    assert max(open_files[1:]) < 14 + meshes, open_files


def test_a_rank_with_another_mesh_ends_all_ranks_with_one_sentence(launch: Launcher) -> None:
    job = launch(2, "run", last_rank=["parallelism.tensor=2"])
    assert job.wait() == [64, 64], job.log()
    for rank in range(2):
        (line,) = (line for line in job.log(rank).splitlines() if "rank 1 has" in line)
        assert "rank 1 has parallelism.tensor 2, parallelism.pipeline 1" in line
        assert "but rank 0 has parallelism.tensor 1" in line
