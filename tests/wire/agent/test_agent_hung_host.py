"""A machine that hangs keeps its connections and answers nothing: what the agents that share its store do then."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_world import World


async def test_members_leave_a_generation_whose_store_is_on_a_machine_that_hangs(world: World) -> None:
    world.start("a", "b", "spare")
    await world.ready("a", "b", "spare")
    await world.jobs.publish(["a", "b"])
    await world.training("a", "b")
    world.agents["a"].signal(signal.SIGSTOP)
    try:
        os.kill(world.starts(rank=1)[0]["pid"], signal.SIGKILL)  # b asks the store what to do about it
        await world.until(lambda: world.jobs.last("b").failures, "b knows of its rank's end")
        await world.jobs.publish(["b", "spare"])
        await world.training("b", "spare", generation=2)
    finally:
        world.agents["a"].signal(signal.SIGCONT)
