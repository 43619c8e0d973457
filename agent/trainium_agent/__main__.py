"""`trainium-agent`, or `python -m trainium_agent`: PID 1 of a worker pod.

This module imports nothing slow: the kernel drops a SIGTERM to PID 1 that has no handler, so a pod that is deleted
while the agent imports its modules would wait for its whole grace period.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the agent; ends the process with the pod's exit code."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from trainium_agent.bootstrap import start  # noqa: PLC0415 - after the handler is set

    code = start()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing torch down takes a second or more on a busy machine, and nothing is left to save.
    os._exit(code)


if __name__ == "__main__":
    main()
