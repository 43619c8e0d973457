"""States of processes of other programs."""

from pathlib import Path

NO_PROCESS = "X"


def process_state(pid: int) -> str:
    """Return the state letter of a process as in `ps`, or NO_PROCESS."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return NO_PROCESS


def has_ended(pid: int) -> bool:
    """Return whether a process does not exist or is a zombie."""
    return process_state(pid) in {"Z", NO_PROCESS}
