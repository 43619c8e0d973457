"""Blocks of a page with the output of a command, which their marks name.

    <!-- output: kubectl trn status llama -n team -->

        $ kubectl trn status llama -n team
        ...

    <!-- output: end -->

After `output only:` the command itself is left out, where the page has it already. A block is indented or fenced, as it
is found.
"""

import re
from collections.abc import Callable, Collection

_BLOCK = re.compile(
    r"^<!-- output(?P<only> only)?: (?P<command>(?!end -->).+?) -->\n(?P<body>.*?)^<!-- output: end -->$",
    re.MULTILINE | re.DOTALL,
)
_FENCE = re.compile(r"^```\w*$", re.MULTILINE)
_LONGEST_COMMAND = 100


def commands(page: str) -> list[str]:
    """Return the commands of all blocks of a page, in order."""
    return [found["command"] for found in _BLOCK.finditer(page)]


def without_blocks(page: str) -> str:
    """Return the page without its blocks."""
    return _BLOCK.sub("", page)


def update_blocks(page: str, output: Callable[[str], str], *, leave: Collection[str] = ()) -> str:
    """Return the page with the current `output(command)` in each block, except for commands in `leave`."""

    def block(found: re.Match[str]) -> str:
        return found[0] if found["command"] in leave else _block(found, output(found["command"]))

    return _BLOCK.sub(block, page)


def _block(found: re.Match[str], output: str) -> str:
    lines = output.splitlines()
    if not found["only"]:
        lines = [*_prompt(found["command"]), *lines]
    fence = _FENCE.search(found["body"])
    shown = "\n".join(lines) if fence else "\n".join(f"    {line}".rstrip() for line in lines)
    block = f"{fence[0]}\n{shown}\n```" if fence else shown
    opening = found[0].partition("\n")[0]
    return f"{opening}\n\n{block}\n\n<!-- output: end -->"


def _prompt(command: str) -> list[str]:
    """Return the typed command; a long one is continued on a second line."""
    if len(command) <= _LONGEST_COMMAND:
        return [f"$ {command}"]
    at = command.rindex(" --", 0, _LONGEST_COMMAND)
    return [f"$ {command[:at]} \\", f"    {command[at + 1 :]}"]
