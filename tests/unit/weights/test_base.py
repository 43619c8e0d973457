"""Read a base model box by box from any files, types and stores."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.testing.trainer.base_models import save_base
from tests.testing.trainer.fork_server import run_python
from tests.testing.trainer.s3_gateway import run_gateway
from trainium_contract.models.parameters import parameter_sizes
from trainium_trainer.evaluate.check_folder import compute_logits
from trainium_trainer.weights import tensors
from trainium_trainer.weights.base import BaseWeights
from trainium_trainer.weights.folder import open_shape


def read_whole(weights: BaseWeights, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    target = torch.empty(weights.find_size(name), dtype=dtype or weights.find_dtype(name))
    weights.fill(name, (0,) * target.dim(), target)
    return target


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("largest", ["5GB", "20KB"], ids=["one file", "several files"])
def test_every_parameter_is_read_as_transformers_saved_it(tmp_path: Path, largest: str, *, tied: bool) -> None:
    model = save_base(tmp_path, largest=largest, tie_word_embeddings=tied)
    assert (tmp_path / "model.safetensors.index.json").exists() == (largest == "20KB")
    weights = BaseWeights.open(str(tmp_path))
    expected = dict(model.named_parameters())
    assert parameter_sizes(weights.shape).keys() == expected.keys()
    for name, value in expected.items():
        assert weights.find_size(name) == value.shape
        assert torch.equal(read_whole(weights, name), value)
    if tied:
        assert torch.equal(read_whole(weights, "lm_head.weight"), expected["model.embed_tokens.weight"])


@pytest.mark.parametrize("stored_type", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("requested_type", [torch.float32, torch.bfloat16], ids=str)
def test_every_floating_point_type_is_converted_to_the_requested_one(
    tmp_path: Path, stored_type: torch.dtype, requested_type: torch.dtype
) -> None:
    model = save_base(tmp_path, dtype=stored_type)
    weights = BaseWeights.open(str(tmp_path))
    for name, value in model.named_parameters():
        assert weights.find_dtype(name) == stored_type
        assert torch.equal(read_whole(weights, name, requested_type), value.to(requested_type))


def test_the_boxes_of_any_division_make_the_whole_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 500)  # boxes of several chunks, which also end within rows
    model = save_base(tmp_path)
    weights = BaseWeights.open(str(tmp_path))
    for name, value in model.named_parameters():
        for rows, columns in itertools.product((1, 2, 3, 8), (1, 2, 3)):
            target = torch.full_like(value, torch.nan)
            row = 0
            for part in target.tensor_split(rows):
                column = 0
                for box in [part] if value.dim() == 1 else part.tensor_split(columns, dim=1):
                    weights.fill(name, (row, column)[: value.dim()], box)
                    column += box.shape[-1]
                row += part.shape[0]
            assert torch.equal(target, value), name


def test_rows_beyond_the_file_are_the_mean_of_its_rows(tmp_path: Path) -> None:
    model = save_base(tmp_path, tie_word_embeddings=False)
    weights = BaseWeights.open(str(tmp_path))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        value = dict(model.named_parameters())[name]
        mean = value.double().mean(dim=0).float()
        grown = torch.empty(80, 32)
        weights.fill(name, (0, 0), grown)
        assert torch.equal(grown[:72], value)
        assert torch.equal(grown[72:], mean.expand(8, -1))
        corner = torch.empty(20, 8)
        weights.fill(name, (70, 16), corner)
        assert torch.equal(corner, torch.cat([value[70:, 16:24], mean[16:24].expand(18, -1)]))
        beyond = torch.empty(4, 32)
        weights.fill(name, (76, 0), beyond)
        assert torch.equal(beyond, mean.expand(4, -1))


@pytest.mark.parametrize(
    ("name", "offsets", "size"),
    [
        ("model.norm.weight", (1,), (32,)),
        ("model.layers.0.mlp.up_proj.weight", (40, 0), (9, 32)),
        ("model.embed_tokens.weight", (0, 1), (72, 32)),
        ("model.norm.weight", (-1,), (4,)),
        ("model.norm.weight", (0, 0), (4, 1)),
    ],
)
def test_a_box_outside_the_parameter_is_refused(
    tmp_path: Path, name: str, offsets: tuple[int, ...], size: tuple[int, ...]
) -> None:
    save_base(tmp_path)
    with pytest.raises(ValueError, match=r"dimensions|not within"):
        BaseWeights.open(str(tmp_path)).fill(name, offsets, torch.empty(size))


def test_old_files_with_rotary_buffers_a_copied_output_and_unaligned_tensors_are_read(tmp_path: Path) -> None:
    model = save_base(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    padded_header = data[8 : 8 + length] + b" " * 3  # its length is no multiple of 8
    (tmp_path / "model.safetensors").write_bytes(
        len(padded_header).to_bytes(8, "little") + padded_header + data[8 + length :]
    )
    weights = BaseWeights.open(str(tmp_path))
    for name, value in model.named_parameters():
        assert torch.equal(read_whole(weights, name), value)


def change_last_row(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"][-1, -1] += 1


def keep_head_alone(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.embed_tokens.weight"]


def remove_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def remove_prefix_and_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]
    remove_prefix(tensors)


def double_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def nothing(tensors: dict[str, torch.Tensor]) -> None:
    pass


FOREIGN_FILES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], dict[str, Any]]] = {
    "a copy of the embedding": (nothing, {}),
    "an output projection that differs in one value": (change_last_row, {}),
    "the output projection alone": (keep_head_alone, {}),
    "no prefix": (remove_prefix, {}),
    "no prefix and no output projection": (remove_prefix_and_head, {}),
    "two prefixes": (double_prefix, {}),
    "another class of the family": (remove_prefix_and_head, {"architectures": ["LlamaModel"]}),
    "no prefix, not tied": (remove_prefix, {"tie_word_embeddings": False}),
    "layers that the configuration no longer counts": (nothing, {"num_hidden_layers": 1}),
    "tensors of another part": (lambda t: t.update({"visual.proj.weight": torch.ones(3)}), {}),
}


@pytest.mark.parametrize("case", FOREIGN_FILES)
@pytest.mark.parametrize("files", [1, 3])
def test_files_are_read_as_transformers_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, files: int
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(tensors, "CHUNK_BYTES", 500)  # the difference is in the last of many chunks
    save_base(tmp_path, tie_word_embeddings=True)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    change, fields = FOREIGN_FILES[case]
    change(stored)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    save_parts(tmp_path, stored, files)
    expected: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = BaseWeights.open(str(tmp_path))
    tied = expected.lm_head.weight is expected.model.embed_tokens.weight
    assert weights.shape.tie_embeddings == open_shape(str(tmp_path)).tie_embeddings == tied
    for name in parameter_sizes(weights.shape) | {"lm_head.weight": ()}:
        assert torch.equal(read_whole(weights, name), expected.get_parameter(name)), name
    logits = compute_logits(weights, torch.arange(24)[None])
    torch.testing.assert_close(logits, expected(torch.arange(24)[None]).logits, rtol=1e-5, atol=1e-5)


def save_parts(folder: Path, stored: dict[str, torch.Tensor], files: int) -> None:
    """Write tensors into a number of files, with an index that names another file for each."""
    if files == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    for number in range(files):
        part = {name: stored[name] for name in names[number::files]}
        save_file(part, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"part-{(number + 1) % files}.safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("wrapped", ["_orig_mod.{}", "module._orig_mod.{}", "module.{}"])
def test_names_of_compiled_and_divided_modules_are_those_of_their_parameters(tmp_path: Path, wrapped: str) -> None:
    model = save_base(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    inner = {name.replace("mlp.", "mlp._orig_mod."): tensor for name, tensor in stored.items()}
    save_file({wrapped.format(name): tensor for name, tensor in inner.items()}, tmp_path / "model.safetensors")
    weights = BaseWeights.open(str(tmp_path))
    for name, value in model.named_parameters():
        assert torch.equal(read_whole(weights, name), value)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default", "rope_theta": 500_000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["3", "3.1 and 3.2"],
)
def test_the_shape_has_the_rotary_scaling_of_the_folder(tmp_path: Path, scaling: dict[str, Any]) -> None:
    save_base(tmp_path, rope_parameters=scaling)
    shape = open_shape(str(tmp_path))
    assert shape == BaseWeights.open(str(tmp_path)).shape
    assert shape.rope_theta == 500_000.0
    assert (shape.rope_stretch is not None) == (scaling["rope_type"] == "llama3")
    if shape.rope_stretch is not None:
        assert shape.rope_stretch.factor == 32.0
        assert shape.rope_stretch.original_max_positions == 64


def test_the_digest_depends_on_weights_and_shape_and_not_on_the_files(tmp_path: Path) -> None:
    save_base(tmp_path / "a")
    save_base(tmp_path / "parts", largest="20KB")
    save_base(tmp_path / "other", seed=1)
    save_base(tmp_path / "half", dtype=torch.bfloat16)
    save_base(tmp_path / "stretched", rope_theta=1234.0)
    digests = [BaseWeights.open(str(tmp_path / name)).digest for name in ("a", "parts", "other", "half", "stretched")]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    assert all(len(digest) == 64 for digest in digests)


def test_a_base_in_s3_is_read_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_base(tmp_path / "base", largest="20KB")
    with run_gateway(tmp_path, monkeypatch) as server:
        for path in (tmp_path / "base").iterdir():
            server.put("bucket", f"models/tiny/{path.name}", path.read_bytes())
        weights = BaseWeights.open("s3://bucket/models/tiny")
        assert weights.digest == BaseWeights.open(str(tmp_path / "base")).digest
        for name, value in model.named_parameters():
            assert torch.equal(read_whole(weights, name), value)
        box = torch.empty(10, 8)
        weights.fill("model.layers.1.mlp.gate_proj.weight", (3, 5), box)
        assert torch.equal(box, model.model.layers[1].mlp.gate_proj.weight[3:13, 5:13])


LOAD_SHARD = """
import json, resource, sys
import torch
from trainium_trainer.tuning.trainable import parameter_sizes
from trainium_trainer.weights.base import BaseWeights
location, rank, size = sys.argv[1], int(sys.argv[2]), 8
weights = BaseWeights.open(location)
def peak_bytes():
    text = open("/proc/self/status").read()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024
