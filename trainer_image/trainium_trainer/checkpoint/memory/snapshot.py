"""The snapshots of this trainer's shards: files of `trainium_worker.snapshot` whose headers name shard and position."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.claims import Claim, Moment, ShardKey
from trainium_worker import snapshot
from trainium_worker.snapshot import HEADER_BYTES, DamagedSnapshotError, checksum

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Header:
    """The identity of a snapshot and the size of its payload."""

    claim: Claim
    config_digest: str
    payload_bytes: int

    def to_text(self) -> bytes:
        """Return the text of the header page."""
        moment, key = self.claim.moment, self.claim.key
        return json.dumps(
            {
                "step": moment.position.step,
                "samples": moment.position.samples,
                "tokens": moment.position.tokens,
                "loss": moment.position.loss,
                "gradNorm": moment.position.grad_norm,
                "batch": moment.position.batch,
                "generation": moment.generation,
                "session": moment.session,
                "key": [key.tp_rank, key.tp_size, key.dp_rank, key.dp_size, key.pp_rank, key.pp_size],
                "layout": self.claim.layout,
                "checksum": self.claim.checksum,
                "config": self.config_digest,
                "payloadBytes": self.payload_bytes,
            }
        ).encode()

    @staticmethod
    def from_text(text: bytes, name: str) -> Header:
        """Return the reverse. DamagedSnapshotError for a text of another format."""
        try:
            raw: dict[str, Any] = json.loads(text)
            position = Position(
                step=raw["step"],
                samples=raw["samples"],
                tokens=raw["tokens"],
                loss=raw["loss"],
                grad_norm=raw["gradNorm"],
                batch=raw.get("batch"),
            )
            moment = Moment(position, raw["generation"], raw["session"])
            claim = Claim(moment, ShardKey(*raw["key"]), raw["layout"], raw["checksum"])
            return Header(claim, raw["config"], raw["payloadBytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedSnapshotError(f"{name}: the header is of another format") from error


def read_header(path: Path) -> Header | None:
    """Return the header of a finished snapshot, None for an unfinished one.

    DamagedSnapshotError when it is altered or cut.
    """
    found = snapshot.read_text(path)
    if found is None:
        return None
    text, payload_bytes = found
    header = Header.from_text(text, path.name)
    if payload_bytes != header.payload_bytes:
        raise DamagedSnapshotError(
            f"{path.name}: {HEADER_BYTES + payload_bytes} bytes where {HEADER_BYTES + header.payload_bytes} belong"
        )
    return header


class SnapshotFile(snapshot.SnapshotFile):
    """A snapshot file of a shard, open for writing."""

    def __init__(self, path: Path, payload_bytes: int, header: Header | None) -> None:
        super().__init__(path, payload_bytes)
        self.header = header

    @staticmethod
    def create(path: Path, payload_bytes: int) -> SnapshotFile:
        """Return a new, unfinished snapshot with all of its space reserved; OSError when there is no room."""
        snapshot.reserve(path, payload_bytes)
        return SnapshotFile(path, payload_bytes, None)

    def invalidate(self, path: Path) -> None:
        """Declare the file unfinished and give it the name of its next owner."""
        super().invalidate(path)
        self.header = None

    def finalize(self, moment: Moment, key: ShardKey, layout: str, config_digest: str) -> Claim:
        """Sum the payload and declare the file finished."""
        claim = Claim(moment, key, layout, checksum(self.payload))
        header = Header(claim, config_digest, self.payload_bytes)
        self.write_header(header.to_text())
        self.header = header
        return claim
