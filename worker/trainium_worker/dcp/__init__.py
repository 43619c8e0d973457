"""Save to and load from the memory of the nodes with torch.distributed.checkpoint (DCP).

    reader = MemoryReader(durable="/checkpoints/run/step-{step}")     # all ranks, after init_process_group
    if reader.step is not None:
        dcp.load(state, storage_reader=reader)
    saving = None
    for step in range((reader.step or 0) + 1, last + 1):
        compute_gradients(step)
        if saving is not None:
            saving.result()                                          # so at most one step is lost
        optimizer.step()
        saving = dcp.async_save(state, storage_writer=MemoryWriter(step), process_group=gloo_group)

A save needs memory for two snapshots of each rank's part, and as much for the copies of another node's ranks.

Guarantees:
- A save is complete, and `async_save` ends, when all ranks have their part and its copy on another node, if there is
  one. A save never overwrites the newest complete one.
- All ranks of `MemoryReader` select the newest step of which every part is complete on some node, or a newer one on
  storage. The number of ranks may differ from that of the save.
- If the memory has no space for a save on some rank, no rank keeps it or a later one, a notice reports it, and training
  continues.
- Without an agent nothing is kept unless a `directory` is given.

A save passes `saver` (which steps are copied), `writer` (by the plan of DCP) or `repeated` (without one), `commit`
(copies, and the outcome of all ranks) and `snapshots.files` (the file of a part). `just_in_time` writes a step only
when a rank fails. `session` has what the processes of an attempt share.
"""

from __future__ import annotations

from trainium_worker.dcp.reader import MemoryReader
from trainium_worker.dcp.writer import MemoryWriter

__all__ = ["MemoryReader", "MemoryWriter"]
