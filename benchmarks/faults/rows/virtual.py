"""Rows about the operator's writes, about outages and storms of the API; in virtual time."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from benchmarks.faults.record import FaultRun, Findings, Where
from benchmarks.faults.row import Row, Session
from benchmarks.faults.world import NAME, World, play
from tests.testing.api.fake_kubernetes import refuse
from tests.testing.virtual.operator_process import until

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterator

    from benchmarks.faults.stage import Stage
    from trainium_operator.cluster.api.transport import HttpResponse

WRITES = 30
"""A story of this kind has fewer than so many writes; later points let the operator live."""
HALF_HOUR = 1800.0
OUTAGE = 600.0
FAULTS_OF_A_LEMON = 3
REASONS = ("NeuronHasError_HBM_UNCORRECTABLE_ERROR", "NeuronHasError_SRAM_UNCORRECTABLE_ERROR")


def told(
    run: int,
    make: Callable[[], World],
    story: Callable[[World], Awaitable[None]],
    judge: Callable[[World, Findings], None],
    note: str = "",
) -> FaultRun:
    """One story, judged; an assertion or a dead end in it is a finding, not a crash of the table."""
    found = Findings()
    try:
        world = play(make, story)
    except AssertionError as error:
        return FaultRun(run, wrong=(f"{error}"[:400],), note=note)
    judge(world, found)
    entry = next(iter(world.history()), {})
    return FaultRun(
        run,
        detect=entry.get("detectedSeconds"),
        recover=entry.get("recoveredSeconds"),
        steps_lost=max((one.get("stepsLost") or 0 for one in world.history()), default=0),
        blame=not found.wrong if entry else None,
        wrong=tuple(found.wrong),
        note=note,
    )


def _each_write(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        point = run + 1

        async def story(world: World) -> None:
            await world.until_step(10)
            world.lose(1)
            await world.until_step(20)
            await world.until_phase("Completed")

        def judge(world: World, found: Findings) -> None:
            world.judge(found, rungs=["Spare"], total=1)

        make = functools.partial(World, die_after_write=point)
        yield told(run, make, story, judge, f"after write {point}")


def _half_an_hour(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        dice = session.random(run)
        crash_at, rank, fault = dice.uniform(0, HALF_HOUR), dice.randrange(2), dice.random() < 0.7

        async def story(world: World, crash_at: float = crash_at, rank: int = rank, fault: bool = fault) -> None:
            await world.until_step(10)
            await asyncio.sleep(3)
            before = world.pod_uids()
            world.stop_supervision()
            await world.process.kill()
            await asyncio.sleep(crash_at)
            if fault:
                world.workers.crash_process(NAME, rank)
            await asyncio.sleep(HALF_HOUR - crash_at)
            assert world.workers.step > 3000, f"only {world.workers.step} steps while the operator was away"
            await world.new_operator()
            await asyncio.sleep(60)
            assert world.pod_uids() == before, "pods were replaced when the operator came back"
            await world.until_phase("Completed", 3600)

        def judge(world: World, found: Findings, fault: bool = fault) -> None:
            world.judge(found, rungs=["InPlace"] if fault else [], total=int(fault))

        note = f"crash of rank {rank} after {crash_at:.0f} s" if fault else "no fault"
        yield told(run, lambda: World(steps=4200), story, judge, note)


def _api_outage(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        at = session.random(run).uniform(0, 20)

        async def story(world: World, at: float = at) -> None:
            await world.until_step(10)
            await asyncio.sleep(3 + at)
            before, begun = world.pod_uids(), world.workers.step
            world.cluster.down = True
            world.cluster.drop_streams()
            await asyncio.sleep(OUTAGE)
            assert world.workers.step - begun > OUTAGE, f"only {world.workers.step - begun} steps in the outage"
            world.cluster.down = False
            await asyncio.sleep(60)
            assert world.pod_uids() == before, "pods were replaced after the outage"
            await world.until_phase("Completed", 3600)

        def judge(world: World, found: Findings) -> None:
            world.judge(found, rungs=[], total=0)

        yield told(run, lambda: World(steps=1600), story, judge, f"from second {at:.0f} on")


def _storm_of_errors(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        dice = session.random(run)

        async def story(world: World, dice: random.Random = dice) -> None:
            world.process.connection.latency = 0.5
            world.cluster.faults.append(lambda method, path: _refused(dice, method, path))
            gaps = asyncio.create_task(_gaps(world, dice))
            await world.until_step(10)
            world.lose(dice.randrange(2))
            await world.until_step(40)
            gaps.cancel()
            await world.until_phase("Completed")

        def judge(world: World, found: Findings) -> None:
            world.judge(found, rungs=["Spare"], total=1)
            found.expect(world.writes < 400, f"{world.writes} writes were tried")

        yield told(run, lambda: World(steps=120), story, judge)


def _refused(dice: random.Random, method: str, path: str) -> HttpResponse | None:
    """Three of ten writes meet a conflict, one of ten requests is too many."""
    if "/leases" in path:
        return None
    if method in ("PATCH", "PUT") and dice.random() < 0.3:
        return refuse(409, "Conflict", "the object has been modified")
    if dice.random() < 0.1:
        return refuse(429, "TooManyRequests", "later", Retry_After="1")
    return None


async def _gaps(world: World, dice: random.Random) -> None:
    """Watches break and their history is gone: 410."""
    while True:
        await asyncio.sleep(dice.uniform(1, 8))
        world.cluster.compact()
        world.cluster.drop_streams()


def _never_lost(world: World, found: Findings) -> None:
    found.expect(world.status().get("phase") == "Running", f"the job is {world.status().get('phase')}")


def _lemon(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        dice = session.random(run)

        async def story(world: World, dice: random.Random = dice) -> None:
            machines = world.give_machines()
            await world.until_step(10)
            node = world.members()[dice.randrange(2)]["nodeName"]
            machine = machines[node]
            for fault in range(FAULTS_OF_A_LEMON):
                world.set_condition(node, "NeuronHealth", "True", dice.choice(REASONS))
                await asyncio.sleep(30)
                held = [member["nodeName"] for member in world.members()]
                assert node not in held, f"a rank is still on {node}, which is broken, after fault {fault + 1}"
                new = f"node-{50 + fault}"
                world.rename_node(node, new, machine)
                node = new
                await asyncio.sleep(dice.uniform(610, 900))
            await asyncio.sleep(300)
            state = world.remembered(machine)
            assert "Permanent" in state, f"after {FAULTS_OF_A_LEMON} faults the machine is remembered as {state!r}"
            known = set(world.pod_names)
            world.workers.kill_pod(world.members()[0]["podName"])
            await until(lambda: set(world.pod_names) > known, 60, "a new pod")
            made = world.pod_affinity(world.pod_names[-1])
            assert node in made, f"a new pod may go to {node}, the lemon's newest name: {made}"

        yield told(run, lambda: World(nodes=8, steps=100_000), story, _never_lost)


ROWS = (
    Row(
        number=25,
        part="a",
        fault="operator killed at each of its writes",
        injected="run n: the process dies right after its n-th write; a node is lost at step 10",
        expected="the same end as without: one answer by the spare, no generation twice, no pod name twice",
        judged="phase, history, generations, memberships and pod names of all writes",
        play=_each_write,
        where=Where.VIRTUAL,
    ),
    Row(
        number=26,
        part="b",
        fault="operator away for 30 minutes",
        injected="no operator for half an hour; in 7 of 10 runs a process crashes meanwhile",
        expected="training goes on, the agents restart in place; no pod is replaced when it is back",
        judged="steps during the absence; pods; history: nothing, or InPlace once",
        play=_half_an_hour,
        where=Where.VIRTUAL,
        most=15,
    ),
    Row(
        number=27,
        part="b",
        fault="API server away for 10 minutes",
        injected="every request refused, every watch broken for 10 minutes",
        expected="training goes on; no eviction, no interruption",
        judged="steps during the outage; pods; history empty",
        play=_api_outage,
        where=Where.VIRTUAL,
    ),
    Row(
        number=29,
        fault="API latency 500 ms, conflicts, broken watches",
        injected="0.5 s a request, 30 % of writes 409, 10 % of requests 429, watches 410 every 1 to 8 s; a lost node",
        expected="the same end as without; a bounded number of writes",
        judged="as row 25a; fewer than 400 writes for 120 steps",
        play=_storm_of_errors,
        where=Where.VIRTUAL,
    ),
    Row(
        number=32,
        fault="lemon: three faults of one machine in a day",
        injected="NeuronHealth=True on a member's node; it comes back under another name; three times",
        expected="each time its rank moves; then the machine is in quarantine for good, whatever its node is called",
        judged="members after each fault; the remembered state; the affinity of a new pod",
        play=_lemon,
        where=Where.VIRTUAL,
        most=5,
    ),
)
