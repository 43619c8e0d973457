"""Render `docs/commands.md`, with the arguments and options of each command, from the programs themselves."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import MISSING, fields
from typing import Any

import typer

from scripts.markdown_table import render_table
from trainium_client.commands.main import app as client
from trainium_devcluster.cli import app as devcluster
from trainium_operator.check import app as check
from trainium_operator.settings import PREFIX, Settings
from trainium_simulator.command import app as simulate
from trainium_trainer.cli import app as trainer

_INTRODUCTION = """# Commands

This page lists the arguments and options of every program; `--help` shows the same. Exit codes are 0 for success, 1 for
a failure with one sentence on standard error, and 2 for an invalid command line.
[Causes](causes.md#exit-codes-of-a-training-process) lists the exit codes of a training process."""
_PROGRAMS = (
    ("kubectl trn", "Inspect and change jobs ([guide](kubectl-trn.md)).", client),
    ("trainium-operator simulate", "Simulate the goodput of a job ([guide](simulate.md)).", simulate),
    ("trainium-operator check", "Check an installed operator; `helm test` runs it.", check),
    ("trainium-trainer", "Work with data, models, checkpoints and artifacts, in a job or outside.", trainer),
    ("trainium-devcluster", "Run a local Kubernetes for development ([guide](devcluster.md)).", devcluster),
)
_HIDDEN = frozenset({"help", "install_completion", "show_completion"})


def reference_text(header: str) -> str:
    """Return the page, with `header` as the first line."""
    sections = [f"<!-- {header} -->\n{_INTRODUCTION}"]
    for name, text, app in _PROGRAMS:
        sections += [f"## {name}\n\n{text}", *_program_sections(name, typer.main.get_command(app))]
    return "\n\n".join([*sections, _operator_section()]) + "\n"


def _program_sections(name: str, program: Any) -> list[str]:
    """Return the options that most commands share, then a list of the commands, each with its other options."""
    commands = _leaf_commands(name, program)
    options = {command_name: _options(command) for command_name, command in commands.items()}
    counts = Counter(option for others in options.values() for option in dict.fromkeys(others))
    shared = [option for option, count in counts.items() if count > len(commands) / 2 and len(commands) > 1]
    sections = ["Most commands have:\n\n" + "\n".join(f"- {option}" for option in shared)] if shared else []
    lines = []
    for command_name, command in commands.items():
        arguments = (parameter for parameter in command.params if parameter.param_type_name == "argument")
        lines.append(f"- **`{' '.join([command_name, *map(_metavar, arguments)])}`**: {_escape(command.help)}")
        lines += [f"  - {option}" for option in options[command_name] if option not in shared]
    return [*sections, *(["The commands:"] if shared else []), "\n".join(lines)]


def _leaf_commands(name: str, command: Any) -> dict[str, Any]:
    """Return the command, or its subcommands, by name."""
    if children := getattr(command, "commands", None):
        return {
            leaf: found
            for child in children
            for leaf, found in _leaf_commands(f"{name} {child}", children[child]).items()
        }
    return {name: command}


def _options(command: Any) -> list[str]:
    """Return the arguments and options of a command with their meanings."""
    return [
        f"{_flags(parameter)}: {_help_with_default(parameter)}"
        for parameter in command.params
        if not getattr(parameter, "hidden", False) and parameter.name not in _HIDDEN
    ]


def _metavar(parameter: Any) -> str:
    metavar = parameter.name.upper() + ("…" if parameter.nargs == -1 else "")
    return metavar if parameter.required else f"[{metavar}]"


def _flags(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    return " ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))


def _help_with_default(parameter: Any) -> str:
    text, default = _escape(parameter.help).rstrip("."), parameter.default
    if default in (None, "", False, ()) or default is True or callable(default) or parameter.required:
        return text
    return f"{text} (default `{getattr(default, 'value', default)}`)"


def _escape(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").replace("\b", "").split()).replace("<", "&lt;")


def _operator_section() -> str:
    """Return the table of the operator's options, which are the fields of its settings."""
    rows = []
    for field in fields(Settings):
        default = "" if field.default in (MISSING, "", None) else f" (default `{field.default}`)"
        flag = field.name.replace("_", "-")
        rows.append((f"`--{flag}`", f"`{PREFIX}{field.name.upper()}`", _escape(field.metadata["help"]) + default))
    text = "The operator. The chart passes these options; `extraArgs` passes those without a value in the chart."
    return f"## trainium-operator\n\n{text}\n\n{render_table(('option', 'variable', 'meaning'), rows)}"
