"""Read ConfigMaps and Secrets as bytes by key, and select keys for volumes.

Guarantees:
- Modes are plain permission bits.
- A key in `items` that the object lacks is an error unless the source is optional.
"""

import base64
from dataclasses import dataclass

from trainium_devcluster.node.api.objects import Json

DEFAULT_MODE = 0o644


class MissingKeyError(Exception):
    """A volume names a key that its ConfigMap or Secret does not have."""


@dataclass(frozen=True, slots=True)
class ProjectedFile:
    """A file of a volume: content and permission bits."""

    data: bytes
    mode: int = DEFAULT_MODE


def decode_data(obj: Json, plural: str) -> dict[str, bytes]:
    """Return the values of a ConfigMap or Secret by key."""
    if plural == "secrets":
        return {key: base64.b64decode(value) for key, value in (obj.get("data") or {}).items()}
    values = {key: value.encode() for key, value in (obj.get("data") or {}).items()}
    return values | {key: base64.b64decode(value) for key, value in (obj.get("binaryData") or {}).items()}


def project_keys(
    values: dict[str, bytes], items: list[Json] | None, mode: int, optional: bool, what: str
) -> dict[str, ProjectedFile]:
    """Return the files, by relative path, that a volume source creates from `values`.

    Raises:
        MissingKeyError: when `items` names a key that is not there.
    """
    if not items:
        return {key: ProjectedFile(value, mode) for key, value in values.items()}
    files: dict[str, ProjectedFile] = {}
    for item in items:
        if item["key"] in values:
            files[item["path"]] = ProjectedFile(values[item["key"]], item.get("mode") or mode)
        elif not optional:
            raise MissingKeyError(f"{what} references non-existent config key: {item['key']}")
    return files
