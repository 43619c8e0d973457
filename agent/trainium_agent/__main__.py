"""Run the agent as PID 1 of a worker pod: `trainium-agent`, or `python -m trainium_agent`.

This module imports nothing slow: the kernel drops a SIGTERM to PID 1 that has no handler, so a pod that is deleted
while the agent imports its modules would wait for its whole grace period.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

_YIELDING = 75
"""`ExitCode.YIELDING`, which is not imported before the handler is set."""


_HELP = """Usage: trainium-agent

Run the training processes of a worker pod as its process 1, and report them to the operator. It has no options: its
settings are environment variables, which the operator sets in the pods of a TrainingJob.
"""
_USER_ERROR = 64
"""`ExitCode.USER_ERROR`."""


def main() -> None:
    """Run the agent and end the process with the pod's exit code."""
    if sys.argv[1:]:
        _refuse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_YIELDING))
    from trainium_contract.temporary_folder import set_temporary_folder  # noqa: PLC0415 - as above
    from trainium_contract.worker_process.open_files import raise_limit  # noqa: PLC0415 - after the handler is set

    raise_limit()  # the ranks inherit both
    set_temporary_folder(os.environ)
    from trainium_agent.bootstrap import start  # noqa: PLC0415 - as above

    code = start()
    sys.stdout.flush()
    sys.stderr.flush()
    # Unloading torch takes a second or more on a busy machine, and nothing is left to save.
    os._exit(code)


def _refuse_arguments() -> NoReturn:
    if sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(_HELP)
        sys.exit(0)
    sys.stderr.write(f"error: No such option or argument: {sys.argv[1]}; see trainium-agent --help\n")
    sys.exit(_USER_ERROR)


if __name__ == "__main__":
    main()
