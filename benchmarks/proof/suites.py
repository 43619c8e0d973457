"""PURE. The suites of the proof: pretraining, with batches that come out even or not, and the tuning of a given base.

The tuning goes on with what follows its last step.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.proof.families import Family, Layout, Suite
from benchmarks.proof.strike import Point
from trainium_contract.trainer.parallelism import DataParallelMode

_SHARDED, _ZERO1 = DataParallelMode.FULLY_SHARDED, DataParallelMode.SHARDED_OPTIMIZER
_PRETRAINING = (
    Family("process", "a process is lost, all restart from memory", (Layout(2), Layout(2))),
    Family(
        "node", "a node is lost, its shard comes from its buddy", (Layout(3, mode=_SHARDED),) * 2, node_is_lost=True
    ),
    Family("wide", "a node of a model wider than a node is lost", (Layout(1, tp=2),) * 2, node_is_lost=True),
    Family(
        "resize",
        "each time a node is lost and the size changes",
        (Layout(4), Layout(2), Layout(3), Layout(4)),
        node_is_lost=True,
    ),
    Family(
        "reshard",
        "all memory is lost, storage is read at another data-parallel size",
        (Layout(4, mode=_SHARDED), Layout(2, mode=_ZERO1), Layout(3, mode=_SHARDED), Layout(4)),
        memory=False,
    ),
    Family(
        "retensor",
        "all memory is lost, storage is read at another tensor-parallel size",
        (Layout(1, tp=2), Layout(2), Layout(2, tp=2, mode=_SHARDED)),
        memory=False,
    ),
    Family(
        "nxd",
        "all is lost but the checkpoint, which goes through NxD's layout (tp 2, ZeRO-1 over 3) and back",
        (Layout(2), Layout(2)),
        memory=False,
        through_nxd=True,
    ),
)
_LIVES_AT_UNEVEN_SIZES = {
    "process": (Layout(3), Layout(3)),
    "node": (Layout(4, mode=_SHARDED),) * 2,
    "wide": (Layout(2, tp=2),) * 2,
    "idle": (Layout(6, mode=_ZERO1),) * 2,
    "resize": (Layout(4), Layout(3), Layout(2), Layout(4)),
    "reshard": (Layout(4, mode=_SHARDED), Layout(3, mode=_ZERO1), Layout(2, mode=_SHARDED), Layout(6)),
    "retensor": (Layout(2, tp=2), Layout(3), Layout(2, tp=2, mode=_SHARDED)),
}
_KINDS = {family.name: family for family in _PRETRAINING} | {
    "idle": Family("idle", "a process is lost where one rank has no sample at all", ())
}
_UNEVEN = tuple(replace(_KINDS[name], lives=lives) for name, lives in _LIVES_AT_UNEVEN_SIZES.items())
_TUNING = (
    Family("process", "a process is lost, all restart from memory", (Layout(2), Layout(2))),
    Family(
        "node", "a node is lost, its shard comes from its buddy", (Layout(3, mode=_SHARDED),) * 2, node_is_lost=True
    ),
    Family("wide", "a node of a model wider than a node is lost", (Layout(1, tp=2),) * 2, node_is_lost=True),
    Family(
        "resize", "each time a node is lost and the size changes", (Layout(4), Layout(2), Layout(3)), node_is_lost=True
    ),
    Family(
        "storage",
        "all memory is lost, storage is read at the same size; artifacts at milestones",
        (Layout(2),) * 3,
        memory=False,
        milestones=True,
    ),
    Family(
        "reshard",
        "all memory is lost, storage is read at another size",
        (Layout(4, mode=_SHARDED), Layout(1, tp=2), Layout(3, mode=_ZERO1)),
        memory=False,
    ),
)

PRETRAINING = Suite(
    name="pretraining",
    families=_PRETRAINING,
    passes={
        Point.STEP: (1, 9),
        Point.STAGING: (3, 24),
        Point.WRITING: (0, 2),
        Point.COMMIT: (0, 2),
        Point.LOAD: (0, 1),
    },
    passes_without_memory={Point.STAGING: (0, 2)},
    steps=20,
    global_batch=12,
    save_every=4,
)
UNEVEN = replace(PRETRAINING, name="uneven", families=_UNEVEN, global_batch=5)
"""Five samples of one a rank and pass: none of the sizes divides them, and with six ranks one has nothing to do."""
TUNING = Suite(
    name="tuning",
    families=_TUNING,
    passes={
        Point.STEP: (1, 6),
        Point.STAGING: (1, 12),
        Point.WRITING: (0, 2),
        Point.COMMIT: (0, 2),
        Point.LOAD: (0, 1),
        Point.EXPORT: (0, 0),  # they count by themselves: each place in them is passed another number of times
        Point.EVALUATE: (0, 0),
    },
    passes_without_memory={Point.STEP: (3, 7), Point.STAGING: (0, 2)},
    steps=15,
    global_batch=12,
    save_every=4,
    tunes=True,
)
