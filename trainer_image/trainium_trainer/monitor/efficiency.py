"""Compute model FLOPs utilisation: the work of the model per token over the devices' peak.

    FLOPs per token = 6 N + 12 L H D S        MFU = tokens/s x FLOPs per token / (devices x peak)

N: parameters that take part in multiplications (all but an embedding table), 2 FLOPs forward and 4 backward each. L
layers of H heads of width D at sequence length S: the two products of attention, counted in full although half of them
is masked. This is the definition of PaLM (arXiv 2204.02311, appendix B); recomputation is not counted as work. If
weights are frozen, the 2 FLOPs of their gradient are left out: 4 N + 2 T, with T the parameters that are trained.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.accelerators import LOGICAL_CORE
from trainium_contract.models.parameters import count_parameters
from trainium_trainer.neuron_environment import PRODUCT_NAME

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape

_CORES_PER_LOGICAL_CORE = 2
"""The default on trn2 and trn3."""
_TERA = 1e12

CUDA_PEAKS = {"H200": 989.4, "H100 80GB": 989.4, "H100 PCIe": 756.0, "A100": 312.0}
"""TFLOP/s in dense bfloat16 by a part of the device's name (NVIDIA's data sheets, half of those with sparsity)."""
NEURON_PEAKS = {"trn1": 190 / 2, "trn2": 667 / 8, "trn3": 671 / 8}
"""TFLOP/s in bfloat16 of one physical core by instance family: the chip's figure in AWS's Neuron documentation
(architecture of Trainium, Trainium2, Trainium3) over its 2, 8 and 8 cores.
"""


def compute_flops_per_token(shape: ModelShape, sequence_length: int, *, trained: int | None = None) -> float:
    """Return the forward and backward floating-point operations of one token, by the formula of the module.

    `trained` is the number of trained parameters if not all are.
    """
    embedded = 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    products = count_parameters(shape) - embedded
    weight_gradient_products = products if trained is None else trained
    attention = shape.num_layers * shape.num_attention_heads * shape.head_dim * sequence_length
    return 4.0 * products + 2.0 * weight_gradient_products + 12.0 * attention


def find_peak_flops(device: torch.device) -> float | None:
    """Return the peak of a process's device, FLOP/s in dense bfloat16; None for a CPU and unknown devices."""
    if device.type == "cuda":
        return find_cuda_peak(torch.cuda.get_device_name(device))
    if device.type in ("neuron", "xla"):
        try:
            instance = PRODUCT_NAME.read_text()
        except OSError:
            return None
        return find_neuron_peak(instance, os.environ.get(LOGICAL_CORE, ""))
    return None


def find_cuda_peak(name: str) -> float | None:
    """Return the peak of a CUDA device by its name, FLOP/s; None for an unknown one."""
    return next((peak * _TERA for part, peak in CUDA_PEAKS.items() if part in name), None)


def find_neuron_peak(instance: str, logical_core: str = "") -> float | None:
    """Return the peak of one core of an EC2 instance type such as `trn2.48xlarge`, FLOP/s; None for another type.

    `logical_core` is the number of physical cores per logical core; empty: the SDK's default.
    """
    family = next((name for name in NEURON_PEAKS if instance.strip().startswith(name)), None)
    if family is None:
        return None
    default = 1 if family == "trn1" else _CORES_PER_LOGICAL_CORE
    cores = int(logical_core) if logical_core.isdecimal() else default
    return NEURON_PEAKS[family] * cores * _TERA


def compute_utilisation(tokens_per_second: float, flops: float, *, devices: int, peak: float | None) -> float | None:
    """Return the MFU, 0 to 1, of `devices` devices of `peak` FLOP/s each; None if the peak is unknown."""
    return None if peak is None else tokens_per_second * flops / (devices * peak)


def read_host_bytes(statm: Path = Path("/proc/self/statm")) -> int | None:
    """Return the resident memory of this process in bytes; None if the system does not report it."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def read_device_bytes(device: torch.device) -> int | None:
    """Return the peak device memory of this process's tensors so far, in bytes; None for a CPU."""
    if device.type == "cpu":
        return None
    module: Any = getattr(torch, device.type, None)
    max_allocated = getattr(module, "max_memory_allocated", None)
    return int(max_allocated(device)) if max_allocated is not None else None
