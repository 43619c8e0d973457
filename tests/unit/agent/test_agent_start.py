"""The first moments of a pod: SIGTERM has a handler before anything slow is imported."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import signal, sys
def first(number, handler):
    print(number == signal.SIGTERM, sorted(name for name in sys.modules if name in SLOW))
    sys.exit()
SLOW = {"asyncio", "pydantic", "torch", "trainium_contract", "logging"}
signal.signal = first
from trainium_agent.__main__ import main
main()
"""


def test_sigterm_is_handled_before_anything_slow_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True []\n", "")
