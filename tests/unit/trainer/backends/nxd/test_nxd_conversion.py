"""NxD's own checkpoints in and out: cut here by hand as NxD cuts them, and put together again by the converter."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.testing.trainer import base_models
from tests.testing.trainer.base_models import flip_bit
from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.optimizer import OptimizerConfig
from trainium_trainer.backends.nxd.conversion.from_nxd import NxdSource
from trainium_trainer.backends.nxd.conversion.tag_files import TensorReference, rank_file_name
from trainium_trainer.backends.nxd.conversion.to_nxd import NxdTarget, write_tag
from trainium_trainer.backends.nxd.layout.parameter_names import Projections
from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder
from trainium_trainer.checkpoint.format.reader import CheckpointReader
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.root.survey import survey, verify
from trainium_trainer.checkpoint.whole_tensors import TensorSource, write_whole
from trainium_trainer.exits import UserError
from trainium_trainer.models.state_dict import OPTIMIZER_STEP, WEIGHT, moment, state_name
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

SHAPE = replace(base_models.SHAPE, vocab_size=48, hidden_size=20)
RETRY = Retry(())
POSITION = Position(step=7, samples=56, tokens=1234)


def sizes(shape: ModelShape = SHAPE) -> dict[str, tuple[int, ...]]:
    """Return the sizes of parameters by Hugging Face's names."""
    hidden, heads = shape.hidden_size, shape.head_dim
    query, key_value, inner = shape.num_attention_heads * heads, shape.num_key_value_heads * heads, 24
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for number in range(shape.num_layers):
        layer = f"model.layers.{number}"
        found |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (query, hidden),
            f"{layer}.self_attn.k_proj.weight": (key_value, hidden),
            f"{layer}.self_attn.v_proj.weight": (key_value, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, query),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    found["model.norm.weight"] = (hidden,)
    return found if shape.tie_embeddings else found | {"lm_head.weight": (shape.vocab_size, hidden)}


PARTS = (WEIGHT, moment("expAvg"), moment("expAvgSq"))


def state(shape: ModelShape = SHAPE) -> dict[str, torch.Tensor]:
    """Return a whole training state whose values all differ."""
    generator = torch.Generator().manual_seed(3)
    found = {
        state_name(part, name): torch.randn(size, generator=generator)
        for part in PARTS
        for name, size in sizes(shape).items()
    }
    return found | {OPTIMIZER_STEP: torch.tensor(7)}


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> CheckpointReader:
    """Write a checkpoint of this trainer and open it."""
    storage = PosixStorage(folder)
    sources = [
        TensorSource(name, value.dtype, value.shape, lambda value=value: value) for name, value in tensors.items()
    ]
    write_whole(storage, sources, POSITION, {"model": SHAPE.to_json()}, RETRY)
    (checkpoint,) = survey(storage).committed
    assert verify(storage, checkpoint, RETRY) == []
    return CheckpointReader(storage, checkpoint, RETRY)


