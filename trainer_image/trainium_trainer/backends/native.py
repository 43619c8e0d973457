"""The native backend: one code path for CPU, CUDA and Neuron devices, with the process group, mesh and state of a rank.

Invariants: small agreements travel over gloo on the CPU, so they cost the device nothing; DeviceMesh, DTensor and FSDP
are imported only by a configuration that uses them; what runs here is deterministic for a given size.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trainium_contract import worker_env
from trainium_contract.trainer import DataParallelMode, Precision
from trainium_trainer.backends.adamw import adamw
from trainium_trainer.backends.base import Mesh, StepTotals
from trainium_trainer.backends.replicated import ReplicatedStore
from trainium_trainer.backends.store import cut, is_dtensor, local_of
from trainium_trainer.models.llama import Llama, initial_weight
from trainium_trainer.models.llama import loss_sum as sum_of_losses
from trainium_trainer.models.state_dict import OPTIMIZER_STEP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from trainium_trainer.backends.store import Store
    from trainium_trainer.config import Launch, Settings
    from trainium_trainer.data.loader import MicroBatch

_TIMEOUT = timedelta(minutes=30)
"""Also bounds how long ranks wait for one that is still tokenising; hangs are found by the operator, long before."""
_GROUP_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "neuron": "cpu:gloo,neuron:neuron"}


def pick_device(local_rank: int) -> torch.device:
    """The best device that is there: Neuron, CUDA, else the CPU."""
    neuron = getattr(torch, "neuron", None)  # registered by the vendor's plug-in
    if neuron is not None and neuron.is_available():
        return torch.device("neuron", local_rank)
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def join_process_group(device: torch.device, launch: Launch) -> None:
    """Meet the other ranks, as torchrun's variables say; without any, be a world of one."""
    address = os.environ.get(worker_env.ENV_POD_IP) or os.environ.get("MASTER_ADDR", "localhost")
    if address.startswith("127.") or address == "localhost":
        # gloo would look up the host name, which need not resolve to a loopback address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = _GROUP_BACKENDS[device.type]
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=launch.rank, world_size=launch.world_size)


