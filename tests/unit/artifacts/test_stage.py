"""Write artifacts in several ranks; after a kill at any instant, the next start ends with the same files."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.testing.suite.timeouts import until
from tests.testing.trainer.base_models import flip_bit, save_tuned, write_run
from tests.testing.trainer.s3_gateway import Fault, S3Gateway, run_gateway
from tests.unit.artifacts.artifact_ranks import run_command, start_process, write_artifacts_as_rank
from trainium_contract.status.results import ArtifactReport, RunStage
from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.artifacts import data_files, store
from trainium_trainer.artifacts.export import export, merge
from trainium_trainer.artifacts.manifest import ArtifactManifest
from trainium_trainer.artifacts.stage import list_artifact_kinds, write_artifacts
from trainium_trainer.exits import StorageError, UserError
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Retry
from trainium_trainer.weights.base import BaseWeights

NO_RETRY = Retry(delays=())


class Killed(BaseException):
    """A process ends here."""


class RankThreads:
    """Threads in place of ranks: `RankThreads(3).run(function)` calls `function(group)` in each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        def run_rank(rank: int) -> Any:
            try:
                return work(_Rank(self, rank))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(run_rank, rank) for rank in range(self.size)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(30)
        values = list(self._values)
        self._barrier.wait(30)
        return values


class _Rank:
    def __init__(self, ranks: RankThreads, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, ranks.size

    def gather(self, value: Any) -> list[Any]:
        return self._ranks.gather(self.rank, value)


class FakeProgress:
    """Record the progress that is reported."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.reports: list[ArtifactReport] = []

    def enter_stage(self, stage: RunStage, done: float = 0.0) -> None:
        assert stage is RunStage.EXPORT
        self.shares.append(done)

    def record_artifact(self, report: ArtifactReport) -> None:
        self.reports.append(report)


class StorageChanges:
    """The changes of all stores; the process is killed before change number `last`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int | None = None) -> None:
        self.changes: list[str] = []
        self.streams: list[str] = []
        self._last = last
        self._lock = threading.Lock()
        monkeypatch.setattr(store, "open_storage", lambda path: RecordingStorage(open_storage(path), self))

    def record(self, change: str) -> None:
        with self._lock:
            if self._last is not None and len(self.changes) >= self._last:
                raise Killed
            self.changes.append(change)


