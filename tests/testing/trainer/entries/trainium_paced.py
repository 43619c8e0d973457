"""Run the trainer with steps of a steady length: a small model would be through its data too early.

Workers run this in place of the plain entry point; losses are those of the plain trainer.
"""

import os
import time
from typing import Any

_STEP_SECONDS = float(os.environ.get("TRAINIUM_TEST_PACE", "0"))


def main(argv: list[str]) -> Any:
    """Run the trainer; the agent calls this in each training process."""
    from trainium_trainer import cli
    from trainium_trainer.backends.native import NativeBackend

    accumulate = NativeBackend.accumulate
    ended = [time.monotonic()]

    def paced(self: NativeBackend, batch: Any, *, last: bool) -> None:
        accumulate(self, batch, last=last)
        if last:
            time.sleep(max(0.0, ended[0] + _STEP_SECONDS - time.monotonic()))
            ended[0] = time.monotonic()

    NativeBackend.accumulate = paced  # type: ignore[method-assign]
    return cli.main(argv)
