"""The process from which tests fork processes that need torch or Arrow: it has imported both, once in each test lane.

There is one in a process of tests, and it imports the given modules before its first use: the first user must name
the modules that all others need.
"""

from __future__ import annotations

import multiprocessing

_IMPORTED = (
    "torch._dynamo",  # what the first DTensor imports
    "torch.distributed.tensor",
    "trainium_trainer.checkpoint.format.shards",
    "pyarrow",
    "tokenizers",
    "trainium_trainer.data.examples.store",
    "trainium_trainer.data.online.streams",
    "trainium_trainer.data.prepared.build",
)


def fork_context(*more: str) -> multiprocessing.context.ForkServerContext:
    """Its context; `more` modules are imported where nothing was forked before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *more])
    return context
