"""Checkpoints on storage: committed whole, read by any reader, kept by count, and never lost to a killed process."""

import errno
import json
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.testing.suite.timeouts import until
from tests.testing.trainer.base_models import flip_bit, with_flipped_bit
from tests.unit.checkpoint.checkpoint_builders import SINGLE_RANK, HookedStorage, SlowStorage, position, start_run
from trainium_contract.exit_codes import ExitCode
from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_trainer.checkpoint.durable.durable_tier import Save
from trainium_trainer.checkpoint.errors import StaleGenerationError, TooSlowError
from trainium_trainer.exits import find_exit_code
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry


def list_folders(root: Any) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir() if path.is_dir())


def test_a_saved_state_is_resumed(tmp_path: Path) -> None:
    start_run(tmp_path).save_steps(3).close()
    report = start_run(tmp_path).report()
    assert (report["position"], report["wrong_tensors"], report["source"], report["durable_step"]) == (
        position(3),
        [],
        "durable",
        3,
    )
    assert list_folders(tmp_path) == ["step-3"]
    assert sorted(path.name for path in (tmp_path / "step-3").rglob("*") if path.is_file()) == [
        "COMMITTED",
        "blocks-00000.json",
        "index.json",
        "manifest.json",
        "shard-00000.safetensors",
    ]


def test_any_safetensors_reader_opens_the_files(tmp_path: Path) -> None:
    run = start_run(tmp_path).save_steps(2).close()
    with safe_open(shard_of(tmp_path / "step-2"), framework="pt") as file:
        assert set(file.keys()) == set(run.state.tensors)
        assert file.get_tensor("model.wide").equal(run.state.tensors["model.wide"])
        assert int(file.get_tensor("optimizer.step")) == 2


def test_steps_that_are_made_while_the_store_writes_do_not_change_the_checkpoint(tmp_path: Path) -> None:
    opened = threading.Event()
    opened.set()
    run = start_run(tmp_path, storage=HookedStorage(tmp_path, lambda _access: opened.wait() and None))
    run.flush()
    opened.clear()
    run.run_to(1, save_at=(1,))
    run.run_to(20)
    assert run.manager._durable.busy
    opened.set()
    run.flush()
    assert run.manager.durable_step == 1
    restarted = start_run(tmp_path)
    assert (restarted.resumed.step, restarted.wrong_tensors) == (1, [])


def test_a_save_that_is_due_during_another_save_is_skipped(tmp_path: Path) -> None:
    run = start_run(tmp_path, storage=SlowStorage(tmp_path, 0.1), durable={"everySteps": 1})
    run.flush()
    decisions = [run.advance() for _ in range(30)]
    assert decisions[0] is Save.STATE
    assert sum(map(bool, decisions)) < 10
    run.flush()
    assert run.advance() is Save.STATE
    run.flush()
    assert run.manager.durable_step == 31


def test_a_save_is_due_when_its_interval_has_passed(tmp_path: Path) -> None:
    now_seconds = [0.0]
    run = start_run(tmp_path, durable={"everySeconds": 60})
    run.manager._clock = lambda: now_seconds[0]
    run.manager._policy.saved_at = 0.0
    run.flush()
    assert run.advance() is Save.NOTHING
    now_seconds[0] = 59.0
    assert run.advance() is Save.NOTHING
    now_seconds[0] = 60.0
    assert run.advance() is Save.STATE
    run.flush()
    now_seconds[0] = 100.0
    assert run.advance() is Save.NOTHING
    assert run.manager.durable_step == 3


def test_a_checkpoint_is_committed_when_its_write_ends_and_not_at_the_next_save(tmp_path: Path) -> None:
    run = start_run(tmp_path, storage=SlowStorage(tmp_path, 0.01))
    run.run_to(1, save_at=(1,))
    until((tmp_path / "step-1" / "COMMITTED").exists, "the save is committed", pause=0.01)
    run.flush()


class StoppingStorage(HookedStorage):
    """A store that never returns from the access that matches `stop`, as if the process died there."""

    def __init__(self, root: Any, stop: str) -> None:
        super().__init__(root, self._block)
        self.stop = stop
        self.reached = threading.Event()

    def _block(self, access: str) -> None:
        if re.fullmatch(self.stop, access):
            self.reached.set()
            threading.Event().wait()


