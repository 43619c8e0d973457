"""The tensors that a step changes, by name: parameters that are trained, buffers, and the state of the optimizer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

_WRAPPERS = re.compile(r"^module\.|_orig_mod\.")
"""Prefixes that DistributedDataParallel and torch.compile add to names."""


class ModelTensors:
    """The tensors of the model of this process."""

    def __init__(self) -> None:
        self._walked: list[object] = []
        """Result of the last walk over the model."""
        self._modules: list[torch.nn.Module] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self.has_buffers = False
        """Whether it has buffers, which ranks of data parallelism need not have in common."""

    def list(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return `list_model_tensors`; walks a model only if a module, parameter or buffer was added or replaced."""
        if not self._modules or self._modules[0] is not model or self._walked != _list_members(self._modules):
            self._modules = [*model.modules()]
            self._walked, self._tensors = _list_members(self._modules), list_model_tensors(model)
            self.has_buffers = any(not isinstance(tensor, torch.nn.Parameter) for tensor in self._tensors.values())
        return self._tensors


def list_model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained parameters and the buffers of a model by name, without the prefixes of its wrappers."""
    parameters = model.named_parameters()
    tensors: dict[str, torch.Tensor] = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - it has no public name
                tensors[f"{prefix}.{name}"] = buffer
    return {f"model.{_WRAPPERS.sub('', name)}": tensor for name, tensor in tensors.items()}


def _list_members(modules: list[torch.nn.Module]) -> list[object]:
    """Return the identities of the members of modules, and which parameters are trained."""
    members: list[object] = []
    for module in modules:
        for parameter in module._parameters.values():  # noqa: SLF001 - the public methods walk the whole model
            members += (id(parameter), parameter is not None and parameter.requires_grad)
        members += map(id, module._buffers.values())  # noqa: SLF001 - as above
        members += map(id, module._modules.values())  # noqa: SLF001 - as above
    return members


def split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of the state of an optimizer by name, and the rest of its state."""
    tensors: dict[str, torch.Tensor] = {}
    state = optimizer.state_dict()
    rest: dict[int, dict[str, Any]] = {}
    for number, values in state["state"].items():
        rest[number] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{number}.{key}"] = value
            else:
                rest[number][key] = value
    return tensors, {**state, "state": rest}


def create_optimizer_tensors(metadata: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return empty tensors for the saved state of an optimizer, divided as its parameters are."""
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {}
    for name, saved in metadata.items():
        if not name.startswith("optimizer."):
            continue
        parameter = parameters[int(name.split(".")[1])]
        if saved.size == parameter.size():
            tensors[name] = torch.empty_like(parameter, dtype=saved.properties.dtype)
        else:
            tensors[name] = torch.empty(saved.size, dtype=saved.properties.dtype)
    return tensors


def detach(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors that autograd does not follow, with the same memory."""
    return {name: tensor.detach() for name, tensor in tensors.items()}
