"""Snapshots in memory: a restarted or killed process loses at most one step, and altered ones are not used."""

import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.testing.trainer.base_models import flip_bit
from tests.testing.trainer.fork_server import fork_context
from tests.unit.checkpoint.checkpoint_builders import SINGLE_RANK, State, position, start_run
from tests.unit.checkpoint.checkpoint_scenarios import train_until_killed
from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.checkpoint.memory.layout import BufferLayout, format_shard_name
from trainium_trainer.checkpoint.memory.memory_tier import _COPY_TIMEOUT_SECONDS, MemoryTier
from trainium_trainer.checkpoint.root.run_settings import hash_settings
from trainium_worker.snapshots.files import Version, read_part
from trainium_worker.snapshots.store import run_directory


def list_snapshots(memory: Any) -> list[Path]:
    return sorted(memory.rglob("*.snapshot"), key=lambda path: path.stat().st_mtime_ns)


def snapshot_of_step(memory: Any, step: int) -> Path:
    for path in list_snapshots(memory):
        part = read_part(path)
        if part is not None and part.version.step == step:
            return path
    raise AssertionError(f"no snapshot of step {step}")


def test_a_restarted_process_resumes_the_step_that_it_had_completed(tmp_path: Path) -> None:
    start_run(tmp_path / "root", tmp_path / "memory").run_to(5).close()
    report = start_run(tmp_path / "root", tmp_path / "memory").close().report()
    del report["warnings"]
    assert report == {
        "resumed_step": 5,
        "position": position(5),
        "wrong_tensors": [],
        "source": "memory",
        "durable_step": -1,
        "memory_step": 5,
    }


def create_tier(folder: Path, tensors: dict[str, torch.Tensor], name: str | None = None) -> MemoryTier:
    return MemoryTier(
        folder,
        name=name or format_shard_name(0, 1),
        layout=BufferLayout.of(tensors, hash_settings({"model": "one"})),
        generation=1,
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_process_killed_at_any_instant_loses_at_most_one_step(tmp_path: Path, seed: int) -> None:
    context = fork_context()
    completed = context.Value("l", 0)
    process = context.Process(
        target=train_until_killed, args=(tmp_path / "root", tmp_path / "memory", completed), daemon=True
    )
    process.start()
    deadline = time.monotonic() + 20
    while completed.value < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(random.Random(seed).uniform(0, 0.05))
    process.kill()
    process.join()
    process.close()
    steps = completed.value
    assert steps >= 3
    restarted = start_run(tmp_path / "root", tmp_path / "memory", scale=4000).close()
    assert restarted.resumed.step >= steps - 1
    assert restarted.wrong_tensors == []
    assert restarted.manager.warnings == []


def test_an_altered_snapshot_is_named_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    start_run(tmp_path / "root", tmp_path / "memory").run_to(6).close()
    flip_bit(snapshot_of_step(tmp_path / "memory", 6))
    restarted = start_run(tmp_path / "root", tmp_path / "memory")
    assert (restarted.resumed.step, restarted.wrong_tensors) == (5, [])
    assert any("checksum" in warning for warning in restarted.manager.warnings)
    restarted.run_to(9)
    restarted.close()
    last = start_run(tmp_path / "root", tmp_path / "memory").close()
    assert (last.resumed.step, last.wrong_tensors, last.manager.warnings) == (9, [], [])


def test_a_snapshot_whose_header_was_not_written_yet_is_no_damage(tmp_path: Path) -> None:
    start_run(tmp_path / "root", tmp_path / "memory").run_to(6).close()
    path = snapshot_of_step(tmp_path / "memory", 6)
    path.write_bytes(bytes(8) + path.read_bytes()[8:])
    restarted = start_run(tmp_path / "root", tmp_path / "memory").close()
    assert (restarted.resumed.step, restarted.wrong_tensors, restarted.manager.warnings) == (5, [], [])


def test_a_newer_generation_reads_older_snapshots_and_stops_their_writer(tmp_path: Path) -> None:
    old = start_run(tmp_path / "root", tmp_path / "memory", generation=3).run_to(4)
    old.manager.finish_snapshot()
    new = start_run(tmp_path / "root", tmp_path / "memory", generation=4)
    assert (new.resumed.step, new.wrong_tensors) == (4, [])
    with pytest.raises(StaleGenerationError, match="belongs to generation 4") as caught:
        old.advance()
    assert caught.value.newer == 4
    new.run_to(8)
    new.close()
    assert {path.name.split("-")[0] for path in list_snapshots(tmp_path / "memory")} == {"g4"}
    old.close()
    with pytest.raises(StaleGenerationError):
        start_run(tmp_path / "root", tmp_path / "memory", generation=3)


def test_snapshots_of_other_settings_are_not_used(tmp_path: Path) -> None:
    start_run(tmp_path / "root", tmp_path / "memory", run="one").run_to(4).close()
    other = start_run(tmp_path / "other", tmp_path / "memory", run="one", settings="two").close()
    assert other.resumed is None
    assert any("other settings" in warning for warning in other.manager.warnings)


def test_leftovers_of_another_layout_are_removed(tmp_path: Path) -> None:
    tensors = State(SINGLE_RANK).list_local_tensors()
    memory = run_directory(tmp_path / "memory", str(tmp_path / "root"))
    for name in (format_shard_name(1, 2, 0, 2), format_shard_name(0, 4)):
        tier = create_tier(memory, tensors, name)
        tier.claim_fence()
        assert tier.open_files()
        tier.stage(Version(2, 1, "session"), tensors)
        tier.close()
    run = start_run(tmp_path / "root", tmp_path / "memory", generation=2).run_to(1).close()
    assert run.resumed is None
    assert {path.name.split("-")[1] for path in list_snapshots(memory)} == {"t0of1"}


def test_snapshots_after_the_resumed_step_are_ignored_by_later_resumes(tmp_path: Path) -> None:
    start_run(tmp_path / "root", tmp_path / "memory").run_to(6).close()
    path = snapshot_of_step(tmp_path / "memory", 5)
    for step in (5, 6):
        flip_bit(snapshot_of_step(tmp_path / "memory", step))
    restarted = start_run(tmp_path / "root", tmp_path / "memory").close()
    assert restarted.resumed.step == 4
    assert path.exists()
    last = start_run(tmp_path / "root", tmp_path / "memory").close()
    assert (last.resumed.step, last.manager.warnings) == (4, [])


def test_a_memory_folder_without_space_disables_the_tier_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse_space)
    run = start_run(tmp_path / "root", tmp_path / "memory")
    assert any(
        "memory snapshots are off" in warning and "MiB are needed" in warning for warning in run.manager.warnings
    )
    run.run_to(3)
    run.manager.save_before_exit(position(3))
    run.close()
    restarted = start_run(tmp_path / "root")
    assert (restarted.resumed.step, restarted.wrong_tensors, restarted.report()["source"]) == (3, [], "durable")


