"""Convert checkpoints to and from NxD; the test divides a state like NxD, and the converter joins it."""

import pickle
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.testing.trainer import base_models
from tests.testing.trainer.base_models import flip_bit
from trainium_contract.models.parameters import parameter_sizes
from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.optimizer import OptimizerConfig
from trainium_trainer import cli
from trainium_trainer.backends.nxd.conversion.from_nxd import NxdSource
from trainium_trainer.backends.nxd.conversion.tag_files import TensorReference, format_rank_file_name
from trainium_trainer.backends.nxd.conversion.to_nxd import NxdTarget, write_tag
from trainium_trainer.backends.nxd.layout.parameter_names import Projections
from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder
from trainium_trainer.checkpoint.format.reader import CheckpointReader
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.root.survey import survey, verify
from trainium_trainer.checkpoint.whole_tensors import TensorSource, write_whole
from trainium_trainer.exits import UserError
from trainium_trainer.models.state_dict import OPTIMIZER_STEP, WEIGHT, find_moment, format_state_name
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

SHAPE = replace(base_models.SHAPE, vocab_size=48, hidden_size=20)
RETRY = Retry(())
POSITION = Position(step=7, samples=56, tokens=1234)


PARTS = (WEIGHT, find_moment("expAvg"), find_moment("expAvgSq"))


