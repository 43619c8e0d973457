"""Rows about capacity: nodes that come and go, and sizes at which the batch does not come out even; in virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from benchmarks.faults.record import FaultRun, Findings, Where
from benchmarks.faults.row import Row, Session
from benchmarks.faults.rows.virtual import told
from benchmarks.faults.world import World
from tests.testing.virtual.fake_workers import readiness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.faults.stage import Stage

_TAKES = {
    "elasticity": {"idleNodes": "Take"},
    "recovery": {"rescaleAfterSeconds": 30},
    "trainer": {"batch": {"globalSize": 8, "microSize": 1}},
}
_UNEVEN = {"recovery": {"rescaleAfterSeconds": 30}, "trainer": {"batch": {"globalSize": 8, "microSize": 1}}}
_MINUTES = 60
_FEWEST_STEPS = 0.9 * 3600
"""Of about one a second."""


def _come_and_go(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        dice = session.random(run)
        phase = dice.uniform(0, 60)

        async def story(world: World, phase: float = phase) -> None:
            await world.until_size(4)
            await asyncio.sleep(phase)
            begun = world.workers.step
            for minute in range(_MINUTES):
                if minute % 2:
                    world.workers.taken_nodes.clear()
                else:
                    taken = sum(world.workers.take_node(node) for node in ("node-0", "node-1", "node-2", "node-3"))
                    assert taken == 2, f"{taken} nodes were given to others, 2 are beyond what was asked for"
                await asyncio.sleep(60)
                assert world.size() >= 2, f"{world.size()} nodes train, 2 were asked for"
            made = world.workers.step - begun
            assert made > _FEWEST_STEPS, f"only {made} steps in the hour"
            world.workers.taken_nodes.clear()
            await world.until_size(4, 600)

        def judge(world: World, found: Findings) -> None:
            status = world.status()
            generation = status["membership"]["generation"]
            found.expect(generation <= 40, f"{generation} generations in an hour")
            found.expect(not status.get("failures"), f"somebody is to blame: {status.get('failures')}")
            causes = {entry["cause"] for entry in world.history()}
            found.expect(causes <= {"Capacity", "Preempted"}, f"the causes are {causes}")
            lost = max((entry.get("stepsLost") or 0 for entry in world.history()), default=0)
            found.expect(lost == 0, f"{lost} steps were lost")

        yield told(
            run, lambda: World(nodes=4, steps=100_000, change=_TAKES, spares=0, maxReplicas=4), story, judge,
            f"from second {phase:.0f} of a minute",
        )  # fmt: skip


def _four_three_two_four(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        dice = session.random(run)
        first, second = dice.randrange(4), dice.randrange(3)

        async def story(world: World, first: int = first, second: int = second) -> None:
            await world.until_size(4)
            await world.until_step(10)
            lost = [world.lose(first)]
            await world.until_size(3)
            assert world.status()["membership"]["passes"] == 3, "8 samples on 3 nodes take 3 passes"
            await asyncio.sleep(20)
            lost.append(world.lose(second))
            await world.until_size(2)
            await asyncio.sleep(20)
            world.workers.lost_nodes.clear()
            readiness(world.workers, "True", lost)
            await world.until_size(4, 1200)

        def judge(world: World, found: Findings) -> None:
            seen = [entry["rung"] for entry in world.history()]
            found.expect(seen[:2] == ["Shrink", "Shrink"], f"answered by {seen}")
            found.expect(set(seen[2:]) == {"Grow"}, f"grown back by {seen[2:]}")
            twice = [number for number, contents in world.memberships.items() if len(contents) != 1]
            found.expect(not twice, f"generations {twice} had two memberships")

        yield told(
            run, lambda: World(nodes=4, steps=100_000, change=_UNEVEN, replicas=4, spares=0, minReplicas=1), story,
            judge, f"ranks {first} and {second}",
        )  # fmt: skip


ROWS = (
    Row(
        number=35,
        fault="idle capacity comes and goes every minute for an hour",
        injected="a job of 2 that may take 2 idle nodes (`idleNodes: Take`); others need both and leave, by the minute",
        expected="others get their nodes each time; no step lost, nobody to blame, growth rests ever longer",
        judged="sizes, causes, steps of the hour, at most 40 generations; at the end it grows again",
        play=_come_and_go,
        where=Where.VIRTUAL,
        most=10,
    ),
    Row(
        number=36,
        fault="4 nodes, then 3, 2 and 4 without a spare, batches uneven",
        injected="two nodes lost one after the other at global batch 8; both come back",
        expected="Shrink to 3 (3 passes), Shrink to 2, growth back to 4",
        judged="sizes, passes, history; one membership a generation",
        play=_four_three_two_four,
        where=Where.VIRTUAL,
        most=10,
    ),
)