class NativeBackend:
    """One rank of a job on CPU, CUDA or Neuron."""

    def __init__(self, settings: Settings) -> None:
        """Join the process group and find this rank's place. Collective."""
        self._config = settings.config
        self._shape = settings.shape
        self._device = pick_device(settings.launch.local_rank)
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index or 0)
            torch.backends.cudnn.deterministic = True
        join_process_group(self._device, settings.launch)
        self._device_mesh: DeviceMesh | None = None
        self.mesh = self._make_mesh(settings)
        self._loss = torch.zeros((), dtype=torch.float64)
        self._tokens = 0

    def _make_mesh(self, settings: Settings) -> Mesh:
        launch, tp_size, dp_size = settings.launch, self._config.parallelism.tensor, settings.dp_size
        world = dist.group.WORLD
        assert world is not None
        dp = world if dp_size > 1 else None
        tp = world if tp_size > 1 else None
        if tp_size > 1 or self._config.data_parallel is DataParallelMode.FULLY_SHARDED:
            from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow, see the module docstring

            self._device_mesh = init_device_mesh(self._device.type, (dp_size, tp_size), mesh_dim_names=("dp", "tp"))
            if tp_size > 1 and dp_size > 1:
                dp, tp = self._device_mesh.get_group("dp"), self._device_mesh.get_group("tp")
        return Mesh(
            rank=launch.rank,
            world_size=launch.world_size,
            dp_rank=launch.rank // tp_size,
            dp_size=dp_size,
            tp_rank=launch.rank % tp_size,
            tp_size=tp_size,
            dp_mode=self._config.data_parallel,
            device=self._device,
            world=world,
            dp=dp,
            tp=tp,
        )

    def build(self) -> None:
        """Create the model without values, divide it, and allocate this rank's state. Collective."""
        with torch.device("meta"):
            self._model = Llama(self._shape)
        mesh = self._device_mesh
        if self.mesh.tp_size > 1:
            from trainium_trainer.models.parallel_plan import apply_tensor_parallel  # noqa: PLC0415 - imports DTensor

            assert mesh is not None
            apply_tensor_parallel(self._model, mesh["tp"], sequence=self._config.parallelism.sequence)
        self._store: Store
        if self.mesh.dp_mode is DataParallelMode.FULLY_SHARDED:
            from trainium_trainer.backends.sharded import ShardedStore, apply_fully_sharded  # noqa: PLC0415 - FSDP

            assert mesh is not None
            apply_fully_sharded(self._model, mesh["dp"], self._config.precision)
            self._store = ShardedStore(
                self._model,
                self._device,
                dp=(self.mesh.dp_size, self.mesh.dp_rank),
                tp=(self.mesh.tp_size, self.mesh.tp_rank),
            )
        else:
            self._store = ReplicatedStore(self._model, self._device, self.mesh.dp, self.mesh.tp_rank)
        self.state = NativeState(self._store)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Make each parameter's full value on the CPU, keep this rank's part, drop the rest."""
        for name, size, local, cuts in self._store.parameters():
            whole = initial_weight(name, size, seed=seed, num_layers=self._shape.num_layers)
            local.copy_(cut(whole, cuts))

    def agree(self, value: int) -> bool:
        """Compare by the greatest value and the greatest negative value."""
        pair = torch.tensor([value, -value], dtype=torch.int64)
        dist.all_reduce(pair, dist.ReduceOp.MAX)
        return int(pair[0]) == -int(pair[1])

    @contextlib.contextmanager
    def _compute(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.mesh.tp_size > 1:
                from torch.distributed.tensor.parallel import loss_parallel  # noqa: PLC0415 - imports DTensor

                stack.enter_context(loss_parallel())
            if self._config.precision is Precision.BFLOAT16:
                stack.enter_context(torch.autocast(self._device.type, torch.bfloat16))
            yield

    def accumulate(self, batch: MicroBatch, *, last: bool) -> None:
        """Forward and backward of the summed loss."""
        inputs, labels = batch.inputs.to(self._device), batch.labels.to(self._device)
        self._store.before_backward(last=last)
        with self._compute():
            loss = sum_of_losses(self._model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        self._loss += local_of(loss).double().cpu()
        self._tokens += batch.valid_tokens

    def totals(self, *, stop: bool, memory_ends: bool, vote: float) -> StepTotals:
        """One small sum over all ranks; of a tensor-parallel group only the first rank counts loss and tokens."""
        counts = self.mesh.tp_rank == 0
        mine = [float(self._loss) * counts, self._tokens * counts, stop, memory_ends, vote]
        values = torch.tensor(mine, dtype=torch.float64)
        if self.mesh.world_size > 1:
            dist.all_reduce(values)
        self._loss.zero_()
        self._tokens = 0
        loss_sum, tokens, stops, ends, votes = values.tolist()
        return StepTotals(loss_sum=loss_sum, tokens=int(tokens), stop=stops > 0, memory_ends=ends > 0, votes=votes)

    def gradient_norm(self, tokens: int) -> float:
        """Sum of squares over everything that is divided, each value once."""
        self._store.reduce()
        sums = torch.tensor(self._store.square_sums(), dtype=torch.float64)
        if self.mesh.dp is not None and self.mesh.dp_mode is DataParallelMode.FULLY_SHARDED:
            dist.all_reduce(sums, group=self.mesh.dp)
        if self.mesh.tp is not None:
            divided = sums[:1].clone()
            dist.all_reduce(divided, group=self.mesh.tp)
            sums[0] = divided[0]
        return float(sums.sum().sqrt()) / tokens

    def update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """AdamW on this rank's part of the state."""
        self.state.step += 1
        adamw(
            self._store.slots(),
            self._config.optimizer,
            step=int(self.state.step),
            learning_rate=learning_rate,
            gradient_scale=gradient_scale,
        )
        self._store.forget()

    def discard(self) -> None:
        """Forget the gradients of a skipped step."""
        self._store.forget()

    def barrier(self) -> None:
        """An empty reduction: as cheap as a barrier gets on gloo."""
        dist.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


class NativeState:
    """The training state of one rank under its checkpoint names."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.step = torch.zeros((), dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """See `TrainState.state_dict`."""
        return self._store.state_dict() | {OPTIMIZER_STEP: self.step}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy every value in; the names must be exactly this state's."""
        own = self.state_dict()
        if own.keys() != state.keys():
            raise KeyError(sorted(own.keys() ^ state.keys()))
        for name, value in own.items():
            given = state[name]
            target = local_of(value)
            source = local_of(given) if is_dtensor(given) == is_dtensor(value) else given
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    def local_tensors(self) -> dict[str, Tensor]:
        """See `TrainState.local_tensors`."""
        return self._store.local_tensors() | {OPTIMIZER_STEP: self.step}