tensors = []
for name, full_size in parameter_sizes(weights.shape).items():
    dimension = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    sizes, offsets = list(full_size), [0] * len(full_size)
    if len(full_size) == 2:
        sizes[dimension] //= size
        offsets[dimension] = rank * sizes[dimension]
    sizes[0] //= 2  # the second half of a fully sharded tensor
    offsets[0] += sizes[0]
    tensors.append((name, tuple(offsets), tuple(sizes)))
largest = max(weights.find_size(name).numel() for name, _, _ in tensors) * 2
weights.fill(tensors[0][0], tensors[0][1], torch.empty(tensors[0][2], dtype=torch.bfloat16))  # load the libraries
open("/proc/self/clear_refs", "w").write("5")
before = peak_bytes()
loaded = []
for name, offsets, sizes in tensors:
    loaded.append(torch.empty(sizes, dtype=torch.bfloat16))
    weights.fill(name, offsets, loaded[-1])
shard = sum(tensor.numel() * 2 for tensor in loaded)
print(json.dumps({"peak": peak_bytes() - before, "shard": shard, "largest": largest}))
"""


def test_a_sharded_rank_needs_the_memory_of_its_shard_and_one_tensor(tmp_path: Path) -> None:
    save_base(
        tmp_path,
        dtype=torch.bfloat16,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=16_000,
        tie_word_embeddings=True,
    )
    assert (tmp_path / "model.safetensors").stat().st_size > 200_000_000
    for rank in ("0", "7"):
        completed = run_python("-c", LOAD_SHARD, str(tmp_path), rank)
        assert completed.returncode == 0, completed.stderr
        figures = json.loads(completed.stdout)
        assert figures["shard"] > 12_000_000
        assert figures["peak"] <= figures["shard"] + figures["largest"]
