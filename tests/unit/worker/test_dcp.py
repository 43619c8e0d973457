"""Recover programs that save with DCP from memory: real DDP and FSDP2 processes, killed and restarted."""

from pathlib import Path
from typing import Any

import pytest

import trainium_worker
from tests.unit.worker.programs import SimulatedJob
from trainium_worker.dcp import MemoryReader
from trainium_worker.dcp.parts import newest_complete
from trainium_worker.progress_record import read_notice, read_progress
from trainium_worker.snapshots.files import HEADER_BYTES, Part, Version
from trainium_worker.snapshots.store import SnapshotStore

STEPS = 9


def read_parts(directory: Path) -> dict[Path, Part]:
    return SnapshotStore(directory, print).parts()


@pytest.fixture
def job(tmp_path: Path) -> SimulatedJob:
    return SimulatedJob(tmp_path)


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, float]]:
    """Return the losses of uninterrupted runs without checkpoints, by mode and ranks."""
    losses = {}
    for mode, ranks in (("ddp", 2), ("fsdp", 4)):
        job = SimulatedJob(tmp_path_factory.mktemp(f"{mode}-{ranks}"))
        assert job.run(nodes=list(range(ranks)), agent=False, mode=mode, steps=STEPS) == [0] * ranks, job.errors
        losses[mode, ranks] = job.reports[0]["losses"]
        assert not list(job.root.rglob("*.snapshot")), "without an agent, no snapshots are kept"
    return losses


def after(losses: dict[str, float], step: int) -> dict[str, float]:
    return {number: loss for number, loss in losses.items() if int(number) > step}


@pytest.mark.parametrize(("mode", "nodes"), [("ddp", 2), ("fsdp", 4)])
def test_a_killed_rank_loses_at_most_one_step(
    job: SimulatedJob, expected_losses: dict[Any, dict[str, float]], mode: str, nodes: int
) -> None:
    codes = job.run(nodes=list(range(nodes)), mode=mode, steps=STEPS, kill=[1, 6])
    assert codes[1] == -9
    assert job.run(nodes=list(range(nodes)), mode=mode, steps=STEPS) == [0] * nodes, job.errors
    first = job.reports[0]
    assert (first["resumed"], first["source"]) == (5, "memory"), "step 6 was not complete"
    assert {report["resumed"] for report in job.reports} == {5}
    assert first["losses"] == after(expected_losses[mode, nodes], 5), "bitwise equal"


def test_a_lost_node_loses_at_most_one_step(job: SimulatedJob, expected_losses: dict[Any, dict[str, float]]) -> None:
    job.run(nodes=[0, 1], per_node=2, mode="fsdp", steps=STEPS, kill=[3, 6])
    assert all(len(job.snapshots(node)) == 8 for node in (0, 1)), "two snapshots of each rank and two copies"
    job.lose_node(0)
    assert job.run(nodes=[2, 1], per_node=2, mode="fsdp", steps=STEPS) == [0] * 4, job.errors
    assert [(report["resumed"], report["source"]) for report in job.reports] == [(5, "memory")] * 4
    assert job.reports[0]["losses"] == after(expected_losses["fsdp", 4], 5), "bitwise equal"
    assert all(len(job.snapshots(node)) == 8 for node in (1, 2)), "the resumed snapshots are removed"


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_a_program_resumes_from_memory_at_another_size(
    job: SimulatedJob, expected_losses: dict[Any, dict[str, float]], mode: str
) -> None:
    expected = expected_losses["fsdp", 4]
    job.run(nodes=[0, 1, 2, 3], mode=mode, steps=STEPS, kill=[2, 4])
    job.lose_node(3)
    job.run(nodes=[0, 1], mode=mode, steps=STEPS, kill=[1, 7])
    assert job.reports[0]["resumed"] == 3, job.errors
    smaller = job.reports[0]["losses"]
    assert job.run(nodes=[0, 1, 4, 5], mode=mode, steps=STEPS) == [0] * 4, job.errors
    assert [report["resumed"] for report in job.reports] == [6] * 4
    for losses, first in ((smaller, 3), (job.reports[0]["losses"], 6)):
        assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-5)
        assert min(map(int, losses)) == first + 1


def test_the_newest_of_memory_and_storage_is_loaded(job: SimulatedJob, tmp_path: Path) -> None:
    durable = str(tmp_path / "storage" / "step-{step}")
    options: dict[str, Any] = {"mode": "fsdp", "durable": durable, "durable_at": [2, 4]}
    assert job.run(nodes=[0, 1], steps=5, **options) == [0, 0], job.errors
    (tmp_path / "storage" / "step-9").mkdir()
    assert job.run(nodes=[0, 1], steps=6, **options) == [0, 0], job.errors
    assert (job.reports[0]["resumed"], job.reports[0]["source"]) == (5, "memory"), "memory has the newer checkpoint"
    job.lose_node(0)
    job.lose_node(1)
    assert job.run(nodes=[0, 1], steps=7, **options) == [0, 0], job.errors
    assert (job.reports[1]["resumed"], job.reports[1]["source"]) == (4, durable.format(step=4))


