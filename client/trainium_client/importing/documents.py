"""Read YAML documents from an input of unknown origin, within limits.

Guarantee: size, depth, aliases and the number of documents are checked on events of the parser, before any object is
built, so an input of a few bytes cannot expand to gigabytes.
"""

from __future__ import annotations

from typing import Any

import yaml

from trainium_contract.api_server.errors import ClientError

MAX_BYTES = 1 << 20
"""The API server's limit of an object is 1.5 MB of JSON."""
MAX_DEPTH = 64
MAX_DOCUMENTS = 64
MAX_ALIASES = 100
MAX_EXPANDED = 200_000
"""Nodes of all documents, with each alias counted as what it stands for."""


def decode_input(data: bytes, name: str) -> str:
    """Return the text of an input. Raises ClientError if it is too large or no text."""
    if len(data) > MAX_BYTES:
        raise ClientError(f"{name} has more than {MAX_BYTES} bytes: give only the job and its runtime")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ClientError(f"{name} is not UTF-8 text: give a manifest, a script or a command") from None


def parse_documents(text: str, name: str) -> list[dict[str, Any]]:
    """Return the objects of a stream of YAML or JSON, those of lists among them. Raises ClientError."""
    try:
        _check_limits(text, name)
        documents = list(yaml.load_all(text, _Loader))
    except yaml.MarkedYAMLError as error:
        # The full message quotes the line, which may hold a secret.
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ClientError(f"{name}{line} is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ClientError(f"{name} is not valid YAML: correct it") from None
    objects: list[dict[str, Any]] = []
    for document in documents:
        items = document.get("items") if isinstance(document, dict) else None
        if isinstance(items, list) and str(document.get("kind", "")).endswith("List"):
            objects += [item for item in items if isinstance(item, dict)]
        elif isinstance(document, dict):
            objects.append(document)
        elif document is not None:
            raise ClientError(f"{name} has a document that is no object: give manifests, a script or a command")
    return objects


class _Loader(yaml.SafeLoader):
    """A loader that leaves dates as text, as the API server does, and allows only keys that JSON can have."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse keys other than text."""
        mapping = super().construct_mapping(node, deep=deep)
        if not all(isinstance(key, str) for key in mapping):
            raise yaml.constructor.ConstructorError(None, None, "a key is no text: put it in quotes", node.start_mark)
        return mapping


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _check_limits(text: str, name: str) -> None:
    depth = aliases = documents = 0
    sizes: dict[str, int] = {}
    open_anchors: list[tuple[str, int]] = []
    expanded = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            sizes.clear()
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if any(anchor == event.anchor for anchor, _ in open_anchors):
                raise ClientError(f"{name} has an alias *{event.anchor} within what it stands for: remove it")
            expanded += sizes.get(event.anchor or "", 0)
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            expanded += 1
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                open_anchors.append((event.anchor or "", expanded))
            elif event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            anchor, start = open_anchors.pop()
            if anchor:
                sizes[anchor] = expanded - start + 1
        for value, limit, what in (
            (depth, MAX_DEPTH, "levels"),
            (aliases, MAX_ALIASES, "aliases"),
            (documents, MAX_DOCUMENTS, "documents"),
            (expanded, MAX_EXPANDED, "values"),
        ):
            if value > limit:
                raise ClientError(f"{name} has more than {limit} {what}: give only the job and its runtime")
