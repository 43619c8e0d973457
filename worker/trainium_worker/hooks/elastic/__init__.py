"""Make `transformers.Trainer` and its descendants elastic: the same steps at any number of processes.

    from trainium_worker.hooks.transformers import elastic

    trainer = elastic(SFTTrainer(...))
    trainer.train()

Guarantees:
- **Batch:** a step has the same number of samples at any number of processes, and its loss is that of the whole batch.
- **Samples:** those of a step are a function of the seed and of its position. An epoch has each sample once.
- **Random numbers:** those of a step are a function of the seed, the step and the rank.
- **State:** a failed rank costs at most one step (`trainium_worker.memory`). The trainer's own checkpoints on storage
  appear complete or not at all. `train` resumes from the newest state that all ranks can read.
- **Stop:** when the job requests one, all ranks save after the same step and exit with `STOPPED`.
- Without an agent, all of this holds with the checkpoints on storage only.
"""

from trainium_worker.hooks.elastic.trainer import elastic

__all__ = ["elastic"]