def create_state(shape: ModelShape = SHAPE) -> dict[str, torch.Tensor]:
    """Return a whole training state whose values all differ."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        format_state_name(part, name): torch.randn(size, generator=generator)
        for part in PARTS
        for name, size in parameter_sizes(shape).items()
    }
    return tensors | {OPTIMIZER_STEP: torch.tensor(7)}


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> CheckpointReader:
    """Write a checkpoint of this trainer and open it."""
    storage = PosixStorage(folder)
    sources = [
        TensorSource(name, value.dtype, value.shape, lambda value=value: value) for name, value in tensors.items()
    ]
    write_whole(storage, sources, POSITION, {"model": SHAPE.to_json()}, RETRY)
    (checkpoint,) = survey(storage).committed
    assert verify(storage, checkpoint, RETRY) == []
    return CheckpointReader(storage, checkpoint, RETRY)


def load_all(source: NxdSource) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.load() for tensor in source.list_sources()}


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(tensors[name], value)] == []


@pytest.mark.parametrize(
    ("tensor", "zero1", "projections", "order", "tied"),
    [
        (1, None, Projections.FUSED, KeyValueOrder.REPEATED, False),
        (2, 3, Projections.FUSED, KeyValueOrder.REPEATED, False),
        (2, None, Projections.SPLIT, KeyValueOrder.REPEATED, True),
        (4, 2, Projections.SPLIT, KeyValueOrder.REPEATED, False),
        (8, None, Projections.FUSED, KeyValueOrder.INTERLEAVED, False),
    ],
)
def test_a_state_converted_to_nxd_and_back_is_the_same(
    tmp_path: Path, tensor: int, zero1: int | None, projections: Projections, order: KeyValueOrder, tied: bool
) -> None:
    shape = replace(SHAPE, tie_embeddings=tied)
    expected = create_state(shape)
    target = NxdTarget(tensor, zero1, torch.bfloat16 if zero1 else torch.float32, projections, order)
    write_tag(
        tmp_path / "tag", write_checkpoint(tmp_path / "root", expected), shape, target, OptimizerConfig(), POSITION
    )
    source = NxdSource(tmp_path / "tag", shape, order)
    assert_same(load_all(source), expected)
    assert source.find_position(step=None, samples=None, tokens=None) == POSITION


def test_a_tag_has_the_files_and_keys_of_nxd(tmp_path: Path) -> None:
    target = NxdTarget(2, 2, torch.bfloat16, Projections.FUSED, KeyValueOrder.REPEATED)
    write_tag(
        tmp_path / "a" / "tag",
        write_checkpoint(tmp_path / "b", create_state()),
        SHAPE,
        target,
        OptimizerConfig(),
        POSITION,
    )
    tag = tmp_path / "a" / "tag"
    assert sorted(str(path.relative_to(tag)) for path in tag.rglob("*") if path.is_file()) == [
        "checkpoint",
        "done",
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        "model/dp_rank_00_tp_rank_01_pp_rank_00.pt",
        "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        "optim/dp_rank_00_tp_rank_01_pp_rank_00.pt",
        "optim/dp_rank_01_tp_rank_00_pp_rank_00.pt",
        "optim/dp_rank_01_tp_rank_01_pp_rank_00.pt",
        "scheduler.pt",
        "user_content.pt",
    ]
    model = torch.load(tag / "model" / format_rank_file_name(0, 1, 0), weights_only=True)
    assert model["model.layers.0.self_attn.qkv_proj.weight_qkv"].shape == (16 + 4 + 4, 20)
    assert {value.dtype for value in model.values()} == {torch.bfloat16}
    optimizer = torch.load(tag / "optim" / format_rank_file_name(1, 0, 0), weights_only=True)
    assert set(optimizer) == {"state", "param_groups", "base_state", "shape_info", "sharded_master_weights"}
    assert optimizer["param_groups"][0]["params"] == list(range(len(model)))
    (norm,) = (number for number, name in enumerate(model) if name == "model.norm.weight")
    assert optimizer["sharded_master_weights"][norm].shape == (10,)
    assert set(optimizer["base_state"][norm]) == {"step", "exp_avg", "exp_avg_sq"}


def write_nxd_tag(tag: Path, expected: dict[str, torch.Tensor], *, zero1: int, xser: bool = False) -> None:
    """Write the tag of NxD for a Llama of column- and row-parallel layers at tp 2, pp 2.

    As in the example of NxD, the optimizer has two groups, and norms do not decay.
    """
    for kind in ("model", "optim"):
        (tag / kind).mkdir(parents=True)
    (tag / "checkpoint").write_text("1")
    sizes = parameter_sizes(SHAPE)
    stages = [
        [name for name in sizes if ".layers.1." not in name and name not in ("model.norm.weight", "lm_head.weight")],
        [name for name in sizes if ".layers.1." in name or name in ("model.norm.weight", "lm_head.weight")],
    ]
    for tp in range(2):
        for pp, names in enumerate(stages):

            def cut_tensor(name: str, part: str, tp: int = tp) -> torch.Tensor:
                value = expected[format_state_name(part, name)]
                if value.dim() == 1:
                    return value
                return value.chunk(2, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)[tp].contiguous()

            weights: dict[str, Any] = {name: cut_tensor(name, WEIGHT).bfloat16() for name in names}
            weights["model.rotary.inv_freq"] = torch.ones(2)
            save(tag / "model" / format_rank_file_name(0, tp, pp), weights, xser=xser)
            order = [name for name in names if len(sizes[name]) == 2] + [
                name for name in names if len(sizes[name]) == 1
            ]
            matrices = sum(len(sizes[name]) == 2 for name in names)
            groups = [
                {"lr": 0.1, "weight_decay": 0.1, "params": list(range(matrices))},
                {"lr": 0.1, "weight_decay": 0.0, "params": list(range(matrices, len(order)))},
            ]
            for dp in range(zero1):
                shards: dict[str, dict[int, torch.Tensor]] = {part: {} for part in PARTS}
                for part in PARTS:
                    for number, name in enumerate(order):
                        value = cut_tensor(name, part)
                        rows = -(-value.shape[0] // zero1)
                        padded = torch.zeros(rows * zero1, *value.shape[1:])
                        padded[: value.shape[0]] = value
                        shards[part][number] = padded[dp * rows : (dp + 1) * rows].clone()
                base = {
                    number: {
                        "step": torch.tensor(7.0),
                        "exp_avg": shards[find_moment("expAvg")][number],
                        "exp_avg_sq": shards[find_moment("expAvgSq")][number],
                    }
                    for number in range(len(order))
                }
                content = {
                    "state": {},
                    "param_groups": groups,
                    "base_state": base,
                    "shape_info": {number: torch.Size(sizes[name]) for number, name in enumerate(order)},
                    "sharded_master_weights": shards[WEIGHT],
                }
                save(tag / "optim" / format_rank_file_name(dp, tp, pp), content, xser=xser)
    torch.save({"global_step": 7, "epoch": 1}, tag / "user_content.pt")
    (tag / "done").write_text("1")


def save(path: Path, content: dict[str, Any], *, xser: bool) -> None:
    """Save with `torch.save`, or like NxD with `use_xser`: a file of references, and a file of each tensor."""
    if not xser:
        torch.save(content, path)
        return
    folder = path.with_name(f"{path.name}.tensors")
    folder.mkdir()
    count, metadata = 0, {}

    def replace_tensors(value: Any) -> Any:
        nonlocal count
        if isinstance(value, torch.Tensor):
            reference = TensorReference()
            reference.tid = count
            torch.save(value, folder / f"tensor_{count}.pt")
            metadata[count] = {"dtype": value.dtype, "shape": value.shape, "expert_model_parallel": False}
            count += 1
            return reference
        if isinstance(value, dict):
            return {key: replace_tensors(item) for key, item in value.items()}
        return value

    data = replace_tensors(content)
    torch.save(data, path)
    torch.save(metadata, path.with_name(f"{path.name}.info.pt"))


@pytest.fixture
def _references_of_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle references under the name of torch_xla's class."""
    module: Any = types.ModuleType("torch_xla.utils.serialization")
    module.TensorReference = TensorReference
    for name in ("torch_xla", "torch_xla.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch_xla.utils.serialization", module)
    monkeypatch.setattr(TensorReference, "__module__", "torch_xla.utils.serialization")