@pytest.mark.parametrize(
    "stop",
    [
        "before write step-6/.*/shard-00000.*",
        "after write step-6/.*/shard-00000.*",
        "before write .*/index.json",
        "before write .*/blocks-00000.json",
        "before write .*/manifest.json",
        "after write .*/manifest.json",
        "before create step-6/COMMITTED",
    ],
)
def test_a_process_that_dies_at_any_point_of_a_save_leaves_the_checkpoint_before_it(tmp_path: Path, stop: str) -> None:
    start_run(tmp_path).save_steps(3).close()
    run = start_run(tmp_path, storage=(storage := StoppingStorage(tmp_path, stop)))
    run.run_to(6, save_at=(6,))
    assert storage.reached.wait(20)
    restarted = start_run(tmp_path)
    assert (restarted.resumed.step, restarted.wrong_tensors, restarted.manager.warnings) == (3, [], [])
    restarted.flush()
    assert list_folders(tmp_path) == ["step-3"]
    restarted.save_steps(6)
    last = start_run(tmp_path)
    assert (last.resumed.step, last.wrong_tensors) == (6, [])


SHARD = "*/shard-00000.safetensors"


def shard_of(folder: Path) -> Path:
    return next(folder.glob(SHARD))


def alter_tokens(data: bytes) -> bytes:
    manifest = json.loads(data)
    return json.dumps(manifest | {"tokens": manifest["tokens"] + 1}).encode()


def reverse_digests(data: bytes) -> bytes:
    digests = json.loads(data)["files"]["shard-00000.safetensors"]["blocks"].encode()
    return data.replace(digests, digests[::-1])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        pytest.param(SHARD, lambda data: data[:-10], id="a truncated shard"),
        pytest.param(SHARD, with_flipped_bit, id="a flipped bit"),
        pytest.param("*/index.json", lambda _: None, id="a missing file"),
        pytest.param("*/manifest.json", alter_tokens, id="an altered manifest"),
        pytest.param("*/index.json", lambda data: data.replace(b'"shape":[12', b'"shape":[11', 1), id="another shape"),
        pytest.param("*/blocks-00000.json", reverse_digests, id="altered digests"),
        pytest.param("COMMITTED", lambda _: b"{", id="a receipt that is not JSON"),
    ],
)
def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_is_used(
    tmp_path: Path, file: str, damage: Callable[[bytes], bytes | None]
) -> None:
    start_run(tmp_path).save_steps(2, 4).close()
    (path,) = (tmp_path / "step-4").glob(file)
    data = damage(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    restarted = start_run(tmp_path)
    assert (restarted.resumed.step, restarted.wrong_tensors, restarted.manager.durable_step) == (2, [], 2)
    assert len(restarted.manager.warnings) == 1
    assert "checkpoint of step 4 is damaged and not used" in restarted.manager.warnings[0]
    restarted.save_steps(4)
    last = start_run(tmp_path)
    assert (last.resumed.step, last.wrong_tensors, last.manager.warnings) == (4, [], [])


def test_the_newest_are_kept_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    start_run(tmp_path, durable={"keepLast": 2}).save_steps(1, 2, 3, 4).close()
    assert list_folders(tmp_path) == ["step-3", "step-4"]
    flip_bit(shard_of(tmp_path / "step-4"))
    run = start_run(tmp_path, durable={"keepLast": 1})
    assert run.resumed.step == 3
    run.save_steps(5)
    assert list_folders(tmp_path) == ["step-5"]


def test_a_damaged_checkpoint_is_kept_as_long_as_a_good_one_of_its_age_would_be(tmp_path: Path) -> None:
    start_run(tmp_path).save_steps(1, 2).close()
    flip_bit(shard_of(tmp_path / "step-2"))
    run = start_run(tmp_path)
    assert run.resumed.step == 1
    run.save_steps(3)
    assert list_folders(tmp_path) == ["step-1", "step-2", "step-3"]
    run.save_steps(4)
    assert list_folders(tmp_path) == ["step-1", "step-2", "step-3", "step-4"]
    run.save_steps(5)
    assert list_folders(tmp_path) == ["step-3", "step-4", "step-5"]


def test_another_start_of_the_run_that_committed_the_step_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    run = start_run(tmp_path).flush()
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "COMMITTED").write_text("another start")
    run.run_to(2, save_at=(2,))
    with pytest.raises(StaleGenerationError, match="another start of the run"):
        run.flush()
    assert (tmp_path / "step-2" / "COMMITTED").read_text() == "another start"


