"""Read checkpoints of each format, and refuse what cannot be read."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.checkpoint_builders import SINGLE_RANK, State, start_run, write_checkpoint
from trainium_contract.wire.checkpoint_manifest import BLOCK_BYTES, ManifestFile, digest_bytes
from trainium_trainer.checkpoint.format.layout import CheckpointLayout, TensorMetadata
from trainium_trainer.checkpoint.format.reader import CheckpointReader, load_checkpoint
from trainium_trainer.checkpoint.format.writer import write_shard, write_tables
from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint, survey
from trainium_trainer.checkpoint.sharding import Axis, Cut, Grid
from trainium_trainer.storage.errors import DamagedFileError
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

RETRY = Retry(())


class NameRecordingStorage(PosixStorage):
    """A folder that records the names of the files that are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_names: list[str] = []

    def read(self, name: str) -> bytes:
        self.read_names.append(name.rpartition("/")[2])
        return super().read(name)

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        self.read_names.append(name.rpartition("/")[2])
        super().read_into(name, start, target)


def write_with_many_ranks(root: Path, ranks: int, rows: int = 2) -> tuple[CommittedCheckpoint, dict[str, torch.Tensor]]:
    """Write a checkpoint of many ranks in one process: a divided tensor and 20 that all ranks hold."""
    whole = {"wide": torch.arange(float(ranks * rows * 3)).view(ranks * rows, 3)}
    whole |= {f"copy{number:02d}": torch.full((number + 1,), float(number)) for number in range(20)}
    layout = CheckpointLayout(
        Grid(1, ranks, 1),
        [
            TensorMetadata(name, "F32", tuple(value.shape), 0, (Cut(0, Axis.DATA),) if name == "wide" else ())
            for name, value in whole.items()
        ],
    )

    def box(_: int, item: Any) -> torch.Tensor:
        value = whole[item.name]
        for dimension, (offset, size) in enumerate(zip(item.box.offsets, item.box.sizes, strict=True)):
            value = value.narrow(dimension, offset, size)
        return value

    return write_checkpoint(root, layout, box), whole


def test_a_reader_of_one_box_reads_the_tables_and_files_that_have_it_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # 1,200 files need not survive a power cut
    checkpoint, whole = write_with_many_ranks(tmp_path, 1200)
    tables = [file.name for file in checkpoint.manifest.files if file.name.startswith("blocks-")]
    assert len(tables) >= 3
    storage = NameRecordingStorage(tmp_path)
    reader = CheckpointReader(storage, checkpoint.drop_shards(), RETRY)
    target = torch.empty(3, 3)
    reader.fill(reader.plan_read("wide", (2000, 0), target))
    assert torch.equal(target, whole["wide"][2000:2003])
    shards = [name for name in storage.read_names if name.startswith("shard-")]
    assert sorted(shards) == ["shard-01000.safetensors", "shard-01001.safetensors"]
    assert len([name for name in storage.read_names if name.startswith("blocks-")]) == 1
    for name, value in whole.items():
        assert torch.equal(reader.read(name), value)


def test_the_manifest_verifies_the_files_of_many_ranks(tmp_path: Path) -> None:
    checkpoint, _ = write_with_many_ranks(tmp_path, 40)
    for file in checkpoint.manifest.files:
        data = (tmp_path / checkpoint.folder / file.name).read_bytes()
        assert len(data) <= BLOCK_BYTES
        assert (file.size, file.digest) == (len(data), digest_bytes(data))


def test_missing_values_are_found_before_the_commit(tmp_path: Path) -> None:
    layout = CheckpointLayout(Grid(1, 2, 1), [TensorMetadata("a", "F32", (4,), 0, (Cut(0, Axis.DATA),))])
    storage = PosixStorage(tmp_path)
    file = write_shard(storage, "step-1/a", 0, layout.plan_items(0), lambda _: torch.zeros(2), RETRY)
    with pytest.raises(ValueError, match="2 values were written of 4"):
        write_tables(storage, "step-1/a", layout, {0: file}, RETRY)