def test_snapshots_are_taken_every_few_steps(tmp_path: Path) -> None:
    start_run(tmp_path / "root", tmp_path / "memory", memory_every=3).run_to(8).close()
    restarted = start_run(tmp_path / "root", tmp_path / "memory", memory_every=3).close()
    assert (restarted.resumed.step, restarted.wrong_tensors) == (6, [])


def test_a_run_that_leaves_takes_a_snapshot_between_intervals(tmp_path: Path) -> None:
    run = start_run(tmp_path / "root", tmp_path / "memory", memory_every=3).run_to(8)
    run.manager.save_before_exit(position(8))
    assert run.manager.memory_step == 8
    run.close()
    restarted = start_run(tmp_path / "root", tmp_path / "memory", memory_every=3).close()
    assert (restarted.resumed.step, restarted.wrong_tensors, restarted.manager.durable_step) == (8, [], -1)


def test_a_memory_folder_that_cannot_be_created_disables_the_tier_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = start_run(tmp_path / "root", tmp_path / "file" / "inside").run_to(2)
    (warning,) = run.manager.warnings
    assert "memory snapshots are off" in warning
    run.manager.save_before_exit(position(2))
    assert run.manager.durable_step == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside computation need a CUDA device")
def test_a_snapshot_of_a_cuda_device_holds_the_state_of_its_step_whatever_is_computed_beside_it(tmp_path: Path) -> None:
    state = {"w": torch.zeros(64 << 20, device="cuda")}
    noise = torch.randn(8192, 8192, device="cuda")
    tier = create_tier(tmp_path, state)
    tier.claim_fence()
    assert tier.open_files()
    for step in range(1, 7):
        tier.wait_for_snapshot()
        state["w"].fill_(step)
        tier.stage(Version(step, 1, "session"), state)
        noise = torch.tanh(noise @ noise)
    tier.wait_for_snapshot()
    for part in tier.list_records().values():
        assert (tier.layout.view_tensors(tier.open_part(part))[0] == part.version.step).all()
    tier.close()


class SlowCopy:
    """The copier of a tier; its copy arrives when the test sets `arrived`."""

    def __init__(self) -> None:
        self.arrived = False
        self.waits: list[float] = []

    def offer(self, slot: Any, step: int) -> None: ...

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return self.arrived

    def close(self) -> None: ...


def test_a_copy_that_does_not_arrive_is_waited_for_once_and_reported_once(tmp_path: Path) -> None:
    tier, copy = create_tier(tmp_path, State(SINGLE_RANK).list_local_tensors()), SlowCopy()
    tier._copying = copy
    for _ in range(3):
        tier.wait_for_snapshot()
    assert copy.waits == [_COPY_TIMEOUT_SECONDS, 0.0, 0.0]
    assert len(tier.warnings) == 1
    assert "has not arrived at its buddy" in tier.warnings[0]
    copy.arrived = True
    tier.wait_for_snapshot()
    copy.arrived = False
    tier.wait_for_snapshot()
    assert copy.waits[-1] == _COPY_TIMEOUT_SECONDS, "the next copy has the full timeout again"
    assert len(tier.warnings) == 2
    tier.close()