def test_an_unreadable_store_marks_no_checkpoint_as_damaged(tmp_path: Path) -> None:
    start_run(tmp_path).save_steps(1, 2).close()

    class UnreadableStorage(PosixStorage):
        def read_into(self, name: str, start: int, target: memoryview) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(StorageError, match="Input/output error") as caught:
        start_run(tmp_path, storage=UnreadableStorage(tmp_path))
    assert find_exit_code(caught.value) == ExitCode.STORAGE_UNAVAILABLE
    assert start_run(tmp_path).resumed.step == 2


def test_nothing_is_removed_before_the_next_commit(tmp_path: Path) -> None:
    start_run(tmp_path).save_steps(1, 2, 3).close()
    run = start_run(tmp_path, durable={"keepLast": 1}).flush()
    assert list_folders(tmp_path) == ["step-1", "step-2", "step-3"]
    run.close()


def test_leftovers_of_saves_that_never_ended_are_removed(tmp_path: Path) -> None:
    start_run(tmp_path).save_steps(1).close()
    fence = json.loads((tmp_path / "GENERATION").read_bytes())
    (tmp_path / "GENERATION").write_text(json.dumps(fence | {"attempts": [*fence["attempts"], "g0-other", "g1-abc"]}))
    for name in ("step-1/g0-other", "step-9/g1-abc"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "shard-00000.safetensors").write_text("half")
    (tmp_path / "notes").mkdir()
    start_run(tmp_path).flush()
    assert list_folders(tmp_path) == ["notes", "step-1"]
    assert len(list_folders(tmp_path / "step-1")) == 1


def test_an_older_generation_cannot_commit(tmp_path: Path) -> None:
    old = start_run(tmp_path, generation=1).flush()
    start_run(tmp_path, generation=2).flush().save_steps(1)
    old.run_to(2, save_at=(2,))
    with pytest.raises(StaleGenerationError, match="generation 2") as caught:
        old.flush()
    assert find_exit_code(caught.value) == ExitCode.PEER_LOST
    assert list_folders(tmp_path) == ["step-1"]
    with pytest.raises(StaleGenerationError):
        start_run(tmp_path, generation=1)


def test_a_recreated_job_takes_over_its_folder_at_generation_one(tmp_path: Path) -> None:
    start_run(tmp_path, generation=7, run="first").save_steps(3).close()
    restarted = start_run(tmp_path, generation=1, run="second")
    assert (restarted.resumed.step, restarted.wrong_tensors) == (3, [])
    restarted.save_steps(4)
    assert restarted.manager.durable_step == 4


def test_a_rank_that_was_paused_for_long_ends_if_the_run_has_restarted_without_it(tmp_path: Path) -> None:
    stopped = start_run(tmp_path)
    stopped.manager.check_owner(time.monotonic() - 60)
    successor = start_run(tmp_path)
    stopped.manager.check_owner(time.monotonic())
    with pytest.raises(StaleGenerationError):
        stopped.manager.check_owner(time.monotonic() - 60)
    successor.manager.check_owner(time.monotonic() - 60)


def test_a_store_that_fails_does_not_delay_a_step_that_took_long(tmp_path: Path) -> None:
    run = start_run(tmp_path).flush()
    (tmp_path / "GENERATION").unlink()
    (tmp_path / "GENERATION").mkdir()
    run.manager.check_owner(time.monotonic() - 60)
    assert run.manager._ownership_check._thread is not None, "the store was asked"


def test_a_folder_that_cannot_be_written_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/inside: .*choose another checkpoint\.path") as caught:
        start_run(tmp_path / "file" / "inside")
    assert find_exit_code(caught.value) == ExitCode.STORAGE_UNAVAILABLE
    if os.getuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(StorageError, match=f"user {os.getuid()} cannot write there: make it writable"):
            start_run(tmp_path / "locked")


def test_a_full_disk_is_reported_at_the_next_step_without_retries(tmp_path: Path) -> None:
    waits = []
    run = start_run(tmp_path, retry=Retry(delays=(0.5, 2.0), sleep=waits.append)).flush()
    limits_before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits_before[1]))
    try:
        run.run_to(1, save_at=(1,))
        run.manager._durable._thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits_before)
    with pytest.raises(StorageError, match="the store is full"):
        run.advance()
    assert waits == []  # a file-size limit does not pass
    assert list_folders(tmp_path) == []
    run.save_steps(3)
    assert run.manager.durable_step == 3


class FullStorage(HookedStorage):
    """A store that is full for the first `failures` files."""

    def __init__(self, root: Any, failures: int) -> None:
        super().__init__(root, self._refuse)
        self.failures = failures

    def _refuse(self, access: str) -> None:
        if "before write step-" in access and self.failures:
            self.failures -= 1
            raise OSError(28, os.strerror(28))


