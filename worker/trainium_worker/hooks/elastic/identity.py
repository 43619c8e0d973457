"""Compare what must be equal in each start of a run, and refuse a state of another run."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trainium_worker.data import MicroBatch

if TYPE_CHECKING:
    from trainium_worker.hooks.elastic.samples import Samples, TrainerSampler

_FINGERPRINT_SAMPLES = 8
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class Identity:
    """The values that each start of a run has."""

    output_dir: str
    seed: int
    samples: int
    """The samples of an epoch."""
    fingerprint: str
    """A hash of some samples and of the order."""
    rank_batch: int
    """The samples of a step on one rank, by the arguments of the script."""
    global_batch: int
    """The samples of a step over all ranks."""
    transformers: str
    """The version of transformers that saved the state."""

    @classmethod
    def parse(cls, record: dict[str, Any], place: str) -> Identity:
        """Return the identity of a saved state; fields that this version does not know are dropped.

        Raises ValueError if the state was saved by another version of the library, which recorded something else.
        """
        try:
            return cls(**{field.name: record[field.name] for field in fields(cls)})
        except KeyError as missing:
            raise ValueError(
                f"{place} was saved by another version of trainium_worker: its record has no {missing}. Start with the "
                "version that the run had, or choose another output_dir"
            ) from None

    def check(self, saved: Identity, place: str) -> None:
        """Raise ValueError if a state is of another run."""
        for field, meaning in (
            ("seed", "seed (data_seed, else seed)"),
            ("rank_batch", "batch (per_device_train_batch_size * gradient_accumulation_steps)"),
            ("samples", "number of samples"),
            ("fingerprint", "data set: some of its samples, or their order, differ"),
        ):
            then, now = getattr(saved, field), getattr(self, field)
            if then != now:
                raise ValueError(
                    f"{place} is of a run with another {meaning}: {then} then, {now} now. Start with what the run had, "
                    f"or choose another output_dir than {self.output_dir}"
                )


def hash_samples(dataset: Samples, sampler: TrainerSampler) -> str:
    """Return a hash of some samples and of their order."""
    order, digest = sampler.order(0), hashlib.blake2b(digest_size=8)
    for number in range(_FINGERPRINT_SAMPLES):
        batch = MicroBatch([order[number * sampler.size // _FINGERPRINT_SAMPLES]])
        digest.update(_ADDRESS.sub("", repr(dataset.__getitems__(batch))).encode())
    return digest.hexdigest()