def test_a_damaged_snapshot_falls_back_to_its_copy_and_the_previous_step(job: SimulatedJob) -> None:
    job.run(nodes=[0, 1], mode="fsdp", steps=5)
    newest = {path: part for node in (0, 1) for path, part in read_parts(job.directory(node)).items()}
    of_rank_0 = [path for path, part in newest.items() if (part.version.step, part.name) == (5, "0")]
    assert {path.is_relative_to(job.memory(0)) for path in of_rank_0} == {True, False}
    for path, (resumed, source) in zip(sorted(of_rank_0), ((5, "memory"), (4, "memory")), strict=True):
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + 8)
            file.write(b"\xff\xff\xff")
        assert job.run(nodes=[0, 1], mode="fsdp", steps=resumed) == [0, 0], job.errors
        assert (job.reports[1]["resumed"], job.reports[1]["source"]) == (resumed, source)


def test_full_memory_is_reported_and_training_continues(job: SimulatedJob, tmp_path: Path) -> None:
    durable = str(tmp_path / "storage" / "step-{step}")
    options: dict[str, Any] = {"mode": "fsdp", "width": 60_000, "durable": durable}
    assert job.run(nodes=[0, 1], steps=2, durable_at=[2], agent=False, **options) == [0, 0], job.errors
    assert job.run(nodes=[0, 1], steps=4, file_limit={1: 1 << 20}, **options) == [0, 0], job.errors
    assert job.reports[0]["source"] == durable.format(step=2)
    assert not [*job.snapshots(0), *job.snapshots(1)]
    sentence = read_notice(job.memory(0) / "progress" / "g1-r0")
    assert "no snapshots are kept in memory, only checkpoints on storage count" in sentence
    assert "of rank 1: File too large: the rank needs" in sentence
    assert "MiB there; raise the size of the memory volume" in sentence
    assert job.errors.count(sentence) == 1, "rank 0 logs it once"


def test_a_synchronous_save_is_loaded(job: SimulatedJob) -> None:
    assert job.run(nodes=[0], mode="ddp", steps=3, synchronous=True) == [0], job.errors
    assert [part.version.step for part in read_parts(job.directory(0)).values()].count(3) == 1
    assert read_progress(job.memory(0) / "progress" / "g1-r0").memory_step == 3
    assert job.run(nodes=[0], mode="ddp", steps=4) == [0], job.errors
    assert job.reports[0]["resumed"] == 3


def test_a_failed_save_of_one_rank_fails_on_all_ranks(job: SimulatedJob) -> None:
    assert job.run(nodes=[0, 1], mode="fsdp", steps=4, unsavable_at=[1, 2]) == [0, 0], job.errors
    assert [report["failures"].keys() for report in job.reports] == [{"2"}, {"2"}]
    assert "cannot be pickled" in job.reports[0]["failures"]["2"], "each rank has the reason"
    assert sorted({part.version.step for part in read_parts(job.directory(0)).values()}) == [3, 4]


def list_parts(step: int, ranks: str, world_size: int = 2, session: str = "a") -> list[Part]:
    return [Part(Version(step, 1, session, str(world_size)), rank, "0", 4096) for rank in ranks]


@pytest.mark.parametrize(
    ("parts", "step"),
    [
        ([], None),
        (list_parts(3, "0"), None),
        (list_parts(3, "01"), 3),
        (list_parts(3, "01") + list_parts(4, "1"), 3),
        (list_parts(3, "01") + list_parts(4, "1") + list_parts(4, "0", session="b"), 3),
        (list_parts(3, "01") + list_parts(4, "001"), 4),
        (list_parts(3, "01") + list_parts(5, "0", world_size=1), 5),
    ],
)
def test_the_newest_complete_save_is_chosen(parts: list[Part], step: int | None) -> None:
    chosen = newest_complete(parts)
    assert (chosen[0].version.step if chosen else None) == step
    assert [part.name for part in chosen] == [str(rank) for rank in range(len(chosen))]
    assert len({part.version for part in chosen}) <= 1


@pytest.mark.parametrize("template", ["/checkpoints/run", "/checkpoints/{step}/x", "/checkpoints/{step}-{step}"])
def test_an_invalid_checkpoint_template_is_an_error(template: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must name the folders of checkpoints with \{step\} in the last part"):
        MemoryReader(template, directory=tmp_path)


def test_a_load_without_checkpoint_is_an_error(tmp_path: Path) -> None:
    reader = MemoryReader(tmp_path / "step-{step}", directory=tmp_path)
    assert reader.step is None
    with pytest.raises(ValueError, match="load only if the reader's step is not None"):
        reader.read_metadata()


def test_unwritable_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "g1-r0"
    monkeypatch.setenv("TRAINIUM_PROGRESS_FILE", str(record))
    monkeypatch.setattr(trainium_worker, "_reporter", None)
    (tmp_path / "file").touch()
    assert MemoryReader(directory=tmp_path / "file").step is None
    assert "file/run-" in read_notice(record)
    assert "of rank 0: Not a directory" in read_notice(record)