def test_a_store_that_stays_full_stops_the_run_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    start_run(tmp_path).save_steps(1).close()
    waits = []
    retry = Retry(delays=(0.5, 2.0), sleep=waits.append)
    run = start_run(tmp_path, storage=FullStorage(tmp_path, 99), retry=retry).flush()
    run.run_to(2, save_at=(2,))
    run.manager._durable._thread.join()
    with pytest.raises(StorageError, match=r"the store is full.*free space") as caught:
        run.advance()
    assert find_exit_code(caught.value) == ExitCode.STORAGE_UNAVAILABLE
    assert waits == [0.5, 2.0]
    assert list_folders(tmp_path) == ["step-1"]


def test_training_continues_with_a_warning_until_too_many_saves_have_failed(tmp_path: Path) -> None:
    now_seconds = [0.0]
    storage = FullStorage(tmp_path, 99)
    run = start_run(tmp_path, storage=storage, durable={"everySeconds": 300, "failureTolerance": 2})
    run.manager._clock = lambda: now_seconds[0]
    run.manager._policy.saved_at = 0.0
    run.flush()

    def save_starts_after(seconds: float) -> bool:
        now_seconds[0] += seconds
        started = bool(run.advance())
        if started:
            run.manager._durable._thread.join()
        return started

    assert save_starts_after(300)
    assert not save_starts_after(1)  # the failure is reported here
    assert run.manager.warnings[0].startswith(f"checkpoint storage {tmp_path}: No space left on device: the store")
    assert "(saves failed in a row: 1, there is no durable" in run.manager.warnings[0]
    assert not save_starts_after(58)
    assert save_starts_after(3)
    storage.failures = 0
    assert not save_starts_after(1)
    assert save_starts_after(60)
    assert not save_starts_after(1)
    assert run.manager.warnings[2:] == [f"saving works again: step {run.manager.durable_step} is committed"]
    assert not save_starts_after(250)

    storage.failures = 99
    assert save_starts_after(60)
    for failures in (1, 2):
        assert not save_starts_after(1)
        assert f"in a row: {failures}, " in run.manager.warnings[-1]
        assert save_starts_after(61)
    with pytest.raises(StorageError, match=r"3 saves in a row have failed; the newest durable checkpoint is step 6"):
        run.advance()
    assert list_folders(tmp_path) == ["step-6"]


def test_a_save_that_does_not_end_stops_the_run_in_time_and_blocks_no_step(tmp_path: Path) -> None:
    run = start_run(tmp_path, storage=StoppingStorage(tmp_path, ".*index.json"), durable={"saveTimeoutSeconds": 1})
    run.flush()
    run.run_to(3, save_at=(1,))
    assert run.manager.warnings == []
    with pytest.raises(TooSlowError, match=r"has not ended after 1 s .*newest durable checkpoint: none") as caught:
        run.manager.finish(position(3))
    assert find_exit_code(caught.value) == ExitCode.STORAGE_UNAVAILABLE
    with pytest.raises(TooSlowError, match="saveTimeoutSeconds"):
        run.advance()


def test_the_last_save_is_retried_as_often_as_failures_are_tolerated(tmp_path: Path) -> None:
    run = start_run(tmp_path, storage=FullStorage(tmp_path, 2), durable={"failureTolerance": 2}).run_to(3)
    run.manager.finish(position(3))
    assert run.manager.durable_step == 3
    assert [warning[:18] for warning in run.manager.warnings] == [
        "checkpoint storage",
        "checkpoint storage",
        "saving works again",
    ]


@pytest.mark.parametrize("memory_ends", [False, True])
def test_a_rank_that_leaves_does_not_wait_for_space_on_a_full_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_ends: bool
) -> None:
    storage = FullStorage(tmp_path / "root", 99)
    hourly = Retry(delays=(3600.0, 3600.0))
    run = start_run(
        tmp_path / "root", tmp_path / "memory", storage=storage, retry=hourly, durable={"failureTolerance": 9}
    )
    run.flush()
    monkeypatch.setattr(run.manager, "_mesh", replace(SINGLE_RANK, dp_mode=DataParallelMode.FULLY_SHARDED))
    run.run_to(3, save_at=(3,))  # a save of an earlier step waits for space already
    run.advance(save=False)
    if memory_ends:
        with pytest.raises(StorageError, match="the store is full"):
            run.manager.save_before_exit(position(4), memory_ends=True)
    else:
        run.manager.save_before_exit(position(4))
        assert run.manager.memory_step == 4
        assert run.manager.warnings[-1].startswith(f"checkpoint storage {tmp_path / 'root'}: ")
        assert run.manager.warnings[-1].endswith("step 4 is in memory only")
    assert storage.failures >= 95, "each save is tried once"


