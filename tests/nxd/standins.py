"""Stand-ins with which neuronx-distributed runs on a CPU, without the Neuron SDK.

AWS publishes the source of neuronx-distributed, but not of torch_neuronx, the compiler and its kernels. NxD imports
them, and with NXD_CPU_MODE=1 it does not use them. This module replaces the closed packages, and the device, ordinals
and collectives of torch_xla by gloo. Where torch_xla is not installed, it replaces the names that NxD imports from it;
then there is no ZeRO-1, which is part of torch_xla.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch import distributed as dist

CLOSED = {"torch_neuronx", "neuronxcc", "nki", "nkilib"}
NOT_NEEDED = {"boto3", "botocore", "tenacity", "requests"}
"""Public packages of storage that these tests do not use; replaced only if they are not installed."""
INFERENCE = "neuronx_distributed.trace"
"""It uses TorchScript classes that only torch_neuronx registers."""


class Absent:
    """A stand-in for any object of an absent package: it can be named, called and indexed, and does nothing."""

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Self:
        return self

    def __getitem__(self, _: Any) -> Self:
        return self

    def __or__(self, _: Any) -> Self:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        """Add no base class."""
        return ()


class Collectives:
    """Ring neighbours of context parallelism, which these tests do not use."""

    def __init__(self, replica_groups: list[list[int]]) -> None:
        self.rank_src_tgt_pairs: list[list[int]] = [[] for group in replica_groups for _ in group]


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Collectives if name == "CollectivesConfig" else Absent()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that imports the closed packages as empty modules."""

    def __init__(self, roots: set[str]) -> None:
        self._roots = roots

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", 1)[0] in self._roots or name.startswith(INFERENCE):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "torch_neuronx.utils":
            target = os.environ.get("TEST_NXD_TARGET", "trn1")
            module.get_platform_target = lambda *_: target  # type: ignore[attr-defined]


def install() -> None:
    """Make NxD importable in this process; before anything imports torch_xla or NxD."""
    source = os.environ.get("NXD_SRC")
    if source:
        sys.path.insert(0, source)
    os.environ.setdefault("NXD_CPU_MODE", "1")
    os.environ.setdefault("NXD_LOG_LEVEL", "error")
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    # NxD works without transformers, but not with a recent version.
    sys.modules["transformers"] = None  # type: ignore[assignment]
    if importlib.util.find_spec("torch_xla") is None:
        _replace_torch_xla()
    else:
        import torch_xla  # noqa: F401  before the closed packages can be found
    missing = {name for name in NOT_NEEDED if importlib.util.find_spec(name) is None}
    sys.meta_path.insert(0, Finder(CLOSED | missing))
    if os.environ["NXD_CPU_MODE"] == "1":
        _route_to_gloo()


# ---- torch_xla where it is not installed ---------------------------------------------------------------------------


class _Zero1:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("ZeRO-1 is torch_xla's, which is not installed")


def _module(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)


def _replace_torch_xla() -> None:
    _module("torch_xla", __version__="0", _XLAC=types.SimpleNamespace())
    for package in ("core", "utils", "distributed"):
        _module(f"torch_xla.{package}")
    constants = {"REDUCE_SUM": "sum", "REDUCE_MAX": "max", "REDUCE_MIN": "min"}
    _module("torch_xla.core.xla_model", ToXlaTensorArena=Absent, **constants)
    _module("torch_xla.core.xla_env_vars")
    _module("torch_xla.runtime")
    names = ("TensorReference", "_get_tensors_folder", "_get_tensor_file")
    _module("torch_xla.utils.serialization", **dict.fromkeys(names, Absent))
    _module("torch_xla.utils.checkpoint", checkpoint=torch.utils.checkpoint.checkpoint)
    _module("torch_xla.distributed.zero_redundancy_optimizer", ZeroRedundancyOptimizer=_Zero1)
    _module("torch_xla.distributed.parallel_loader", MpDeviceLoader=Absent)


# ---- collectives that NXD_CPU_MODE=1 leaves to torch_xla -----------------------------------------------------------

_groups: dict[tuple[int, ...], Any] = {}


def _group(groups: Any) -> Any:
    """Return the gloo group of this rank from a list of rank lists; all ranks create them in the same order."""
    if not isinstance(groups, list) or not groups:
        return None if isinstance(groups, list) else groups
    for ranks in groups:
        if tuple(ranks) not in _groups:
            _groups[tuple(ranks)] = dist.new_group(list(ranks), backend="gloo")
    return next(_groups[tuple(ranks)] for ranks in groups if dist.get_rank() in ranks)


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _all_reduce(kind: str, inputs: Any, scale: float = 1.0, groups: Any = None, **_: Any) -> Any:
    """Reduce a list in place, or a tensor into a new tensor."""
    tensors = inputs if isinstance(inputs, list) else [inputs.clone()]
    for tensor in tensors:
        dist.all_reduce(tensor, op=_OPERATIONS[kind], group=_group(groups))
        tensor.mul_(scale)
    return inputs if isinstance(inputs, list) else tensors[0]


