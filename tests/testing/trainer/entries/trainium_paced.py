"""Run the trainer with steps of a fixed length, so that a small model does not finish too early.

Workers run this in place of the normal entry point; the losses do not change.
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
    last_end = [time.monotonic()]

    def accumulate_paced(self: NativeBackend, batch: Any, *, last: bool) -> None:
        accumulate(self, batch, last=last)
        if last:
            time.sleep(max(0.0, last_end[0] + _STEP_SECONDS - time.monotonic()))
            last_end[0] = time.monotonic()

    NativeBackend.accumulate = accumulate_paced  # type: ignore[method-assign]
    return cli.main(argv)
