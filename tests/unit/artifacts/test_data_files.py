"""Divide tensors into files of suitable sizes that each safetensors reader opens."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from tests.testing.suite.trials import trials
from trainium_trainer.artifacts.data_files import LARGEST, SMALLEST, build_index, plan_files
from trainium_trainer.weights.tensors import LENGTH_BYTES, TORCH_TYPES, parse_header

SIZES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=8),
    st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple),
    min_size=1,
    max_size=20,
)


@given(sizes=SIZES, dtype=st.sampled_from(sorted(TORCH_TYPES)), max_file_bytes=st.integers(1, 5_000))
@settings(max_examples=trials(60))
def test_files_hold_every_tensor_once_in_order_and_are_filled(
    sizes: Mapping[str, tuple[int, ...]], dtype: str, max_file_bytes: int
) -> None:
    files = plan_files(sizes, dtype, "model", max_file_bytes=max_file_bytes)
    assert [name for file in files for name, _ in file.tensors] == list(sizes)
    assert len({file.name for file in files}) == len(files)
    assert build_index(files)["weight_map"].keys() == sizes.keys()
    lengths = [[math.prod(size) * TORCH_TYPES[dtype].itemsize for _, size in file.tensors] for file in files]
    for file_lengths, following in zip(lengths, [*lengths[1:], [max_file_bytes + 1]], strict=True):
        assert sum(file_lengths) <= max_file_bytes or len(file_lengths) == 1
        assert sum(file_lengths) + following[0] > max_file_bytes
    assert build_index(files)["metadata"]["total_size"] == sum(map(sum, lengths))
    for file in files:
        entries = parse_header(file.header[LENGTH_BYTES:], file.name, file.size)
        assert {name: entry.shape for name, entry in entries.items()} == dict(file.tensors)


@pytest.mark.parametrize(
    ("total", "writers", "max_file_bytes"),
    [
        (2_000_000_000, 1, 2_000_000_000),
        (140_000_000_000, 8, LARGEST),
        (16_000_000_000, 32, 500_000_000),
        (16_000_000_000, 1_000, SMALLEST),
    ],
)
def test_all_ranks_have_files_to_write_if_files_are_large_enough(total: int, writers: int, max_file_bytes: int) -> None:
    row = 1_000_000
    sizes = {f"w{number}": (row,) for number in range(total // row // 2)}
    files = plan_files(sizes, "BF16", "model", writers=writers)
    assert max(file.size - len(file.header) for file in files) <= max_file_bytes
    assert len(files) == -(-total // (max_file_bytes // (2 * row) * 2 * row))
    names = [file.name for file in files]
    assert names[-1] == (
        "model.safetensors" if len(files) == 1 else f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    )


def test_the_library_of_the_format_reads_what_the_headers_describe() -> None:
    sizes = {"a": (3, 5), "b": (7,), "c": (2, 2)}
    (file,) = plan_files(sizes, "F32", "x", metadata={"base_digest": "d"})
    tensors = {name: torch.randn(size) for name, size in sizes.items()}
    loaded = load(file.header + b"".join(tensor.numpy().tobytes() for tensor in tensors.values()))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert len(file.header) % 8 == 0
