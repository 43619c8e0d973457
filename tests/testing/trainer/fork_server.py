"""The process from which tests fork processes that need torch or Arrow: it has imported both, once in each test lane.

There is one in a process of tests, and it imports its modules before its first use: so all users have the same ones.
"""

from __future__ import annotations

import multiprocessing

_IMPORTED = (
    "torch._dynamo",  # what the first DTensor imports
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "pyarrow",
    "tokenizers",
    "tests.testing.trainer.forked_workers",
    "trainium_trainer.artifacts.export",
    "trainium_trainer.artifacts.stage",
    "trainium_trainer.checkpoint.format.shards",
    "trainium_trainer.cli",
    "trainium_trainer.data.examples.store",
    "trainium_trainer.data.online.streams",
    "trainium_trainer.data.prepared.build",
    "trainium_worker.dcp",
)


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Return its context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    return context
