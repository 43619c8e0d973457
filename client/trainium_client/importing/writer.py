"""Write an imported job as YAML with its comments."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from trainium_client.importing.convert import ImportedJob

_COLUMNS = 110
_NUMBER = re.compile(r"(?:[-+]?(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?|0o[0-7]+)$")
"""Text that Kubernetes reads as a number unless it is quoted. PyYAML reads YAML 1.1, in which `1e-3` is text."""


class _Dumper(yaml.SafeDumper):
    """Block style, keys in the order given, no anchors, texts of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature of the base class
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - the signature of the base class
        super().increase_indent(flow, indentless=False)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        """Put texts of several lines below each other."""
        has_lines = any(isinstance(item, str) and "\n" in item for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=False if has_lines else flow_style)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        """Put texts of several lines below each other."""
        is_long = any(isinstance(item, str) and "\n" in item for item in dict(mapping).values())
        return super().represent_mapping(tag, mapping, flow_style=False if is_long else flow_style)


class _Block(dict[str, Any]):
    """An object whose fields are below each other."""


def _represent_block(dumper: yaml.SafeDumper, value: _Block) -> yaml.MappingNode:
    return dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text and all(line == line.rstrip() for line in text.split("\n")) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(_Block, _represent_block)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def write_job(job: ImportedJob, source: str) -> str:
    """Return the manifest; `source` names the input in the first line."""
    lines = _format_comment(f"Imported from {source}.", "")
    if job.header:
        lines += ["#", "# Not imported, or decided by the operator:"]
        for text in job.header:
            lines += _format_comment(text, "", bullet="- ")
    return "\n".join([*lines, *_write_object(job.document, job.comments, "", "")]) + "\n"


def _write_object(value: dict[str, Any], comments: dict[str, list[str]], path: str, indent: str) -> list[str]:
    lines: list[str] = []
    for key, inner in value.items():
        place = f"{path}.{key}".lstrip(".")
        for text in comments.get(place, ()):
            lines += _format_comment(text, indent)
        if (
            isinstance(inner, dict)
            and inner
            and any(commented_path.startswith(f"{place}.") for commented_path in comments)
        ):
            lines += [f"{indent}{key}:", *_write_object(inner, comments, place, f"{indent}  ")]
        else:
            lines += _dump({key: inner}, indent)
    for commented_path, texts in comments.items():
        parent, _, name = commented_path.rpartition(".")
        if parent == path and name not in value:
            for text in texts:
                lines += _format_comment(text, indent)
    return lines


def _dump(value: dict[str, Any], indent: str) -> list[str]:
    """Return lines of YAML; lists and objects of plain values are on one line where they fit."""
    text = yaml.dump(
        _Block(value),
        Dumper=_Dumper,
        default_flow_style=None,
        sort_keys=False,
        width=_COLUMNS - len(indent),
        allow_unicode=True,
    )
    return [f"{indent}{line}" if line else "" for line in text.rstrip("\n").split("\n")]


def _format_comment(text: str, indent: str, bullet: str = "") -> list[str]:
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return textwrap.wrap(
        plain,
        _COLUMNS,
        initial_indent=f"{indent}# {bullet}",
        subsequent_indent=f"{indent}# {' ' * len(bullet)}",
        break_on_hyphens=False,
    )
