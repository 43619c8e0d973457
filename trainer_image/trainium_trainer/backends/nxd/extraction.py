"""Compile backend Nxd's graphs ahead of a run: the command, and the ranks with different graphs.

With ZeRO-1 a data-parallel rank holds a chunk of rows of every parameter. If several tensor-parallel ranks hold some of
these rows (key and value heads with more ranks than heads, an adapter's whole matrix), the sum of squares divides by
their number, and number and rows are constants of the graph. Such data-parallel ranks have separate graphs.

Guarantees:
- The functions with which the store divides (`list_norm_terms`, `find_shared_rows`) decide it, so no rank with
  different graphs is missed.
- The module imports neither torch nor NxD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_trainer.backends.nxd.layout.parameter_names import Projections, list_parameters
from trainium_trainer.backends.nxd.layout.pieces import TensorRank, find_shared_rows, list_norm_terms
from trainium_trainer.backends.nxd.limits import SCATTERED, check_node_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_trainer.backends.nxd.layout.pieces import Piece
    from trainium_trainer.configuration.config import Settings

TOOL = "neuron_parallel_compile"
"""The tool of torch-neuronx that extracts the graphs of a program and compiles them."""


def build_tool_command(program: Sequence[str], scratch: str) -> list[str]:
    """Return the command line that extracts a program's graphs; `scratch` is a folder for it alone."""
    # The tool first removes its folder, by default the user's.
    return [TOOL, "--parallel_compile_workdir", f"{scratch}/graphs", *program]


def build_environment(rank: int, world: int, local_world: int) -> dict[str, str]:
    """Return the launcher's variables for torch-xla and the Neuron plug-in; with a file store, because no peer runs."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(local_world),  # NxD creates its groups by it
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "PJRT_DEVICE": "NEURON",
        "XLA_USE_DUMMY_STORE": "1",
        "TORCH_DIST_INIT_BARRIER": "0",
    }


def compute_tensor_rank_stride(settings: Settings) -> int:
    """Return the distance between the ranks of a tensor-parallel group in NxD on trn1. Raises UserError."""
    check_node_size(settings.config, settings.launch.local_world_size)
    return settings.launch.local_world_size // SCATTERED if settings.config.parallelism.tensor == SCATTERED else 1


def find_ranks_with_distinct_graphs(settings: Settings) -> tuple[int, ...]:
    """Return the first data-parallel rank of each distinct graph on backend Nxd; rank 0 comes first."""
    config, size = settings.config, settings.dp_size
    if size == 1 or config.data_parallel is DataParallelMode.REPLICATED:
        return (0,)
    rank, width = TensorRank(settings.shape, 0, config.parallelism.tensor), config.tuning.lora.rank
    names: Iterable[str] = settings.trainable.sizes
    if not config.tuning.freezes:
        names = list_parameters(settings.shape, Projections.FUSED)
    # Layers are equal, so the set is small.
    parameters = {
        rank.find_pieces(name, adapter_rank=width) for name in {_replace_layer_by_first(name) for name in names}
    }
    ordered = sorted(parameters, key=lambda pieces: pieces[0].name)
    kinds: dict[object, int] = {}
    for number in range(size):
        rank_pieces = [_clip_to_rank(pieces, number, size) for pieces in ordered]
        sums = tuple(list_norm_terms(pieces) for pieces in rank_pieces)
        shared = (
            tuple(find_shared_rows(pieces, rank.size) for pieces in rank_pieces)
            if config.precision.has_bfloat16_state
            else ()
        )
        kinds.setdefault((sums, shared), number)
    return tuple(kinds.values())


def _clip_to_rank(pieces: tuple[Piece, ...], number: int, size: int) -> tuple[Piece, ...]:
    """Return the rows of a parameter on one of `size` data-parallel ranks: equal chunks, the last ones padded."""
    rows = -(-sum(piece.sizes[0] for piece in pieces) // size)
    overlaps = (piece.within(number * rows, (number + 1) * rows) for piece in pieces)
    return tuple(piece for piece in overlaps if piece is not None)


def _replace_layer_by_first(name: str) -> str:
    """Return the same parameter of the first layer."""
    parts = name.split(".")
    return ".".join([*parts[:2], "0", *parts[3:]]) if parts[1] == "layers" else name