class RecordingStorage:
    """A store that records its changes."""

    def __init__(self, inner: Any, changes: StorageChanges) -> None:
        self._inner, self._changes = inner, changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, name: str, data: bytes) -> None:
        self._changes.record(f"write {name}")
        self._inner.write(name, data)

    def write_stream(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        def recorded_pieces() -> Iterable[memoryview]:
            for piece in pieces:
                self._changes.record(f"stream {name}")
                yield piece

        self._changes.streams.append(name)
        self._inner.write_stream(name, recorded_pieces(), size)

    def remove_files(self, folder: str, should_remove: Callable[[str], bool]) -> None:
        self._changes.record(f"remove {folder}")
        self._inner.remove_files(folder, should_remove)


def write(run: Any, ranks: int = 1, progress: FakeProgress | None = None, config: TrainingConfig | None = None) -> Any:
    progress = progress or FakeProgress()
    (first, *others) = RankThreads(ranks).run(
        lambda group: write_artifacts(config or run.config, run.root, run.step, group, progress, retry=NO_RETRY)
    )
    assert all(other == first for other in others)
    return first


def with_artifacts(run: Any, **fields: Any) -> TrainingConfig:
    """Return the configuration of the run with other fields of `artifacts`."""
    return run.config.model_copy(update={"artifacts": run.config.artifacts.model_copy(update=fields)})


def digest_files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write tiny models in several files."""
    monkeypatch.setattr(data_files, "SMALLEST", 6_000)
    monkeypatch.setattr(data_files, "LARGEST", 6_000)


def test_a_lora_run_exports_an_adapter_and_a_merged_model(tmp_path: Path) -> None:
    run, progress = save_tuned(tmp_path), FakeProgress()
    reports = write(run, 2, progress)
    assert [report.kind for report in reports] == ["Adapter", "Model"]
    assert [report.path for report in reports] == [
        str(tmp_path / f"run/artifacts/step-7/{name}") for name in ("adapter", "model")
    ]
    assert progress.reports == list(reports)
    assert progress.shares[0] == 0.0
    assert progress.shares[-1] == 1.0
    for report in reports:
        folder = Path(report.path)
        manifest = ArtifactManifest.model_validate_json((folder / "artifact.json").read_bytes())
        paths = {path.name: path for path in folder.iterdir()}
        assert paths.keys() == {file.name for file in manifest.files} | {"artifact.json", "README.md"}
        for file in manifest.files:
            assert (paths[file.name].stat().st_size, file.digest) == (
                file.size,
                hashlib.sha256(paths[file.name].read_bytes()).hexdigest(),
            )
        assert (report.bytes, report.digest, report.step) == (manifest.size, manifest.digest, 7)
    assert BaseWeights.open(reports[1].path).shape == run.weights.shape


def test_the_folder_of_a_writer_that_was_killed_in_its_first_file_is_used(tmp_path: Path) -> None:
    for name in ("adapter", "model"):
        unfinished = tmp_path / "run/artifacts/step-7" / name / "unfinished"
        unfinished.mkdir(parents=True)
        (unfinished / ".draft-0123456789ab").write_bytes(b"{")
    for report in write(save_tuned(tmp_path)):
        assert Path(report.path).name in ("adapter", "model")
        assert not [path.name for path in Path(report.path).rglob("*") if path.name.startswith((".", "unfinished"))]


def test_any_number_of_ranks_writes_the_same_tensors(tmp_path: Path) -> None:
    run = save_tuned(tmp_path)
    tensors: list[dict[str, torch.Tensor]] = []
    for ranks in (1, 2, 5):
        reports = write(run, ranks, config=with_artifacts(run, path=str(tmp_path / f"out-{ranks}")))
        weights = BaseWeights.open(reports[1].path)
        tensors.append({})
        for name in dict(run.base.named_parameters()):
            tensors[-1][name] = torch.empty(weights.find_size(name))
            weights.fill(name, (0,) * tensors[-1][name].dim(), tensors[-1][name])
    for others in tensors[1:]:
        assert all(torch.equal(others[name], value) for name, value in tensors[0].items())


def test_a_stage_killed_at_any_instant_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_tuned(tmp_path, base={"num_hidden_layers": 1})
    uninterrupted = StorageChanges(monkeypatch)
    write(run, 2)
    folder = tmp_path / "run" / "artifacts"
    expected = digest_files(folder)
    folder.rename(tmp_path / "expected")
    assert len(uninterrupted.changes) > 25
    for last in range(len(uninterrupted.changes)):
        first = StorageChanges(monkeypatch, last)
        with pytest.raises((Killed, threading.BrokenBarrierError)):
            write(run, 2)
        for kind, name in (("adapter", "adapter_config.json"), ("model", "config.json")):
            artifact = folder / "step-7" / kind
            if (artifact / name).exists():
                written = {f"step-7/{kind}/{file}": digest for file, digest in digest_files(artifact).items()}
                assert (
                    written.items()
                    >= {file: digest for file, digest in expected.items() if file.startswith(f"step-7/{kind}/")}.items()
                )
        receipts = {path.name.removesuffix(".json") for path in folder.rglob("unfinished/*.safetensors.json")}
        second = StorageChanges(monkeypatch)
        write(run, 3)
        assert digest_files(folder) == expected
        assert not receipts & set(second.streams)
        assert len(first.changes) == last
        third = StorageChanges(monkeypatch)
        write(run, 1)
        assert third.changes == ["remove unfinished"] * 2
        folder.rename(tmp_path / f"done-{last}")


def test_a_replaced_writer_that_resumes_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a node that was frozen write their next file before their agent ends them."""
    run = save_tuned(tmp_path, artifacts={"kinds": ["Model"]})
    suspended, resumed = threading.Event(), threading.Event()

    class SuspendingChanges(StorageChanges):
        def record(self, change: str) -> None:
            if change.startswith("write unfinished/model-"):  # the receipt of its first file
                suspended.set()
                resumed.wait(30)
            elif resumed.is_set():
                raise Killed

    SuspendingChanges(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        first_writer = pool.submit(write, run)
        assert suspended.wait(30)
        StorageChanges(monkeypatch)
        (report,) = write(run)
        resumed.set()
        assert isinstance(first_writer.exception(), Killed)
    manifest = ArtifactManifest.model_validate_json((Path(report.path) / "artifact.json").read_bytes())
    digests = digest_files(Path(report.path))
    assert len(manifest.files) > 3
    assert {file.name: digests.get(file.name) for file in manifest.files} == {
        file.name: file.digest for file in manifest.files
    }


def test_a_folder_with_other_files_is_not_changed_and_the_next_name_used(tmp_path: Path) -> None:
    run = save_tuned(tmp_path, artifacts={"kinds": ["Model"]})
    other_folder = tmp_path / "run/artifacts/step-7/model"
    other_folder.mkdir(parents=True)
    (other_folder / "config.json").write_text("{}")
    before = digest_files(other_folder)
    (report,) = write(run)
    assert report.path == f"{other_folder}-2"
    assert digest_files(other_folder) == before
    assert write(run, config=with_artifacts(run, precision="BFloat16"))[0].path == f"{other_folder}-3"
    assert write(run)[0] == report


def test_fewer_ranks_continue_the_writes_of_killed_ranks(tmp_path: Path) -> None:
    run = save_tuned(tmp_path, artifacts={"kinds": ["Model"]})
    text = json.dumps(run.config.to_wire())
    written_names, folder = tmp_path / "names", tmp_path / "run/artifacts/step-7/model"
    ranks = [
        start_process(write_artifacts_as_rank, text, rank, 3, str(tmp_path / "rendezvous-1"), str(written_names))
        for rank in range(3)
    ]
    until(lambda: written_names.exists() and "\n" in written_names.read_text(), "a rank has written a file", pause=0.02)
    for rank in ranks:
        rank.kill()
        rank.join()
    written = written_names.read_text().split()[0]
    assert (folder / written).exists()
    assert not (folder / "config.json").exists()
    fewer_ranks = [
        start_process(write_artifacts_as_rank, text, rank, 2, str(tmp_path / "rendezvous-2"), None) for rank in range(2)
    ]
    for rank in fewer_ranks:
        rank.join(45)
        assert rank.exitcode == 0
    assert not (folder / "unfinished").exists()
    assert BaseWeights.open(str(folder)).shape == run.weights.shape


@pytest.mark.parametrize("limit", [5_000, *(pytest.param(limit, marks=pytest.mark.long) for limit in (300, 9_000))])
def test_a_full_disk_is_reported_and_leaves_no_complete_folder(tmp_path: Path, limit: int) -> None:
    run = save_tuned(tmp_path, artifacts={"kinds": ["Model"]})
    (tmp_path / "mine.txt").write_text("mine")
    out, log = tmp_path / "out", tmp_path / "log"
    command = ["export", run.root, str(out), "--base", str(tmp_path / "base"), "--dtype", "float32"]
    process = start_process(run_command, command, str(log), limit)
    process.join(45)
    assert process.exitcode == 81
    assert log.read_text().splitlines()[-1] == (
        f"artifact {out}: cannot be written (File too large): free space and start again, what is complete is not "
        "written again"
    )
    assert not list(out.glob("*.safetensors"))
    assert not (out / "config.json").exists()
    assert (tmp_path / "mine.txt").read_text() == "mine"
    process = start_process(run_command, command, str(log), None)
    process.join(45)
    assert process.exitcode == 0
    assert BaseWeights.open(str(out)).shape == run.weights.shape


def test_an_error_of_one_rank_is_the_error_of_all(tmp_path: Path) -> None:
    run = save_tuned(tmp_path)
    shard = next((tmp_path / "run").glob("step-7/*/shard-*.safetensors"))
    flip_bit(shard, -5)
    errors: list[BaseException] = []

    def write_as_rank(group: Any) -> None:
        with contextlib.suppress(UserError):
            try:
                write_artifacts(run.config, run.root, 7, group, FakeProgress(), retry=NO_RETRY)
            except UserError as error:
                errors.append(error)
                raise

    RankThreads(3).run(write_as_rank)
    assert len(errors) == 3
    assert all("does not have the contents that were written" in str(error) for error in errors)


def test_a_step_without_a_checkpoint_has_no_artifacts(tmp_path: Path) -> None:
    run = save_tuned(tmp_path)
    with pytest.raises(UserError, match="there is no committed checkpoint of step 8 to make artifacts from"):
        write_artifacts(run.config, run.root, 8, _Rank(RankThreads(1), 0), FakeProgress(), retry=NO_RETRY)


def with_bucket(run: Any) -> TrainingConfig:
    """Return the configuration of the run with its artifacts in the bucket."""
    return with_artifacts(run, path="s3://bucket/out", precision=ArtifactPrecision.FLOAT32)


def upload(server: S3Gateway, folder: Path, prefix: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            server.put("bucket", f"{prefix}/{path.relative_to(folder)}", path.read_bytes())


def test_artifacts_in_a_bucket_equal_those_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_tuned(tmp_path)
    expected = write(run, 2)
    folder = tmp_path / "run/artifacts/step-7"
    weights = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    assert len(weights) > 5
    with run_gateway(tmp_path, monkeypatch) as server:
        upload(server, tmp_path / "base", "base")
        upload(server, tmp_path / "run/step-7", "run/step-7")
        config, base = with_bucket(run), BaseWeights.open("s3://bucket/base")
        for _ in range(2):  # all artifacts are complete at the second start
            reports = RankThreads(2).run(
                lambda group: write_artifacts(
                    config, "s3://bucket/run", 7, group, FakeProgress(), base=base, retry=NO_RETRY
                )
            )[0]
            assert [report.path for report in reports] == [
                f"s3://bucket/out/step-7/{name}" for name in ("adapter", "model")
            ]
            assert (
                reports[1].digest == expected[1].digest
            )  # the digest of an adapter depends on the location of its base
        export("s3://bucket/run", "s3://bucket/exported", base="s3://bucket/base", precision=ArtifactPrecision.FLOAT32)
        merge("s3://bucket/base", reports[0].path, "s3://bucket/merged", precision=ArtifactPrecision.FLOAT32)
        objects = server.objects("bucket")
        assert BaseWeights.open(reports[1].path).shape == run.weights.shape
    assert not any("unfinished" in key for key in objects)
    for name, data in weights.items():
        assert objects[f"out/step-7/{name}"] == data
        if name.startswith("model/"):
            assert objects[name.replace("model/", "exported/", 1)] == data
            assert objects[name.replace("model/", "merged/", 1)] == data


def test_a_bucket_that_refuses_writes_leaves_no_adapter_and_the_next_start_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_tuned(tmp_path)
    expected = write(run, 2)
    with run_gateway(tmp_path, monkeypatch) as server:
        config = with_bucket(run)
        server.inject_fault(
            Fault(
                status=403, code="AccessDenied", method="PUT", fits=lambda request: request.key.endswith(".safetensors")
            )
        )
        with pytest.raises(StorageError, match=r"artifact s3://bucket/out/step-7/adapter: cannot be written \(Access"):
            write(run, 2, config=config)
        assert not any(key.endswith("adapter_config.json") for key in server.objects("bucket"))
        assert [report.digest for report in write(run, 2, config=config)] == [report.digest for report in expected]
        assert not any("unfinished" in key for key in server.objects("bucket"))


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, []),
        ({"model": {"weights": "/base"}}, ["Model"]),
        ({"tuning": {"method": "LoRA"}}, ["Adapter", "Model"]),
        ({"tuning": {"method": "LoRA"}, "artifacts": {"kinds": ["Adapter", "Adapter"]}}, ["Adapter"]),
        ({"artifacts": {"kinds": ["Model", "Adapter"]}}, ["Model"]),
        ({"model": {"weights": "/base"}, "artifacts": {"kinds": []}}, []),
    ],
)
def test_the_kinds_of_artifacts_follow_from_the_configuration(fields: dict[str, Any], kinds: list[str]) -> None:
    assert list(list_artifact_kinds(TrainingConfig.model_validate(fields))) == [ArtifactKind(kind) for kind in kinds]


def test_missing_frozen_weights_are_refused(tmp_path: Path) -> None:
    from trainium_trainer.configuration.model_shape import resolve_shape
    from trainium_trainer.tuning.trainable import select_trainable

    config = TrainingConfig.model_validate(
        {
            "model": {"numLayers": 1, "hiddenSize": 32, "intermediateSize": 48},
            "tuning": {"method": "LoRA", "lora": {"rank": 2, "targets": ["q_proj"]}},
            "artifacts": {"precision": "Float32", "kinds": ["Model"]},
        }
    )
    shape = resolve_shape(config.model, 72)
    trained = {name: torch.ones(size) for name, size in select_trainable(shape, config.tuning).sizes.items()}
    write_run(tmp_path / "run", shape, trained, settings={"tuning": config.tuning.to_wire()})
    root = str(tmp_path / "run")
    with pytest.raises(
        UserError, match=r"the checkpoint has no .* and there is no base to take it from: name the base"
    ):
        write_artifacts(config, root, 7, _Rank(RankThreads(1), 0), FakeProgress(), retry=NO_RETRY)
    assert not (tmp_path / "run/artifacts").exists()