def read_back(source: NxdSource) -> dict[str, torch.Tensor]:
    return {each.name: each.load() for each in source.sources()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


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
def test_a_state_survives_the_way_to_nxd_and_back(
    tmp_path: Path, tensor: int, zero1: int | None, projections: Projections, order: KeyValueOrder, tied: bool
) -> None:
    shape = replace(SHAPE, tie_embeddings=tied)
    wanted = state(shape)
    target = NxdTarget(tensor, zero1, torch.bfloat16 if zero1 else torch.float32, projections, order)
    write_tag(tmp_path / "tag", written(tmp_path / "root", wanted), shape, target, OptimizerConfig(), POSITION)
    source = NxdSource(tmp_path / "tag", shape, order)
    assert_same(read_back(source), wanted)
    assert source.position(step=None, samples=None, tokens=None) == POSITION


def test_a_tag_has_the_files_and_the_keys_that_nxd_gives_them(tmp_path: Path) -> None:
    target = NxdTarget(2, 2, torch.bfloat16, Projections.FUSED, KeyValueOrder.REPEATED)
    write_tag(tmp_path / "a" / "tag", written(tmp_path / "b", state()), SHAPE, target, OptimizerConfig(), POSITION)
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
    model = torch.load(tag / "model" / rank_file_name(0, 1, 0), weights_only=True)
    assert model["model.layers.0.self_attn.qkv_proj.weight_qkv"].shape == (16 + 4 + 4, 20)
    assert {value.dtype for value in model.values()} == {torch.bfloat16}
    optimizer = torch.load(tag / "optim" / rank_file_name(1, 0, 0), weights_only=True)
    assert set(optimizer) == {"state", "param_groups", "base_state", "shape_info", "sharded_master_weights"}
    assert optimizer["param_groups"][0]["params"] == list(range(len(model)))
    (norm,) = (number for number, name in enumerate(model) if name == "model.norm.weight")
    assert optimizer["sharded_master_weights"][norm].shape == (10,)
    assert set(optimizer["base_state"][norm]) == {"step", "exp_avg", "exp_avg_sq"}


def cut_by_hand(tag: Path, wanted: dict[str, torch.Tensor], *, zero1: int, xser: bool = False) -> None:
    """Write what NxD writes for a Llama of plain column- and row-parallel layers at tp 2, pp 2, by its description.

    The optimizer has two groups, of which norms do not decay, as NxD's example has them.
    """
    for kind in ("model", "optim"):
        (tag / kind).mkdir(parents=True)
    (tag / "checkpoint").write_text("1")
    hf = sizes()
    stages = [
        [name for name in hf if ".layers.1." not in name and name not in ("model.norm.weight", "lm_head.weight")],
        [name for name in hf if ".layers.1." in name or name in ("model.norm.weight", "lm_head.weight")],
    ]
    for tp in range(2):
        for pp, names in enumerate(stages):

            def cut(name: str, part: str, tp: int = tp) -> torch.Tensor:
                value = wanted[state_name(part, name)]
                if value.dim() == 1:
                    return value
                return value.chunk(2, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)[tp].contiguous()

            weights: dict[str, Any] = {name: cut(name, WEIGHT).bfloat16() for name in names}
            weights["model.rotary.inv_freq"] = torch.ones(2)
            save(tag / "model" / rank_file_name(0, tp, pp), weights, xser=xser)
            order = [name for name in names if len(hf[name]) == 2] + [name for name in names if len(hf[name]) == 1]
            matrices = sum(len(hf[name]) == 2 for name in names)
            groups = [
                {"lr": 0.1, "weight_decay": 0.1, "params": list(range(matrices))},
                {"lr": 0.1, "weight_decay": 0.0, "params": list(range(matrices, len(order)))},
            ]
            for dp in range(zero1):
                shards: dict[str, dict[int, torch.Tensor]] = {part: {} for part in PARTS}
                for part in PARTS:
                    for number, name in enumerate(order):
                        value = cut(name, part)
                        rows = -(-value.shape[0] // zero1)
                        padded = torch.zeros(rows * zero1, *value.shape[1:])
                        padded[: value.shape[0]] = value
                        shards[part][number] = padded[dp * rows : (dp + 1) * rows].clone()
                base = {
                    number: {
                        "step": torch.tensor(7.0),
                        "exp_avg": shards[moment("expAvg")][number],
                        "exp_avg_sq": shards[moment("expAvgSq")][number],
                    }
                    for number in range(len(order))
                }
                content = {
                    "state": {},
                    "param_groups": groups,
                    "base_state": base,
                    "shape_info": {number: torch.Size(hf[name]) for number, name in enumerate(order)},
                    "sharded_master_weights": shards[WEIGHT],
                }
                save(tag / "optim" / rank_file_name(dp, tp, pp), content, xser=xser)
    torch.save({"global_step": 7, "epoch": 1}, tag / "user_content.pt")
    (tag / "done").write_text("1")


def save(path: Path, content: dict[str, Any], *, xser: bool) -> None:
    """Save as `torch.save` does, or as NxD with `use_xser`: references in the file, each tensor in a separate file."""
    if not xser:
        torch.save(content, path)
        return
    folder = path.with_name(f"{path.name}.tensors")
    folder.mkdir()
    count, about = 0, {}

    def referenced(value: Any) -> Any:
        nonlocal count
        if isinstance(value, torch.Tensor):
            reference = TensorReference()
            reference.tid = count
            torch.save(value, folder / f"tensor_{count}.pt")
            about[count] = {"dtype": value.dtype, "shape": value.shape, "expert_model_parallel": False}
            count += 1
            return reference
        if isinstance(value, dict):
            return {key: referenced(each) for key, each in value.items()}
        return value

    data = referenced(content)
    torch.save(data, path)
    torch.save(about, path.with_name(f"{path.name}.info.pt"))


@pytest.fixture
def _references_of_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle references under the name of torch_xla's class."""
    import sys
    import types

    module: Any = types.ModuleType("torch_xla.utils.serialization")
    module.TensorReference = TensorReference
    for name in ("torch_xla", "torch_xla.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch_xla.utils.serialization", module)
    monkeypatch.setattr(TensorReference, "__module__", "torch_xla.utils.serialization")


@pytest.mark.usefixtures("_references_of_torch_xla")
@pytest.mark.parametrize(("zero1", "xser"), [(1, False), (3, False), (2, True)])
def test_a_tag_cut_by_tensor_pipeline_and_zero_1_is_put_together(tmp_path: Path, zero1: int, xser: bool) -> None:
    wanted = state()
    cut_by_hand(tmp_path / "tag", wanted, zero1=zero1, xser=xser)
    source = NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED)
    # The weights are the master weights, not the bfloat16 ones.
    assert_same(read_back(source), wanted)
    assert source.position(step=None, samples=5, tokens=None) == Position(step=7, samples=5, tokens=0)


@pytest.mark.usefixtures("_references_of_torch_xla")
def test_weights_that_nxd_left_out_come_from_the_optimizer(tmp_path: Path) -> None:
    wanted = state()
    cut_by_hand(tmp_path / "tag", wanted, zero1=2, xser=True)
    for folder in (tmp_path / "tag" / "model").glob("*.tensors"):
        shutil.rmtree(folder)
    assert_same(read_back(NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED)), wanted)
    with pytest.raises(UserError, match="has no weights, and the optimizer is left out: convert it with"):
        read_back(NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED, weights_only=True))
    (tmp_path / "tag" / "optim" / f"{rank_file_name(1, 0, 0)}.tensors" / "tensor_3.pt").unlink()
    with pytest.raises(UserError, match=r"optim/.*tensor_3.pt is missing"):
        read_back(NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED))


