"""Count the steps of a bare training loop, report them, and save and exit when the agent asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trainium_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def training_steps(completed: int, last: int, save: Callable[[int], str]) -> Iterator[int]:
    """Yield the numbers of the steps after `completed`, and report each one when the loop requests the next.

    save: saves the state after a step and returns the location; called when the job requests a stop. The process then
    exits.

        for step in training_steps(resumed, 1000, save):
            train(step)
    """
    for number in range(completed + 1, last + 1):
        yield number
        trainium_worker.step(number, total_steps=last)
        if trainium_worker.should_stop() and number < last:
            trainium_worker.stage("save")
            trainium_worker.saved(number, save(number))
            raise SystemExit(trainium_worker.STOPPED)
