"""Update the blocks of a page that have the output of a command.

    <!-- output: kubectl trn status llama -n team -->

        $ kubectl trn status llama -n team
        ...

    <!-- output: end -->

`output only:` omits the command itself; `output 12:` shows the first 12 lines. A block stays indented or fenced; it may
have several commands, separated by ` && `.
"""

import re
from collections.abc import Callable, Collection

_BLOCK = re.compile(
    r"^<!-- output(?P<only> only)?(?: (?P<lines>\d+))?: (?P<command>(?!end -->).+?) -->\n(?P<body>.*?)"
    r"^<!-- output: end -->$",
    re.MULTILINE | re.DOTALL,
)
_FENCE = re.compile(r"^```\w*$", re.MULTILINE)
_LONGEST_COMMAND = 100


def commands(page: str) -> list[str]:
    """Return the commands of all blocks of a page, in order."""
    return [command for match in _BLOCK.finditer(page) for command in match["command"].split(" && ")]


def without_blocks(page: str) -> str:
    """Return the page without its blocks."""
    return _BLOCK.sub("", page)


def update_blocks(page: str, output: Callable[[str], str], *, leave: Collection[str] = ()) -> str:
    """Return the page with the current `output(command)` in each block, unless all its commands are in `leave`."""

    def block(match: re.Match[str]) -> str:
        names = match["command"].split(" && ")
        return match[0] if set(names) <= set(leave) else _block(match, [(name, output(name)) for name in names])

    return _BLOCK.sub(block, page)


def _block(match: re.Match[str], outputs: list[tuple[str, str]]) -> str:
    lines: list[str] = []
    for command, output in outputs:
        printed = output.splitlines()
        if match["lines"] and len(printed) > int(match["lines"]):
            printed = [*printed[: int(match["lines"])], "..."]
        lines += ["", *([] if match["only"] else _prompt(command)), *printed]
    fence = _FENCE.search(match["body"])
    lines = lines[1:]
    shown = "\n".join(lines) if fence else "\n".join(f"    {line}".rstrip() for line in lines)
    block = f"{fence[0]}\n{shown}\n```" if fence else shown
    opening = match[0].partition("\n")[0]
    return f"{opening}\n\n{block}\n\n<!-- output: end -->"


def _prompt(command: str) -> list[str]:
    """Return the typed command; a long one is continued on a second line."""
    if len(command) <= _LONGEST_COMMAND:
        return [f"$ {command}"]
    end = command.rindex(" --", 0, _LONGEST_COMMAND)
    return [f"$ {command[:end]} \\", f"    {command[end + 1 :]}"]
