"""Compute legal sizes and batches; pure functions that the CRD's rules, the planner and the trainer share.

A size is a number of nodes. World = nodes x cores per node; data-parallel degree = world / group, where a group is
tensor x pipeline x context ranks, which train on the same samples. Nodes that are placed together (an UltraServer)
come and go together, so a size is a multiple of their number. The global batch is the same at every size; the
number of micro-batches that a rank computes in a step (`passes`) changes. If they do not divide evenly, some rows of
some ranks' last micro-batches are empty, or, within an optional tolerance, a step has a few samples more or fewer. A
size is legal if the world is divisible by the group and, under the rule `Even`, the global batch leaves no row empty.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_ROLES = 6
"""A Workload of Kueue has 8 pod sets, of which workers and spares use 2."""
MAX_ROLE_REPLICAS = 512
"""Pods of one role."""
MAX_COMPILED = 64
"""Maximum number of sizes that are compiled in the background and recorded."""
_MILLION = 1_000_000


class SizeRule(StrEnum):
    """Which sizes a job may have."""

    ANY = "Any"
    """Every size; if the global batch does not divide evenly, the last pass of some ranks is partly empty."""
    EVEN = "Even"
    """Only sizes at which the global batch is divisible by data parallel x micro-batch."""


def count_micro_batches(global_size: int, micro_size: int, data_parallel: int) -> int:
    """Return the micro-batches of one step on each data-parallel rank."""
    return -(-global_size // (micro_size * data_parallel))


def compute_step_batch_size(global_size: int, micro_size: int, data_parallel: int, tolerance: float = 0.0) -> int:
    """Return the samples of one step: the nearest number without an empty row, if within the tolerance.

    Otherwise the global batch. The tolerance is a share; of two equally near numbers the smaller is used.
    """
    rows = micro_size * data_parallel
    nearest = max(1, -((rows - 2 * global_size) // (2 * rows))) * rows
    # In whole millionths, because a share such as 0.29 is not exact.
    within = abs(nearest - global_size) * _MILLION <= round(tolerance * _MILLION) * global_size
    return nearest if within else global_size


def order_by_likelihood(sizes: Collection[int], present: int) -> tuple[int, ...]:
    """Return sizes in the order in which a job on `present` nodes may need them.

    First those after the loss of one node, two, four, eight and so on, a rack among them; then the nearest.
    """
    losses = (1 << doubled for doubled in range(present.bit_length()))
    sizes_after_loss = (
        max((size for size in sizes if size <= present - lost_nodes), default=None) for lost_nodes in losses
    )
    nearest = sorted(sizes, key=lambda nodes: (abs(nodes - present), nodes))
    return tuple(dict.fromkeys([*(size for size in sizes_after_loss if size is not None), *nearest]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Inputs of the size arithmetic; all counts are >= 1, the tolerance is 0 to 0.5."""

    cores_per_node: int
    tensor: int
    pipeline: int
    context: int = 1
    global_batch_size: int
    """0 if unknown: a step has one micro-batch on each rank, so the batch follows the size."""
    micro_batch_size: int
    rule: SizeRule = SizeRule.ANY
    tolerance: float = 0.0
    """Share of the global batch by which that of a step may differ."""
    unit_nodes: int = 1
    """Nodes of a unit; a size is a multiple of it."""

    @property
    def group(self) -> int:
        """Ranks that train on the same samples."""
        return self.tensor * self.pipeline * self.context

    def data_parallel(self, nodes: int) -> int:
        """Return the data-parallel degree at `nodes` nodes; 0 if the world is not divisible by the group."""
        world = nodes * self.cores_per_node
        return 0 if world % self.group else world // self.group

    def micro_batches(self, nodes: int) -> int:
        """Return the micro-batches per optimizer step and data-parallel rank; 0 if the size is not legal."""
        if not self.is_legal(nodes):
            return 0
        return count_micro_batches(self.batch(nodes), self.micro_batch_size, self.data_parallel(nodes))

    def batch(self, nodes: int) -> int:
        """Return the samples of a step over all ranks; 0 when the size is not legal."""
        if not self.is_legal(nodes):
            return 0
        if not self.global_batch_size:
            return self.data_parallel(nodes) * self.micro_batch_size
        return compute_step_batch_size(
            self.global_batch_size, self.micro_batch_size, self.data_parallel(nodes), self.tolerance
        )

    def is_legal(self, nodes: int) -> bool:
        """Return whether a job of this shape can train on `nodes` nodes."""
        samples = self.data_parallel(nodes) * self.micro_batch_size
        if nodes < 1 or samples == 0 or nodes % self.unit_nodes:
            return False
        if not self.global_batch_size:
            return True
        if self.micro_batch_size > self.global_batch_size:
            return False
        return self.rule is SizeRule.ANY or self.global_batch_size % samples == 0

    def legal_sizes(self, smallest: int, largest: int) -> tuple[int, ...]:
        """Return every legal size in [smallest, largest], ascending; empty when there is none."""
        return tuple(nodes for nodes in range(max(1, smallest), largest + 1) if self.is_legal(nodes))

    def floor(self, nodes: int, smallest: int = 1) -> int:
        """Return the largest legal size <= nodes and >= smallest; 0 when there is none."""
        return next((size for size in range(nodes, max(1, smallest) - 1, -1) if self.is_legal(size)), 0)

    def best(self, nodes: int, smallest: int = 1) -> int:
        """Return the legal size <= nodes and >= smallest with the most samples a pass; of several the smallest.

        With one batch at every size it is the one with the fewest passes; more nodes would save no time. 0 if there is
        none.
        """
        if self.tolerance:
            return _find_best_with_tolerance(self, nodes, smallest)
        largest = self.floor(nodes, smallest)
        # Fewer nodes of an even size always need one more pass.
        return (
            self._find_least_size(self.micro_batches(largest), smallest)
            if largest and self.rule is SizeRule.ANY
            else largest
        )

    def useful_sizes(self, smallest: int, largest: int) -> tuple[int, ...]:
        """Return the legal sizes in [smallest, largest] that are the `best` of some number of nodes, ascending."""
        if self.rule is SizeRule.EVEN or self.micro_batch_size > self.global_batch_size:
            return self.legal_sizes(smallest, largest)
        if self.tolerance:
            return _list_useful_sizes_with_tolerance(self, smallest, largest)
        sizes: list[int] = []
        size = self._round_up_to_units(smallest)
        while size <= largest:
            sizes.append(size)
            if self.micro_batches(size) == 1:
                break
            size = self._find_least_size(self.micro_batches(size) - 1, smallest)
        return tuple(sizes)

    def speed(self, nodes: int, full: int) -> float:
        """Return the samples per time at `nodes` nodes relative to `full` nodes; both are legal.

        The duration of a step follows from its passes.
        """
        return self.batch(nodes) * self.micro_batches(full) / (self.batch(full) * self.micro_batches(nodes))

    def fill_ratio(self, nodes: int) -> float:
        """Return the share of the rows of a step that hold a sample, at a legal size."""
        rows = self.micro_batches(nodes) * self.data_parallel(nodes) * self.micro_batch_size
        return self.batch(nodes) / rows

    def idle_ranks(self, nodes: int) -> int:
        """Return how many data-parallel ranks never have a sample at a legal size (the batch is smaller)."""
        return max(0, self.data_parallel(nodes) - self.batch(nodes))

    def _find_least_size(self, most_passes: int, smallest: int) -> int:
        """Return the smallest size >= smallest that needs at most this many passes."""
        replicas = count_micro_batches(self.global_batch_size, self.micro_batch_size, most_passes)
        return self._round_up_to_units(max(smallest, -(-replicas * self.group // self.cores_per_node)))

    def _round_up_to_units(self, smallest: int) -> int:
        """Return the smallest size >= smallest of whole units whose world is whole model-parallel groups."""
        step = math.lcm(self.unit_nodes, self.group // math.gcd(self.group, self.cores_per_node))
        return -(-max(1, smallest) // step) * step


@functools.lru_cache(maxsize=1024)  # cached: a plan asks for the same few repeatedly
def _find_best_with_tolerance(shape: BatchShape, nodes: int, smallest: int) -> int:
    """Return `BatchShape.best` of a shape with a tolerance, where more nodes may be slower than fewer."""
    best = 0
    for size in reversed(shape.legal_sizes(smallest, nodes)):
        # No rank computes more in a pass than a micro-batch, so a smaller size cannot be faster.
        rows = shape.data_parallel(size) * shape.micro_batch_size
        if best and rows * shape.micro_batches(best) < shape.batch(best):
            break
        if not best or shape.speed(size, best) >= 1:
            best = size
    return best


@functools.lru_cache(maxsize=64)
def _list_useful_sizes_with_tolerance(shape: BatchShape, smallest: int, largest: int) -> tuple[int, ...]:
    """Return `BatchShape.useful_sizes` of a shape with a tolerance."""
    sizes: list[int] = []
    for size in shape.legal_sizes(smallest, largest):
        if not sizes or shape.speed(size, sizes[-1]) > 1:
            sizes.append(size)
    return tuple(sizes)
