"""The compilation of backend Nxd's graphs ahead of a run: its program, and the ranks with different graphs.

A data-parallel rank has its own where its rows of the state are counted apart. With ZeRO-1 it holds a run of rows of
every parameter; where some of these rows are on several tensor-parallel ranks (key and value heads with more ranks than
heads, an adapter's whole matrix), the sum of squares divides by how many, and that number and its rows are constants of
the graph.

Guarantees:
- It is decided by the functions that the store itself cuts with (`norm_terms`, `shared_rows`), so a rank whose graphs
  differ cannot be missed.
- No torch, no NxD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_trainer.backends.nxd.layout.parameter_names import Projections, parameters_of
from trainium_trainer.backends.nxd.layout.pieces import TensorRank, norm_terms, shared_rows
from trainium_trainer.backends.nxd.limits import SCATTERED, check_node_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_trainer.backends.nxd.layout.pieces import Piece
    from trainium_trainer.configuration.config import Settings

TOOL = "neuron_parallel_compile"
"""Of torch-neuronx: extracts the graphs of the program that it is given, and has them compiled."""


def tool_command(program: Sequence[str], scratch: str) -> list[str]:
    """Return the command line that extracts a program's graphs; `scratch` is a folder for it alone."""
    # The tool begins by removing its folder, which is that of the user unless another is given.
    return [TOOL, "--parallel_compile_workdir", f"{scratch}/graphs", *program]


def environment(rank: int, world: int, local_world: int) -> dict[str, str]:
    """Return what torch-xla and the Neuron plug-in ask of a launcher; a store without sockets, since nobody answers."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(local_world),  # NxD makes its groups by it
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "PJRT_DEVICE": "NEURON",
        "XLA_USE_DUMMY_STORE": "1",
        "TORCH_DIST_INIT_BARRIER": "0",
    }


def ranks_apart(settings: Settings) -> int:
    """Distance between the ranks of a tensor-parallel group, as NxD makes them on trn1. Raises UserError."""
    check_node_size(settings.config, settings.launch.local_world_size)
    return settings.launch.local_world_size // SCATTERED if settings.config.parallelism.tensor == SCATTERED else 1


def data_ranks(settings: Settings) -> tuple[int, ...]:
    """Return the first data-parallel rank of each kind on backend Nxd, 0 always the first of them."""
    config, size = settings.config, settings.dp_size
    if size == 1 or config.data_parallel is DataParallelMode.REPLICATED:
        return (0,)
    rank, width = TensorRank(settings.shape, 0, config.parallelism.tensor), config.tuning.lora.rank
    names: Iterable[str] = settings.choice.sizes
    if not config.tuning.freezes:
        names = parameters_of(settings.shape, Projections.FUSED)
    # Layers are alike, so a set is small.
    parameters = {rank.pieces(name, adapter_rank=width) for name in {_of_one_layer(name) for name in names}}
    ordered = sorted(parameters, key=lambda pieces: pieces[0].name)
    kinds: dict[object, int] = {}
    for number in range(size):
        held = [_run(pieces, number, size) for pieces in ordered]
        sums = tuple(norm_terms(pieces) for pieces in held)
        shared = tuple(shared_rows(pieces, rank.size) for pieces in held) if config.precision.keeps_half else ()
        kinds.setdefault((sums, shared), number)
    return tuple(kinds.values())


def _run(pieces: tuple[Piece, ...], number: int, size: int) -> tuple[Piece, ...]:
    """Return what one of `size` data-parallel ranks holds of a parameter: equal runs of rows, the last ones padded."""
    rows = -(-sum(piece.sizes[0] for piece in pieces) // size)
    found = (piece.within(number * rows, (number + 1) * rows) for piece in pieces)
    return tuple(piece for piece in found if piece is not None)


def _of_one_layer(name: str) -> str:
    """Return the same parameter of the first layer."""
    parts = name.split(".")
    return ".".join([*parts[:2], "0", *parts[3:]]) if parts[1] == "layers" else name