@pytest.mark.usefixtures("_references_of_torch_xla")
@pytest.mark.parametrize(("zero1", "xser"), [(1, False), (3, False), (2, True)])
def test_a_tag_divided_by_tensor_pipeline_and_zero_1_is_joined(tmp_path: Path, zero1: int, xser: bool) -> None:
    expected = create_state()
    write_nxd_tag(tmp_path / "tag", expected, zero1=zero1, xser=xser)
    source = NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED)
    # The weights are the master weights, not the bfloat16 ones.
    assert_same(load_all(source), expected)
    assert source.find_position(step=None, samples=5, tokens=None) == Position(step=7, samples=5, tokens=0)


@pytest.mark.usefixtures("_references_of_torch_xla")
def test_weights_that_nxd_left_out_come_from_the_optimizer(tmp_path: Path) -> None:
    expected = create_state()
    write_nxd_tag(tmp_path / "tag", expected, zero1=2, xser=True)
    for folder in (tmp_path / "tag" / "model").glob("*.tensors"):
        shutil.rmtree(folder)
    assert_same(load_all(NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED)), expected)
    with pytest.raises(UserError, match="has no weights, and the optimizer is left out: convert it with"):
        load_all(NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED, weights_only=True))
    (tmp_path / "tag" / "optim" / f"{format_rank_file_name(1, 0, 0)}.tensors" / "tensor_3.pt").unlink()
    with pytest.raises(UserError, match=r"optim/.*tensor_3.pt is missing"):
        load_all(NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED))


def test_weights_alone_begin_with_moments_of_zero(tmp_path: Path) -> None:
    expected = create_state()
    write_nxd_tag(tmp_path / "tag", expected, zero1=1)
    converted = load_all(NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED, weights_only=True))
    assert int(converted[OPTIMIZER_STEP]) == 0
    for name in parameter_sizes(SHAPE):
        weight = expected[format_state_name(WEIGHT, name)]
        assert torch.equal(converted[format_state_name(WEIGHT, name)], weight.bfloat16().float())
        assert not converted[format_state_name(find_moment("expAvg"), name)].any()


def test_tags_that_cannot_be_converted_are_refused_by_name(tmp_path: Path) -> None:
    tag = tmp_path / "tag"
    write_nxd_tag(tag, create_state(), zero1=2)

    def refusal(folder: Path = tag, shape: ModelShape = SHAPE) -> str:
        with pytest.raises(UserError) as caught:
            load_all(NxdSource(folder, shape, KeyValueOrder.REPEATED))
        return str(caught.value)

    assert "is not a tag of an NxD checkpoint" in refusal(tmp_path / "none")
    assert "of this model it would have (48, 20)" in refusal(shape=replace(SHAPE, vocab_size=96))
    assert "has no model.layers.2" in refusal(shape=replace(SHAPE, num_layers=3))
    assert "lm_head.weight is not the embedding" in refusal(shape=replace(SHAPE, tie_embeddings=True))
    optimizer = tag / "optim" / format_rank_file_name(1, 0, 1)
    content = optimizer.read_bytes()
    optimizer.unlink()
    assert "optim/dp_rank_01_tp_rank_00_pp_rank_01.pt is missing" in refusal()
    optimizer.write_bytes(content)
    (tag / "done").unlink()
    assert "has no `done`: the save of that tag never ended" in refusal()
    (tag / "done").write_text("1")
    (tag / "model" / format_rank_file_name(0, 0, 0)).write_bytes(pickle.dumps(Path("anything")))
    assert "cannot be read, or holds more than tensors and plain values" in refusal()