def test_weights_alone_begin_with_moments_of_zero(tmp_path: Path) -> None:
    wanted = state()
    cut_by_hand(tmp_path / "tag", wanted, zero1=1)
    found = read_back(NxdSource(tmp_path / "tag", SHAPE, KeyValueOrder.REPEATED, weights_only=True))
    assert int(found[OPTIMIZER_STEP]) == 0
    for name in sizes():
        weight = wanted[state_name(WEIGHT, name)]
        assert torch.equal(found[state_name(WEIGHT, name)], weight.bfloat16().float())
        assert not found[state_name(moment("expAvg"), name)].any()


def test_tags_that_cannot_be_converted_are_refused_by_name(tmp_path: Path) -> None:
    tag = tmp_path / "tag"
    cut_by_hand(tag, state(), zero1=2)

    def refusal(folder: Path = tag, shape: ModelShape = SHAPE) -> str:
        with pytest.raises(UserError) as caught:
            read_back(NxdSource(folder, shape, KeyValueOrder.REPEATED))
        return str(caught.value)

    assert "is not a tag of an NxD checkpoint" in refusal(tmp_path / "none")
    assert "of this model it would have (48, 20)" in refusal(shape=replace(SHAPE, vocab_size=96))
    assert "has no model.layers.2" in refusal(shape=replace(SHAPE, num_layers=3))
    assert "lm_head.weight is not the embedding" in refusal(shape=replace(SHAPE, tie_embeddings=True))
    optimizer = tag / "optim" / rank_file_name(1, 0, 1)
    content = optimizer.read_bytes()
    optimizer.unlink()
    assert "optim/dp_rank_01_tp_rank_00_pp_rank_01.pt is missing" in refusal()
    optimizer.write_bytes(content)
    (tag / "done").unlink()
    assert "has no `done`: the save of that tag never ended" in refusal()
    (tag / "done").write_text("1")
    (tag / "model" / rank_file_name(0, 0, 0)).write_bytes(pickle.dumps(Path("anything")))
    assert "cannot be read, or holds more than tensors and plain values" in refusal()


def test_a_degree_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    reader = written(tmp_path / "root", state())
    for tensor, sentence in ((5, "numAttentionHeads 8"), (16, "numAttentionHeads 8")):
        target = NxdTarget(tensor, None, torch.float32, Projections.FUSED, KeyValueOrder.REPEATED)
        with pytest.raises(UserError, match=f"--tensor {tensor} does not divide the model's {sentence}"):
            write_tag(tmp_path / "tag", reader, SHAPE, target, OptimizerConfig(), POSITION)
    assert not (tmp_path / "tag").exists()


def test_a_checkpoint_of_a_tuning_which_is_no_whole_model_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    kept = {f"{name}.lora_A.weight": torch.ones(2, 20), f"{name}.lora_B.weight": torch.ones(32, 2)}
    parts = {state_name(part, key): value for part in PARTS for key, value in kept.items()}
    reader = written(tmp_path / "ours", parts | {OPTIMIZER_STEP: torch.tensor(7)})
    target = NxdTarget(1, None, torch.float32, Projections.FUSED, KeyValueOrder.REPEATED)
    with pytest.raises(UserError, match=r"what a tuning trained and not model\.embed_tokens"):
        write_tag(tmp_path / "tag", reader, SHAPE, target, OptimizerConfig(), POSITION)
    assert not (tmp_path / "tag").exists()


def test_the_commands_report_what_they_did_and_what_they_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainium_trainer import cli

    wanted = state()
    written(tmp_path / "root", wanted)
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
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

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
    assert_same({name: reader.read(name) for name in reader.tensors}, wanted)
    assert cli.run(["convert", "from-nxd", tag, back, "--config", str(config)]) == 64
    assert "holds checkpoints already" in capsys.readouterr().err
    assert cli.run(["convert", "to-nxd", root, tag, "--tensor", "2"]) == 64
    assert "is not empty" in capsys.readouterr().err
    assert cli.run(["convert", "to-nxd", root, f"{tag}b", "--tensor", "2", "--precision", "int8"]) == 64
    assert "--precision int8: use Float32 or BFloat16" in capsys.readouterr().err


def test_a_damaged_checkpoint_ends_export_and_conversion_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainium_trainer import cli

    written(tmp_path / "root", state())
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