def test_milestones_hold_the_weights_alone_and_are_never_removed(tmp_path: Path) -> None:
    settings = {"durable": {"everySteps": 1, "keepLast": 1}, "milestones": {"everyTokens": 2500}}
    run = start_run(tmp_path, **settings).flush()
    for _ in range(9):  # 1,000 tokens each
        run.advance()
        run.flush()
    run.manager.finish(position(9))
    run.close()
    assert list_folders(tmp_path) == ["milestone-3", "milestone-5", "milestone-8", "step-9"]
    with safe_open(shard_of(tmp_path / "milestone-3"), framework="pt") as file:
        assert sorted(file.keys()) == ["model.norm", "model.tall", "model.wide"]
        assert file.get_tensor("model.norm").equal(run.state._full_tensor("model.norm", 3))
    restarted = start_run(tmp_path, **settings).flush()
    assert (restarted.resumed.step, restarted.wrong_tensors) == (9, [])
    restarted.advance()
    restarted.flush()
    assert list_folders(tmp_path) == ["milestone-10", "milestone-3", "milestone-5", "milestone-8", "step-10"]


def test_a_milestone_that_falls_into_a_save_follows_it(tmp_path: Path) -> None:
    run = start_run(tmp_path, storage=SlowStorage(tmp_path, 0.05), milestones={"everyTokens": 2000}).flush()
    run.advance(save=True)
    while run.manager._durable.busy:
        run.advance()
    milestone = run.step + 1
    assert milestone > 2
    run.advance()
    run.flush()
    assert list_folders(tmp_path) == [f"milestone-{milestone}", "step-1"]
    run.manager.finish(position(milestone))
    assert [name for name in list_folders(tmp_path) if name.startswith("milestone")] == [f"milestone-{milestone}"]


@pytest.mark.skipif(os.getuid() != 0 or not Path("/dev/shm").is_dir(), reason="needs root to mount a small tmpfs")
def test_a_full_tmpfs_stops_the_save_and_disables_memory_snapshots(tmp_path: Path) -> None:
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        run = start_run(small, scale=300).flush()
        run.run_to(1, save_at=(1,))
        run.manager._durable._thread.join()
        with pytest.raises(StorageError, match="No space left on device: the store is full"):
            run.advance()
        assert list_folders(small) == []
        tiny = start_run(tmp_path / "root", small, scale=300)
        assert any("memory snapshots are off" in warning for warning in tiny.manager.warnings)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_finishing_commits_the_last_step_and_only_once(tmp_path: Path) -> None:
    run = start_run(tmp_path).run_to(3)
    run.manager.finish(position(3))
    assert run.manager.durable_step == 3
    written = (tmp_path / "step-3" / "COMMITTED").stat().st_mtime_ns
    run.manager.finish(position(3))
    assert (tmp_path / "step-3" / "COMMITTED").stat().st_mtime_ns == written


def test_a_run_that_leaves_without_a_memory_folder_saves_durably(tmp_path: Path) -> None:
    run = start_run(tmp_path).run_to(3)
    run.manager.save_before_exit(position(3))
    assert run.manager.durable_step == 3


def test_the_newer_of_memory_and_storage_is_resumed(tmp_path: Path) -> None:
    start_run(tmp_path / "root", tmp_path / "memory").run_to(6, save_at=(4,)).flush().close()
    restarted = start_run(tmp_path / "root", tmp_path / "memory").close()
    assert (restarted.resumed.step, restarted.report()["source"], restarted.manager.durable_step) == (6, "memory", 4)
    start_run(tmp_path / "root").save_steps(8).close()
    last = start_run(tmp_path / "root", tmp_path / "memory").close()
    assert (last.resumed.step, last.wrong_tensors, last.report()["source"]) == (8, [], "durable")


def test_a_state_with_something_other_than_tensors_is_refused(tmp_path: Path) -> None:
    run = start_run(tmp_path).flush()
    run.state.state_dict = lambda: {"lr": 0.1}
    with pytest.raises(TypeError, match="lr is float"):
        run.run_to(1, save_at=(1,))