def edit_table(
    root: Path, checkpoint: CommittedCheckpoint, name: str, change: Callable[[Any], Any]
) -> CommittedCheckpoint:
    """Change a table of a checkpoint, and its digest in the manifest."""
    path = root / checkpoint.folder / name
    data = json.dumps(change(json.loads(path.read_text()))).encode()
    path.write_bytes(data)
    files = [file for file in checkpoint.manifest.files if file.name != name]
    files.append(ManifestFile(name=name, size=len(data), digest=digest_bytes(data)))
    return CommittedCheckpoint(1, checkpoint.folder, checkpoint.manifest.model_copy(update={"files": tuple(files)}))


def swap_divisions(index: dict[str, Any]) -> dict[str, Any]:
    index["divisions"] = [[] if division else [{"dimension": 0, "axis": "data"}] for division in index["divisions"]]
    return index


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("index.json", lambda index: index | {"format": 4}, "index.json is of another format"),
        ("index.json", lambda index: {**index, "divisions": []}, "index.json is not an index"),
        ("index.json", lambda index: {**index, "tensors": 5}, "index.json is not an index"),
        ("index.json", swap_divisions, "is not divided as in index.json|has no description"),
        ("blocks-00000.json", lambda _: {"files": {}}, "has no description of shard-.*"),
        ("blocks-00000.json", lambda _: [], "has no description of shard-.*"),
    ],
)
def test_tables_that_do_not_fit_the_files_are_damage(
    tmp_path: Path, name: str, change: Callable[[Any], Any], sentence: str
) -> None:
    checkpoint, _ = write_with_many_ranks(tmp_path, 8)
    damaged = edit_table(tmp_path, checkpoint, name, change)

    def read() -> None:
        reader = CheckpointReader(PosixStorage(tmp_path), damaged, RETRY)
        for tensor_name in reader.tensors:
            reader.read(tensor_name)

    with pytest.raises(DamagedFileError, match=sentence):
        read()


@pytest.mark.parametrize("ranks", [4, 6, 16])
def test_the_index_of_a_checkpoint_of_another_size_is_damage_and_no_value_is_read(tmp_path: Path, ranks: int) -> None:
    """Mix the folders of two sizes, with a manifest whose digests match the mixture."""

    def build_layout(data: int) -> CheckpointLayout:
        return CheckpointLayout(Grid(1, data, 1), [TensorMetadata("model.w", "F32", (48,), 0, (Cut(0, Axis.DATA),))])

    values = torch.arange(48.0)
    checkpoint = write_checkpoint(tmp_path, build_layout(8), lambda rank, _: values.chunk(8)[rank])
    mixed = edit_table(tmp_path, checkpoint, "index.json", lambda index: index | build_layout(ranks).to_json())
    target = torch.full((48,), -1.0)

    def read() -> None:
        reader = CheckpointReader(PosixStorage(tmp_path), mixed, RETRY)
        reader.fill(reader.plan_read("model.w", (0,), target))

    with pytest.raises(DamagedFileError, match=r"is not divided as in index\.json|has no description of shard-"):
        read()
    assert torch.equal(target, torch.full((48,), -1.0))


def test_another_state_is_not_loaded(tmp_path: Path) -> None:
    start_run(tmp_path).save_steps(4).close()
    storage = PosixStorage(tmp_path)
    (checkpoint,) = survey(storage).committed
    state = State(SINGLE_RANK)
    state.tensors["model.more"] = torch.zeros(2)
    with pytest.raises(DamagedFileError, match=r"has no model\.more"):
        load_checkpoint(storage, checkpoint, state, RETRY)
    del state.tensors["model.more"]
    state.tensors["model.norm"] = torch.zeros(11)
    with pytest.raises(ValueError, match=r"model\.norm has the size \[10\] there and \[11\] here"):
        load_checkpoint(storage, checkpoint, state, RETRY)
