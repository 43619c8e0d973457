"""Load models with `transformers` and adapters with `peft`.

Guarantees:
- The network is not used.
- A folder that lacks a weight is refused, although the library would initialize it randomly.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from trainium_contract.accelerators import Device
from trainium_contract.models.parameters import EMBEDDING, HEAD
from trainium_trainer.evaluate.answering.folder import ADAPTER_WEIGHTS, ComputeType, ModelFiles
from trainium_trainer.exits import UserError
from trainium_trainer.weights.adapter import BASE_DIGEST, from_tensor
from trainium_trainer.weights.base import BaseWeights

if TYPE_CHECKING:
    from pathlib import Path


_MATRIX = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory."""

    folder: ModelFiles
    network: Any
    """The library's model, without a public type."""
    device: torch.device


def select_device(choice: Device | None) -> torch.device:
    """Return the device to compute on, a GPU if there is one and no choice. Raises UserError if it cannot be used."""
    has_gpu = torch.cuda.is_available()
    if choice is Device.NEURON:
        raise UserError("--device neuron: transformers does not run on it: leave the option out, or use --endpoint")
    if choice is Device.CUDA and not has_gpu:
        raise UserError("--device cuda: torch finds no GPU on this machine: leave the option out, or use cpu")
    return torch.device("cuda" if choice is not Device.CPU and has_gpu else "cpu")


def load(
    folder: ModelFiles,
    *,
    device: Device | None = None,
    precision: ComputeType = ComputeType.AUTO,
    recommended: bool = False,
) -> LoadedModel:
    """Load a model with its adapter; `recommended` keeps the folder's generation settings. Raises UserError."""
    from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415 - seconds
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch_device = select_device(device)
    dtype: torch.dtype | str = "auto"
    if precision is not ComputeType.AUTO or torch_device.type == "cpu":
        dtype = torch.float32 if precision is ComputeType.AUTO else getattr(torch, precision.value)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder.path}: transformers cannot load the model ({reason}): replace the folder") from error
    network, report = loaded
    absent = sorted(map(str, report["missing_keys"])) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if absent:
        raise UserError(
            f"{folder.path}: {len(absent)} weights are missing or of another size, the first {absent[0]}: write or "
            "fetch the folder again"
        )
    if folder.adapter is not None:
        network = _apply_adapter(network, folder.path, folder.adapter)
    if not recommended:
        network.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    return LoadedModel(folder, network.to(torch_device).eval(), torch_device)


def _apply_adapter(network: Any, base: Path, adapter: Path) -> Any:
    """Return the model with an adapter applied, not merged."""
    _resize_and_check(network, base, adapter)
    try:
        from peft import PeftModel  # noqa: PLC0415 - needed for adapters alone
    except ImportError as error:
        raise UserError(
            "an adapter is applied by peft, which is not installed: run pip install peft, or merge the adapter by "
            "trainium-trainer merge"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the libraries warn about each other
            return PeftModel.from_pretrained(network, str(adapter))
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{adapter}: peft cannot apply the adapter ({reason}): give the model it was made for"
        ) from error


def _resize_and_check(network: Any, base: Path, adapter: Path) -> None:
    """Raise UserError for an adapter of another base: its targets are missing or have other widths.

    The vocabulary grows to that of the adapter.
    """
    try:
        with safe_open(adapter / ADAPTER_WEIGHTS, framework="pt") as file:
            sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no dictionary
            made_for = (file.metadata() or {}).get(BASE_DIGEST)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{adapter / ADAPTER_WEIGHTS}: cannot be read ({error}): write the adapter again") from error
    rows = next((size[0] for name, size in sizes.items() if from_tensor(name) in (EMBEDDING, HEAD)), None)
    if rows is not None and rows != network.get_input_embeddings().num_embeddings:
        network.resize_token_embeddings(rows)
    widths = {
        name: (module.in_features, module.out_features)
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    for name, size in sizes.items():
        matrix = _MATRIX.fullmatch(name)
        if matrix is None:
            continue
        module, inner = matrix["module"], matrix["matrix"] == "A"
        if module not in widths:
            raise UserError(f"{adapter}: has weights for {module}, which {base} does not have: it is of another base")
        expected, width = widths[module][0 if inner else 1], size[1 if inner else 0]
        if expected != width:
            raise UserError(
                f"{adapter}: is for a {module} of width {width}, but in {base} it has {expected}: it is of another "
                "base, give that with --base"
            )
    if made_for is not None and made_for != BaseWeights.open(str(base)).digest:
        raise UserError(f"{adapter}: was made for another base than {base}: give that with --base")
