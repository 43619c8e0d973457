"""Programs of ranks other than the trainer; each prints one JSON object and ends its process."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from trainium_trainer.backends.choose import create_backend, find_backend
from trainium_trainer.backends.nxd.backend import NxdBackend
from trainium_trainer.backends.nxd.stores import SharedRowSync
from trainium_trainer.configuration.config import Settings, load, read_launch, resolve_settings
from trainium_trainer.data.loader import MicroBatch
from trainium_trainer.weights.initial import InitialWeights


def main(name: str, argv: Sequence[str]) -> None:
    """Run `--config FILE --set A=B --set C=D ...` as the program `name`."""
    settings = resolve_settings(load(Path(argv[1]), argv[3::2]), read_launch())
    result = PROGRAMS[name](settings)
    print(json.dumps(result), flush=True)  # noqa: T201 - the result
    dist.barrier()
    os._exit(0)


def agree(settings: Settings) -> dict[str, Any]:
    """Count the shared values that differ between ranks, before and after a synchronization."""
    backend = NxdBackend(settings)
    backend.build()
    states = backend._store.states
    rank_value = float(backend.mesh.rank + 1)
    with torch.no_grad():
        for entry in states:
            entry.master.fill_(rank_value)
    before = _count_differing(backend)
    SharedRowSync(states, backend._groups.tensor).broadcast_first_rank()
    changed = [
        piece.name
        for entry in states
        for piece in entry.pieces
        if piece.replicas == 1 and bool((entry.master[piece.start : piece.end] != rank_value).any())
    ]
    return {"before": before, "after": _count_differing(backend), "changed": changed}


def _count_differing(backend: NxdBackend) -> int:
    shared_values = {
        f"{piece.name}{piece.offsets}": entry.master[piece.start : piece.end].clone()
        for entry in backend._store.states
        for piece in entry.pieces
        if piece.replicas > 1
    }
    gathered: list[dict[str, torch.Tensor]] = [{} for _ in range(backend.mesh.world_size)]
    dist.all_gather_object(gathered, shared_values)
    first: dict[str, torch.Tensor] = {}
    for values in gathered:
        first = values | first
    return sum(int((values[name] != first[name]).sum()) for values in gathered for name in values)


def reload(settings: Settings) -> dict[str, Any]:
    """Load the tag `converted` with `load_checkpoint` of NxD, and save it as `resaved` with its `save_checkpoint`."""
    import torch_xla.core.xla_env_vars
    from neuronx_distributed.trainer.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint

    # NxD counts the hosts with a variable that torch_xla 2.9 no longer names.
    torch_xla.core.xla_env_vars.HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
    os.environ["HOST_WORLD_SIZE"] = "1"
    backend = NxdBackend(settings)
    backend.build()
    backend.initialize(77)
    folder = str(Path(settings.config.checkpoint.path).parent)
    store: Any = backend._store
    model, optimizer = backend._model, store._optimizer
    content = load_checkpoint(folder, "converted", model=model, optimizer=optimizer)
    save_checkpoint(folder, "resaved", model=model, optimizer=optimizer, user_content=content)
    finalize_checkpoint()
    return {"content": content}


def evaluate(settings: Settings) -> dict[str, Any]:
    """Return the norm of the initial weights and their validation losses, the second one without tokens."""
    backend = create_backend(find_backend(settings), settings)
    backend.build()
    backend.initialize(3)
    generator = torch.Generator().manual_seed(backend.mesh.dp_rank)
    batches = []
    for _ in range(2):
        tokens = torch.randint(settings.shape.vocab_size, (2, 33), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[0, -5 - backend.mesh.dp_rank :] = -100
        batches.append(MicroBatch(tokens[:, :-1], labels, int((labels >= 0).sum()), torch.arange(2)))
    without_labels = MicroBatch(batches[0].inputs, torch.full_like(batches[0].labels, -100), 0, torch.arange(2))
    losses = [backend.evaluate(batches).loss, backend.evaluate([without_labels]).loss]
    return {"losses": [str(loss) for loss in losses], "norm": backend.compute_parameter_norm()}


def step_with_nan(settings: Settings) -> dict[str, Any]:
    """Return whether a step applied and the ranks named, with NaN in the last rank's loss, then in its gradient."""
    backend = NxdBackend(settings)
    backend.build()
    backend.initialize(3)
    has_nan = backend.mesh.rank == backend.mesh.world_size - 1
    parameter = next(parameter for parameter in backend._model.parameters() if parameter.requires_grad)
    forward = backend._forward
    tokens = torch.arange(66).reshape(2, 33)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:].clone(), 64, torch.arange(2))
    results = {}
    for part in ("forward", "backward"):
        backend._forward = lambda *batch, part=part, **options: (
            forward(*batch, **options)
            * (  # type: ignore[method-assign]
                math.nan if has_nan and part == "forward" else 1.0
            )
        )
        hook = parameter.register_hook(
            lambda gradient, part=part: gradient * (math.nan if has_nan and part == "backward" else 1.0)
        )
        backend.accumulate(batch, last=True)
        outcome = backend.step(divisor=64 * backend.mesh.dp_size, learning_rate=0.1, clip_norm=1.0)
        results[part] = [outcome.applied, list(outcome.nonfinite_ranks)]
        hook.remove()
    return results


def describe_frozen_base(settings: Settings) -> dict[str, Any]:
    """Describe a tuning after a step: tensors in float32 beside the adapters, and the frozen base."""
    backend = NxdBackend(settings)
    backend.build()
    base = InitialWeights.open(settings.config, settings.shape).base
    assert base is not None
    backend.load_frozen(base)
    backend.initialize(3, base)
    before = [entry.parameter.clone() for entry in backend._frozen]
    tokens = torch.arange(66).reshape(2, 33)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:].clone(), 64, torch.arange(2))
    backend.accumulate(batch, last=True)
    outcome = backend.step(divisor=64 * backend.mesh.dp_size, learning_rate=0.1, clip_norm=1.0)
    assert outcome.applied
    states = backend._store.states
    trained: list[Any] = [*states, *(entry for entry in backend._frozen if entry.parameter.grad is not None)]
    tensors = [tensor for entry in states for tensor in (entry.master, entry.exp_avg, entry.exp_avg_sq)]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    return {
        "states": len(states),
        "notAdapters": [entry.name for entry in trained if ".lora_" not in entry.name],
        "frozen": sorted({str(entry.parameter.dtype) for entry in backend._frozen}),
        "unchanged": all(torch.equal(old, entry.parameter) for old, entry in zip(before, backend._frozen, strict=True)),
    }


PROGRAMS = {
    "agree": agree,
    "evaluate": evaluate,
    "frozen": describe_frozen_base,
    "nonfinite": step_with_nan,
    "reload": reload,
}