def _all_gather(value: Tensor, dim: int = 0, groups: Any = None, output: Tensor | None = None, **_: Any) -> Tensor:
    group = _group(groups)
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    whole = torch.cat(parts, dim=dim)
    return whole if output is None else output.copy_(whole)


def _reduce_scatter(
    kind: str,
    value: Tensor,
    scale: float = 1.0,
    scatter_dim: int = 0,
    shard_count: int = 1,
    groups: Any = None,
    output: Tensor | None = None,
    **_: Any,
) -> Tensor:
    total = _all_reduce(kind, value, scale, groups)
    part = total.chunk(shard_count, dim=scatter_dim)[dist.get_rank(_group(groups))].contiguous()
    return part if output is None else output.copy_(part)


collective_groups: dict[str, list[list[int]]] = {}
"""After `disable_communication`: the groups of the newest collective, by group size."""


def disable_communication() -> None:
    """Replace the collectives of this process by collectives with the same shapes and without peers."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    def record_groups(groups: Any) -> int:
        """Record the groups, by default one of all ranks, and return their size."""
        ranks = groups or [list(range(int(os.environ["WORLD_SIZE"])))]
        collective_groups[str(len(ranks[0]))] = [list(group) for group in ranks]
        return len(ranks[0])

    def all_reduce(_: str, inputs: Any, scale: float = 1.0, groups: Any = None, **__: Any) -> Any:
        record_groups(groups)
        return inputs if isinstance(inputs, list) else inputs * scale

    def all_gather(value: Any, dim: int = 0, groups: Any = None, output: Any = None, **_: Any) -> Any:
        if isinstance(value, list):
            return [all_gather(tensor, dim, groups) for tensor in value]
        whole = torch.cat([value] * record_groups(groups), dim=dim)
        return whole if output is None else output.copy_(whole)

    def reduce_scatter(
        reduce_type: str,
        input: Any,  # noqa: A002 - the library's name
        scale: float,
        scatter_dim: int,
        shard_count: int,
        groups: Any = None,
        output: Any = None,
        **_: Any,
    ) -> Any:
        record_groups(groups)
        if isinstance(input, list):
            return [tensor.chunk(shard_count, dim=scatter_dim)[0] * scale for tensor in input]
        part = input.chunk(shard_count, dim=scatter_dim)[0] * scale
        return part if output is None else output.copy_(part)

    xm.all_reduce, xm.all_gather, xm.reduce_scatter = all_reduce, all_gather, reduce_scatter
    xm.all_gather_bucketized = lambda values, bucket_cap_mb=0, **options: all_gather(values, **options)
    xm.reduce_scatter_bucketized = lambda kind, values, bucket_cap_mb=0, **options: reduce_scatter(
        kind, values, **options
    )
    xr.global_ordinal = xr.local_ordinal = _number("RANK", 0)
    xr.world_size = xr.global_device_count = _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> Callable[..., int]:
    return lambda *_, **__: int(os.environ.get(name, default))  # the variables of a forked rank


def _route_to_gloo() -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    xm.all_reduce, xm.all_gather, xm.reduce_scatter = _all_reduce, _all_gather, _reduce_scatter
    xm.all_gather_bucketized = lambda values, bucket_cap_mb=0, **options: [
        _all_gather(value, **options) for value in values
    ]
    xm.reduce_scatter_bucketized = lambda kind, values, bucket_cap_mb=0, **options: [
        _reduce_scatter(kind, value, **options) for value in values
    ]
    xm.xla_device = lambda *_, **__: torch.device("cpu")
    xm.rendezvous = lambda *_, **__: dist.barrier()
    xm.unlazy = torch_xla.sync = lambda *_, **__: None
    xm.is_master_ordinal = lambda *_, **__: dist.get_rank() == 0
    xr.global_ordinal = xr.local_ordinal = _number("RANK", 0)
    xr.world_size = xr.global_device_count = xr.local_process_count = _number("WORLD_SIZE", 1)

    def shard_parameters(self: Any) -> list[dict[str, Any]]:
        """Shard parameters like the library, which requires an XLA device here."""
        self.device = torch.device("cpu")
        sharded = []
        for group in self.param_groups:
            shards = []
            for parameter in group["params"]:
                data = self._shard_tensor(parameter.data).to(self.optimizer_dtype).clone()
                shards.append(torch.nn.Parameter(data, requires_grad=parameter.requires_grad))
                self._register_hook(parameter, shards[-1])
            sharded.append({**group, "params": shards})
        return sharded

    ZeroRedundancyOptimizer._shard_parameters = shard_parameters
