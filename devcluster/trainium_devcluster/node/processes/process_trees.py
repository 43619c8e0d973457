"""Process trees as /proc shows them, for freezing, thawing and killing a node or a container with its descendants.

Invariants: reads only; a process that ends while it is looked at is left out. Linux only.
"""

import contextlib
import os
import signal
from collections import defaultdict
from pathlib import Path

_ROUNDS = 20  # a process that forks faster than this many looks is the caller's problem


def parents() -> dict[int, int]:
    """Process id to parent's process id, of every process on the machine."""
    found: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The command between parentheses may hold anything, also parentheses: the fields begin after the last one.
        found[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    return found


def process_tree(pid: int) -> list[int]:
    """`pid` and all its descendants, parents before children; empty when there is no such process."""
    return trees([pid])


def signal_tree(pid: int, number: signal.Signals) -> list[int]:
    """Send `number` to `pid` and all its descendants; looks again until no new one shows up."""
    reached: list[int] = []
    for _ in range(_ROUNDS):
        fresh = [process for process in process_tree(pid) if process not in reached]
        if not fresh:
            break
        for process in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
            reached.append(process)
    return reached


def command_line(pid: int) -> str:
    """Return the command line of `pid`; empty if it has ended."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def inner_pid(pid: int) -> int:
    """Return the process id of `pid` inside its container; `pid` itself if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except OSError:
        pass
    return pid


def trees(roots: list[int]) -> list[int]:
    """All processes of several trees, with one look at /proc."""
    table = parents()
    children: dict[int, list[int]] = defaultdict(list)
    for child, parent in table.items():
        children[parent].append(child)
    ordered = [pid for pid in roots if pid in table]
    for process in ordered:
        ordered.extend(children[process])
    return ordered
