"""Remove only files of the run itself; refuse a root inside the root of another run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.trainer.s3_gateway import run_gateway
from tests.unit.checkpoint.checkpoint_builders import ALPHA, BETA, start_run
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.root.owner import JobIdentity
from trainium_trainer.checkpoint.root.survey import survey
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Storage


@pytest.fixture(params=["posix", "s3"])
def top(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "posix":
        yield str(tmp_path / "top")
        return
    with run_gateway(tmp_path, monkeypatch):
        yield "s3://bucket/top"


def read_storage(storage: Storage, folder: str = "") -> dict[str, bytes]:
    files = {}
    for entry in storage.list(folder):
        name = f"{folder}/{entry.name}".lstrip("/")
        files |= read_storage(storage, name) if entry.is_folder else {name: storage.read(name)}
    return files


def train(root: str, job: JobIdentity, *steps: int, keep_last: int = 1) -> None:
    start_run(root, job=job, run=job.uid, durable={"keepLast": keep_last}).flush().save_steps(*steps).close()


@pytest.mark.parametrize(("first", "second"), [("a/step-40", "a"), ("a", "a/step-40"), ("a/b/c", "a"), ("a", "a/b/c")])
def test_a_root_inside_or_around_the_root_of_another_job_is_refused_by_name(top: str, first: str, second: str) -> None:
    train(f"{top}/{first}", ALPHA, 1)
    before = read_storage(open_storage(top))
    with pytest.raises(UnusableCheckpointError, match=f"{top}/{second} and {top}/{first}, .* are nested"):
        start_run(f"{top}/{second}", job=BETA, run=BETA.uid)
    assert read_storage(open_storage(top)) == before


def test_roots_beside_each_other_are_two_runs(top: str) -> None:
    train(f"{top}/a", ALPHA, 1)
    train(f"{top}/ab", BETA, 1)
    assert [len(survey(open_storage(f"{top}/{name}")).committed) for name in ("a", "ab")] == [1, 1]


def test_a_run_never_removes_a_root_that_appeared_inside_its_own(top: str) -> None:
    train(f"{top}/a", ALPHA, 1)
    # A job that mounts only a part of the volume cannot see the root around its own.
    train(f"{top}/elsewhere", BETA, 1, 2)
    inner, elsewhere = open_storage(f"{top}/a/step-2"), open_storage(f"{top}/elsewhere")
    for name, data in read_storage(elsewhere).items():
        inner.write(name, data)
    before = read_storage(inner)
    train(f"{top}/a", ALPHA, 3, 4)
    assert read_storage(inner) == before
    assert [checkpoint.step for checkpoint in survey(open_storage(f"{top}/a")).committed] == [4]


def test_files_that_no_start_of_the_run_wrote_stay_where_they_are(top: str) -> None:
    root = f"{top}/a"
    train(root, ALPHA, 1)
    storage = open_storage(root)
    unknown = {
        "step-1/notes.txt": b"keep",
        "step-2/notes.txt": b"keep",
        "step-2/g1-0123456789ab/shard-00000.safetensors": b"of a start that the fence does not name",
        "notes/readme": b"keep",
    }
    (attempt,) = {name.split("/")[1] for name in read_storage(storage) if name.startswith("step-1/g")}
    leftovers = {f"step-2/{attempt}/shard-00000.safetensors": b"half", f"step-2/{attempt}/index.json": b"{}"}
    unknown[f"step-2/{attempt}/readme"] = b"keep"
    for name, data in (unknown | leftovers).items():
        storage.write(name, data)
    train(root, ALPHA, 3, 4)
    remaining = read_storage(storage)
    assert {name: remaining.get(name) for name in unknown} == unknown
    assert not leftovers.keys() & remaining.keys()
    assert [checkpoint.step for checkpoint in survey(storage).committed] == [4]


def test_the_fence_names_every_start_that_held_it(tmp_path: Path) -> None:
    for _ in range(3):
        train(str(tmp_path), ALPHA)
    assert len(json.loads((tmp_path / "GENERATION").read_bytes())["attempts"]) == 3


def test_runs_that_share_a_memory_volume_keep_their_snapshots(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    for job in (ALPHA, BETA):
        start_run(tmp_path / job.name, memory, job=job, run=job.uid).run_to(3).flush().close()
    restarted = start_run(tmp_path / "alpha", memory, job=ALPHA, run=ALPHA.uid).close()
    assert restarted.report()["source"] == "memory"
    assert restarted.report()["resumed_step"] == 3
