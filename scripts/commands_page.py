"""Render `docs/commands.md`, with the arguments and the purpose of each command, from the programs themselves."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from trainium_operator.check import app as check
from trainium_trainer.cli import app as trainer

_INTRODUCTION = """# Commands

This page lists the commands of the trainer and of the operator; `--help` of a command shows its options. Other pages
list those of [`kubectl trn`](kubectl-trn.md), [`trainium-operator simulate`](simulate.md) and
[`trainium-devcluster`](devcluster.md). Exit codes are 0 for success, 1 for a failure with one sentence on standard
error, and 2 for an invalid command line. [Causes](causes.md#exit-codes-of-a-training-process) lists those of a training
process."""
_PROGRAMS = (
    ("trainium-trainer", "Work with data, models, checkpoints and artifacts, in a job or outside.", trainer),
    ("trainium-operator check", "Check an installed operator; `helm test` runs it.", check),
)
_OPERATOR = """## trainium-operator

The operator. The chart passes its options; `extraArgs` passes those without a value in the chart. `trainium-operator
--help` lists them with their variables."""


def render_reference(header: str) -> str:
    """Return the page, with `header` as the first line."""
    sections = [f"<!-- {header} -->\n{_INTRODUCTION}"]
    for name, text, app in _PROGRAMS:
        sections += [f"## {name}\n\n{text}", _list_commands(name, typer.main.get_command(app))]
    return "\n\n".join([*sections, _OPERATOR]) + "\n"


def _list_commands(name: str, program: Any) -> str:
    """Return a list of the commands with their arguments."""
    lines = []
    for command_name, command in _iterate_leaf_commands(name, program).items():
        arguments = (parameter for parameter in command.params if parameter.param_type_name == "argument")
        lines.append(f"- **`{' '.join([command_name, *map(_format_metavar, arguments)])}`**: {_escape(command.help)}")
    return "\n".join(lines)


def _iterate_leaf_commands(name: str, command: Any) -> dict[str, Any]:
    """Return the command, or its subcommands, by name."""
    if children := getattr(command, "commands", None):
        return {
            leaf: found
            for child in children
            for leaf, found in _iterate_leaf_commands(f"{name} {child}", children[child]).items()
        }
    return {name: command}


def _format_metavar(parameter: Any) -> str:
    metavar = parameter.name.upper() + ("…" if parameter.nargs == -1 else "")
    return metavar if parameter.required else f"[{metavar}]"


def _escape(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").replace("\b", "").split()).replace("<", "&lt;")
