"""Compute FLOPs, peaks of known devices, utilisation and memory."""

from pathlib import Path

import pytest
import torch

from trainium_contract.models.parameters import count_parameters
from trainium_contract.trainer.model import ModelConfig, ModelPreset
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.monitor.efficiency import (
    compute_flops_per_token,
    compute_utilisation,
    find_cuda_peak,
    find_neuron_peak,
    find_peak_flops,
    read_device_bytes,
    read_host_bytes,
)


def test_flops_of_llama_2_7b_are_six_per_multiplied_weight_and_those_of_attention() -> None:
    shape = resolve_shape(ModelConfig(preset=ModelPreset.LLAMA2_7B), 32_000)
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11_008 + 2 * 4096
    products = 32 * layer + 4096 + 32_000 * 4096  # the output projection, without the embedding
    assert compute_flops_per_token(shape, 4096) == 6 * products + 12 * 32 * 4096 * 4096


def test_frozen_weights_need_no_gradient() -> None:
    shape = resolve_shape(ModelConfig(preset=ModelPreset.LLAMA2_7B), 32_000)
    frozen = compute_flops_per_token(shape, 4096, trained=1000)
    assert frozen == compute_flops_per_token(shape, 4096) - 2 * (count_parameters(shape) - 32_000 * 4096) + 2000


def test_a_tied_embedding_multiplies_once() -> None:
    tied = resolve_shape(ModelConfig(hidden_size=32, tie_embeddings=True), 300)
    untied = resolve_shape(ModelConfig(hidden_size=32, tie_embeddings=False), 300)
    assert compute_flops_per_token(tied, 64) == compute_flops_per_token(untied, 64)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA T4", None),
    ],
)
def test_cuda_devices_are_known_by_name(name: str, tera: float | None) -> None:
    assert find_cuda_peak(name) == (None if tera is None else pytest.approx(tera * 1e12))


@pytest.mark.parametrize(
    ("instance", "logical", "tera"),
    [
        ("trn1.32xlarge\n", "", 95.0),
        ("trn1n.32xlarge", "", 95.0),
        ("trn2.48xlarge", "", 166.75),
        ("trn2.48xlarge", "1", 83.375),
        ("trn3.48xlarge", "2", 167.75),
        ("m7i.large", "", None),
    ],
)
def test_neuron_cores_are_known_by_the_instance_type(instance: str, logical: str, tera: float | None) -> None:
    assert find_neuron_peak(instance, logical) == (None if tera is None else pytest.approx(tera * 1e12))


def test_utilisation_is_the_share_of_the_peak() -> None:
    # HLAT 7B: 26,000 tokens/s on 32 cores of 95 TFLOP/s at 6 x 6.6e9 + 12 x 32 x 4096 x 4096 FLOPs per token.
    shape = resolve_shape(ModelConfig(preset=ModelPreset.LLAMA2_7B), 32_000)
    utilisation = compute_utilisation(26_000, compute_flops_per_token(shape, 4096), devices=32, peak=95e12)
    assert utilisation == pytest.approx(0.3942, abs=1e-3)
    assert compute_utilisation(26_000, 1e9, devices=32, peak=None) is None


def test_a_cpu_has_no_peak_and_no_device_memory() -> None:
    assert find_peak_flops(torch.device("cpu")) is None
    assert read_device_bytes(torch.device("cpu")) is None


def test_resident_memory_is_that_of_the_process(tmp_path: Path) -> None:
    assert 50e6 < read_host_bytes() < 50e9  # more than torch needs, less than any test machine has
    (tmp_path / "statm").write_text("nonsense")
    assert read_host_bytes(tmp_path / "statm") is None
    assert read_host_bytes(tmp_path / "none") is None
