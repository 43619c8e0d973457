"""Checkpoints of format 2, as older versions wrote them: the index lists every part of every tensor."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.checkpoint_manifest import (
    BLOCK_BYTES,
    Commit,
    Manifest,
    ManifestFile,
    block_digest,
    digest_of,
    file_digest,
)
from trainium_trainer.checkpoint.format.shards import SAFETENSORS_TYPES, bytes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

_ATTEMPT = "g1-0123456789ab"


def write_old(
    root: Path,
    step: int,
    ranks: Sequence[Sequence[tuple[str, tuple[int, ...], torch.Tensor]]],
    shapes: Mapping[str, tuple[int, ...]],
    **manifest: Any,
) -> None:
    """Commit what each rank holds: names, offsets in the whole, values. `shapes` are those of the wholes."""
    folder = root / f"step-{step}" / _ATTEMPT
    folder.mkdir(parents=True)
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for rank, parts in enumerate(ranks):
        name = f"shard-{rank:05d}.safetensors"
        header: dict[str, Any] = {}
        payload = b""
        for tensor, offsets, values in sorted(parts, key=lambda part: -part[2].dtype.itemsize):
            key = tensor if values.shape == shapes[tensor] else f"{tensor}@{','.join(map(str, offsets))}"
            data = bytes(bytes_of(values))
            place = [len(payload), len(payload) + len(data)]
            dtype = SAFETENSORS_TYPES[values.dtype]
            header[key] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": place}
            entry = tensors.setdefault(tensor, {"dtype": dtype, "shape": list(shapes[tensor]), "parts": []})
            part = {"offsets": list(offsets), "sizes": list(values.shape), "file": name}
            entry["parts"].append(part | {"start": place[0], "bytes": len(data)})
            payload += data
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for entry in tensors.values():
            for part in entry["parts"]:
                part["start"] += (8 + len(text)) if part["file"] == name else 0
        data = len(text).to_bytes(8, "little") + text + payload
        blocks = [block_digest([data[at : at + BLOCK_BYTES]]) for at in range(0, len(data), BLOCK_BYTES)]
        files[name] = {"size": len(data), "blocks": blocks}
        (folder / name).write_bytes(data)
    index = json.dumps({"format": 2, "blockBytes": BLOCK_BYTES, "files": files, "tensors": tensors}).encode()
    (folder / "index.json").write_bytes(index)
    entries = [
        ManifestFile(name=name, size=file["size"], digest=file_digest(file["blocks"])) for name, file in files.items()
    ]
    entries.append(ManifestFile(name="index.json", size=len(index), digest=digest_of(index)))
    written = Manifest(
        format_version=2,
        step=step,
        samples=8 * step,
        tokens=1000 * step,
        generation=1,
        world_size=len(ranks),
        data_parallel=len(ranks),
        tensor_parallel=1,
        created=1.0,
        files=tuple(entries),
        **manifest,
    )
    text = written.model_dump_json(by_alias=True).encode()
    (folder / "manifest.json").write_bytes(text)
    receipt = Commit(format_version=2, step=step, folder=_ATTEMPT, manifest_digest=hashlib.sha256(text).hexdigest())
    (folder.parent / "COMMITTED").write_bytes(receipt.model_dump_json(by_alias=True).encode())