def test_a_degree_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    reader = write_checkpoint(tmp_path / "root", create_state())
    for tensor, sentence in ((5, "numAttentionHeads 8"), (16, "numAttentionHeads 8")):
        target = NxdTarget(tensor, None, torch.float32, Projections.FUSED, KeyValueOrder.REPEATED)
        with pytest.raises(UserError, match=f"--tensor {tensor} does not divide the model's {sentence}"):
            write_tag(tmp_path / "tag", reader, SHAPE, target, OptimizerConfig(), POSITION)
    assert not (tmp_path / "tag").exists()


def test_a_checkpoint_of_a_tuning_which_is_no_whole_model_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    kept = {f"{name}.lora_A.weight": torch.ones(2, 20), f"{name}.lora_B.weight": torch.ones(32, 2)}
    parts = {format_state_name(part, key): value for part in PARTS for key, value in kept.items()}
    reader = write_checkpoint(tmp_path / "ours", parts | {OPTIMIZER_STEP: torch.tensor(7)})
    target = NxdTarget(1, None, torch.float32, Projections.FUSED, KeyValueOrder.REPEATED)
    with pytest.raises(UserError, match=r"what a tuning trained and not model\.embed_tokens"):
        write_tag(tmp_path / "tag", reader, SHAPE, target, OptimizerConfig(), POSITION)
    assert not (tmp_path / "tag").exists()


def test_the_commands_report_results_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = create_state()
    write_checkpoint(tmp_path / "root", expected)
    model = {
        "vocabSize": 48,
        "hiddenSize": 20,
        "intermediateSize": 24,
        "numLayers": 2,
        "numAttentionHeads": 8,
        "numKeyValueHeads": 2,
        "headDim": 4,
        "tieEmbeddings": False,
    }
    tokenizer = Path(tmp_path / "tokenizer.json")
    Tokenizer(WordLevel({str(number): number for number in range(48)}, unk_token="0")).save(str(tokenizer))
    config = tmp_path / "trainer.yaml"
    config.write_text(yaml.safe_dump({"model": model, "data": {"tokenizer": {"path": str(tokenizer)}}}))
    root, tag, back = (str(tmp_path / name) for name in ("root", "tags/step_7", "back"))
    assert cli.run(["convert", "to-nxd", root, tag, "--tensor", "2", "--zero1", "2"]) == 0
    assert "step 7, tensor parallel 2, ZeRO-1 over 2" in capsys.readouterr().out
    assert cli.run(["convert", "from-nxd", tag, back, "--config", str(config)]) == 0
    assert "step-7: step 7" in capsys.readouterr().out
    storage = PosixStorage(Path(back))
    reader = CheckpointReader(storage, survey(storage).committed[0], RETRY)
    assert_same({name: reader.read(name) for name in reader.tensors}, expected)
    assert cli.run(["convert", "from-nxd", tag, back, "--config", str(config)]) == 64
    assert "holds checkpoints already" in capsys.readouterr().err
    assert cli.run(["convert", "to-nxd", root, tag, "--tensor", "2"]) == 64
    assert "is not empty" in capsys.readouterr().err
    assert cli.run(["convert", "to-nxd", root, f"{tag}b", "--tensor", "2", "--precision", "int8"]) == 64
    assert "--precision int8: use Float32 or BFloat16" in capsys.readouterr().err


def test_a_damaged_checkpoint_ends_export_and_conversion_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "root", create_state())
    shard = next((tmp_path / "root").rglob("shard-00000.safetensors"))
    flip_bit(shard, -9)
    data = shard.read_bytes()
    root, tag, model = (str(tmp_path / name) for name in ("root", "tag", "model"))
    for argv in (["convert", "to-nxd", root, tag, "--tensor", "2"], ["export", root, model]):
        assert cli.run(argv) == 64
        assert "does not have the contents that were written" in (error := capsys.readouterr().err)
        assert f"`trainium-trainer inspect {root} --verify`" in error
    assert not (tmp_path / "tag" / "done").exists()
    assert not (tmp_path / "model" / "config.json").exists()
    assert shard.read_bytes() == data
