"""Open text that is tokenized while training; the streams are in `lanes` and `streaming`.

Guarantees:
- Nothing is tokenised here but what validation needs.
- The blocks of a source are listed once per machine, in a file that all its processes map.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_contract.trainer.data import DataConfig, ValidationSplit
from trainium_trainer.data.batches.samples import SampleRules, TextPart
from trainium_trainer.data.online.lanes import LanePlan, LaneSource
from trainium_trainer.data.prepared.build import HeldBack, hold_lock
from trainium_trainer.data.prepared.origins import Origin, TextTokenizer, open_held_back
from trainium_trainer.data.prepared.prepared import Prepared, Selection, Stretch
from trainium_trainer.data.tokens.encoding import list_blocks
from trainium_trainer.data.tokens.tokenizer import digest_of, end_facts
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


_SMALLEST_BLOCK, _LARGEST_BLOCK = 64 << 10, 4 << 20
_BLOCKS_PER_LANE = 16
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Streams:
    """Text to train on while it is tokenised."""

    plan: LanePlan
    rules: SampleRules
    workers: int
    max_bad_lines: int | None
    identity: str
    """Digest of what the tokens of a block depend on."""

    @property
    def name(self) -> str:
        """The sources, for sentences."""
        return ", ".join(source.spec.name for source in self.plan.sources)

    @property
    def epoch_samples(self) -> None:
        """Unknown: nothing is counted ahead."""
        return

    def numbers(self, position: int, count: int) -> list[int]:
        """Return the numbers of samples position .. position + count - 1: here their places in the run."""
        return list(range(position, position + count))


def open_streams(
    config: DataConfig,
    origins: Sequence[Origin],
    tokenizer: TextTokenizer,
    cache: Path,
    rules: SampleRules,
    global_size: int,
) -> tuple[Streams, list[TextPart], dict[str, Any]]:
    """Return the streams, what is held back of the sources, and the facts that the samples follow from.

    Raises UserError or StorageError.
    """
    held = config.validation
    fraction = held.fraction if held is not None else None
    by_hash = held is not None and held.split is ValidationSplit.DOCUMENT_HASH
    sources, parts, facts = [], [], []
    for origin in origins:
        source, identity = _source(origin, global_size, cache)
        facts.append([identity, source.blocks])
        if held is not None and fraction is not None:
            kept = source.blocks if by_hash else int(source.blocks * (1 - fraction))
            if not kept or (kept == source.blocks and not by_hash):
                raise UserError(
                    f"data.source {origin.spec.name}: is too small to hold back its end while it is tokenised online: "
                    "set data.tokenization to Ahead"
                )
            enough = (held.samples + 1) * config.sequence_length + 1
            parts.append(
                _held_back(config, origin, source, kept, fraction if by_hash else None, enough, tokenizer, cache)
            )
            source = replace(source, blocks=kept)
        sources.append(source)
    plan = LanePlan(
        sources=tuple(sources),
        tokenizer=str(tokenizer.file),
        lanes=global_size,
        sequence_length=config.sequence_length,
        seed=config.seed,
        held_back=fraction if by_hash else None,
        beginning=tokenizer.beginning,
    )
    known: dict[str, Any] = {
        "blocks": facts,
        "heldBack": plan.held_back,
        "tokenizer": digest_of(tokenizer.file),
        "format": _FORMAT,
    }
    known |= end_facts(tokenizer.file)
    if begins := tokenizer.beginning.facts():
        known["bos"] = begins
    identity = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    streams = Streams(plan, rules, config.workers or 1, config.max_bad_lines, identity)
    return streams, parts, {"online": known, "lanes": global_size}


def _source(origin: Origin, lanes: int, cache: Path) -> tuple[LaneSource, str]:
    """Return a source in blocks, and its identity."""
    if origin.prepared is not None:
        prepared = Prepared(origin.prepared)
        source = LaneSource(origin.spec, origin.weight, str(origin.prepared), None, len(prepared.batch_tokens))
        return source, prepared.manifest.identity
    text = origin.spec.source
    target = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, text.size // (_BLOCKS_PER_LANE * lanes)))
    identity = f"{text.identity(cache)}-{target}"
    table = _table(origin, identity, target, cache)
    blocks = len(np.load(table, mmap_mode="r"))
    if not blocks:
        raise UserError(f"data.source {origin.spec.name}: holds no text: give a source with text in it")
    return LaneSource(origin.spec, origin.weight, None, str(table), blocks), identity


def _table(origin: Origin, identity: str, target: int, cache: Path) -> Path:
    """Return a file with the blocks of a text."""
    file = cache / f"blocks-{hashlib.sha256(f'{_FORMAT}-{identity}'.encode()).hexdigest()[:32]}.npy"
    if file.exists():
        return file
    with hold_lock(cache / f".{file.name}.lock"):
        if not file.exists():
            with Workers(1) as workers:
                blocks = workers.call(list_blocks, origin.spec, target)
            rows = [(block.file, block.start, block.end, block.size) for block in blocks]
            temporary = file.with_suffix(".tmp")
            with temporary.open("wb") as stream:
                np.save(stream, np.array(rows, np.int64).reshape(-1, 4))
            temporary.replace(file)
    return file


def _held_back(
    config: DataConfig,
    origin: Origin,
    source: LaneSource,
    kept: int,
    fraction: float | None,
    enough: int,
    tokenizer: TextTokenizer,
    cache: Path,
) -> TextPart:
    """Return the part of a source that is held back, or the beginning of that part."""
    name = origin.spec.name
    if origin.prepared is not None:
        prepared = Prepared(origin.prepared)
        if fraction is not None:
            return TextPart(name, Selection(prepared, fraction, validation=True, memo=cache))
        return TextPart(name, Stretch(prepared, int(prepared.ends[kept - 1]), prepared.tokens))
    assert source.table is not None
    held = HeldBack(fraction, enough, source.table, 0 if fraction is not None else kept)
    return TextPart(name, open_held_back(config, origin, tokenizer, held, cache))
