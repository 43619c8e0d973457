"""Rows about signs that mislead: silence that is no loss, clocks that are wrong, slow members that are victims.

In virtual time. Training goes on through all of them, so the right answer is none, or one that is not misled.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from benchmarks.faults.record import FaultRun, Findings, Where
from benchmarks.faults.row import Row, Session
from benchmarks.faults.rows.virtual import told
from benchmarks.faults.world import NAME, World
from tests.testing.virtual.fake_workers import readiness
from tests.testing.virtual.operator_process import until
from trainium_contract.wire.messages import StepTiming
from trainium_operator.cluster.api.resources import EVENTS, NODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from benchmarks.faults.stage import Stage
    from tests.testing.api.fake_kubernetes import FakeCluster

MINUTES = 300.0
HOUR = 3600.0
_STEPS = 900
"""Two a second: training ends after the five minutes and what surrounds them."""
_FEWEST_STEPS = 500
_LOADED = {"recovery": {"stragglers": {"slowdown": 1.5, "persistSteps": 20, "evict": True}}}


def _condition(world: World) -> dict[str, Any]:
    found = (each for each in world.status().get("conditions") or [] if each["type"] == "NodesHealthy")
    return next(found, {})


def _notes(cluster: FakeCluster) -> list[str]:
    return [str(raw["note"]) for key, raw in cluster.objects.items() if key[0] == EVENTS.plural]


async def _five_minutes(world: World, *, contact_lost: bool) -> None:
    """What must hold while something is unheard and nothing is lost."""
    before, step = world.pod_uids(), world.workers.step
    await asyncio.sleep(MINUTES)
    made = world.workers.step - step
    assert made >= _FEWEST_STEPS, f"only {made} steps in the five minutes"
    assert world.pod_uids() == before, "pods were replaced"
    reason = _condition(world).get("reason")
    assert not contact_lost or reason == "ContactLost", f"NodesHealthy says {reason}"
    noted = sum("are silent at once" in note for note in _notes(world.cluster))
    assert noted == int(contact_lost), f"{noted} events tell of the silence"


def _undisturbed(
    session: Session,
    make: Callable[[], World],
    disturb: Callable[[World, int], Iterable[str]],
    *,
    contact_lost: bool,
    notes: Callable[[int], str],
) -> Iterator[FaultRun]:
    """Five minutes of a disturbance, which ends, then the rest of the training: nothing may have been done."""
    for run in session.runs:
        at = session.random(run).uniform(0, 20)

        async def story(world: World, at: float = at, run: int = run) -> None:
            await world.until_step(10)
            await asyncio.sleep(5 + at)
            unready = tuple(disturb(world, run))
            readiness(world.workers, "Unknown", unready)
            await _five_minutes(world, contact_lost=contact_lost)
            world.workers.cut_off = False
            world.workers.muted_nodes = set()
            before = world.pod_uids()
            readiness(world.workers, "True", unready)
            await asyncio.sleep(30)
            assert world.pod_uids() == before, "pods were replaced when contact was there again"
            healthy = _condition(world).get("status")
            assert healthy == "True", f"NodesHealthy is {healthy} afterwards"
            await world.until_phase("Completed")

        def judge(world: World, found: Findings) -> None:
            world.judge(found, rungs=[], total=0)
            found.expect(len(world.memberships) == 1, f"{len(world.memberships)} generations")

        yield told(run, make, story, judge, f"from second {at:.0f} on{notes(run)}")


def _cut_off(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    def kubelets_too(run: int) -> bool:
        return bool(run % 2)

    def disturb(world: World, run: int) -> Iterable[str]:
        world.workers.cut_off = True
        return world.cluster.names(NODES, "") if kubelets_too(run) else ()

    def make() -> World:
        return World(nodes=8, replicas=6, spares=1, steps=_STEPS)

    def notes(run: int) -> str:
        return ", nodes Unknown too" if kubelets_too(run) else ""

    return _undisturbed(session, make, disturb, contact_lost=True, notes=notes)


def _dark_zone(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    def disturb(world: World, run: int) -> Iterable[str]:
        world.workers.muted_nodes = {f"node-{number}" for number in range(run % 3, 9, 3)}
        return world.workers.muted_nodes

    def make() -> World:
        return World(nodes=10, replicas=6, spares=3, steps=_STEPS)

    return _undisturbed(session, make, disturb, contact_lost=True, notes=lambda run: f", zone {run % 3}")


def _stale_leases(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    def disturb(world: World, _run: int) -> Iterable[str]:
        return world.cluster.names(NODES, "")

    def make() -> World:
        return World(nodes=8, replicas=6, spares=1, steps=_STEPS)

    return _undisturbed(session, make, disturb, contact_lost=False, notes=lambda _: "")


def _wrong_clock(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        dice = session.random(run)
        apart, rank = dice.choice((-HOUR, HOUR)), dice.randrange(2)

        async def story(world: World, apart: float = apart, rank: int = rank) -> None:
            await world.until_step(10)
            await asyncio.sleep(5)
            spares = _spares(world)
            wrong = [world.members()[rank]["nodeName"], spares[0]]
            world.workers.clocks_off = dict.fromkeys(wrong, apart)
            await until(
                lambda: all(f"{node}: check Clock" in _told(world) for node in wrong), 30, "the clocks are told"
            )
            await asyncio.sleep(60)
            assert not world.history(), "a wrong clock interrupted training"
            world.workers.crash_process(NAME, rank)
            await asyncio.sleep(20)
            world.workers.kill_pod(world.members()[1 - rank]["podName"])
            await until(lambda: len(world.memberships) == 2, 60, "a spare has the rank")
            taken = {member["nodeName"] for member in world.members()}
            assert spares[0] not in taken, f"the rank went to {spares[0]}, whose clock is wrong"
            await world.until_phase("Completed")

        def judge(world: World, found: Findings) -> None:
            world.judge(found, rungs=["InPlace", "Spare"], total=2)
            for entry in world.history():
                seconds = entry.get("recoveredSeconds")
                found.expect(seconds is not None and seconds < 60, f"{entry['rung']}: recovered after {seconds} s")
            lost = sum((world.status().get("goodput", {}).get("lostSeconds") or {}).values())
            found.expect(lost < 120, f"the ledger has {lost:.0f} s as lost")

        note = f"{apart:+.0f} s on the node of rank {rank} and of a spare"
        yield told(run, lambda: World(nodes=5, replicas=2, spares=2, steps=400), story, judge, note)


def _spares(world: World) -> list[str]:
    """Nodes of the warm spares, the one that would be taken first in front."""
    members = {member["podUid"] for member in world.members()}
    agents = sorted(world.workers.agents.values(), key=lambda agent: int(agent.name.rpartition("-")[2]))
    return [agent.node for agent in agents if agent.uid not in members]


def _told(world: World) -> str:
    return str(_condition(world).get("message", ""))


def _loaded_host(_: Stage | None, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        dice = session.random(run)
        victims = dice.sample(range(4), 2)

        async def story(world: World, victims: list[int] = victims) -> None:
            await world.until_step(10)
            nodes = [member["nodeName"] for member in world.members()]
            spare = next(iter(_spares(world)))
            # Each does 0.2 s of work in a step; the rest is the wait for a processor of the host that all are on.
            loaded = {node: _timing(0.4, wait=0.5) for node in nodes}
            loaded |= {nodes[rank]: _timing(1.0, wait=0.8) for rank in victims}
            world.workers.timings = loaded
            await until(lambda: _waits(world) == 2, 120, "both are told of as waiting for a processor")
            before = world.pod_uids()
            await asyncio.sleep(MINUTES)
            assert world.pod_uids() == before, "a victim of the load was replaced"
            assert not world.history(), "training was interrupted for a victim of the load"
            # Now the host is free, and one is slow by itself: so the answer above was not for want of one.
            quiet = dict.fromkeys((*nodes, spare), _timing(0.2, wait=0.0))
            world.workers.timings = quiet | {nodes[victims[0]]: _timing(1.0, wait=0.0)}
            await until(lambda: len(world.memberships) == 2, 120, "the slow one is handed over")
            await world.until_phase("Completed")

        def judge(world: World, found: Findings) -> None:
            world.judge(found, rungs=["Spare"], total=1)
            causes = [entry["cause"] for entry in world.history()]
            found.expect(causes == ["Straggler"], f"the causes are {causes}")

        make = _loaded_world
        yield told(run, make, story, judge, f"ranks {sorted(victims)}")


def _loaded_world() -> World:
    return World(nodes=6, replicas=4, spares=1, steps=1400, change=_LOADED)


def _timing(own: float, *, wait: float) -> StepTiming:
    return StepTiming(steps=15, step_seconds=1.0, own_seconds=own, cpu_wait=wait)


def _waits(world: World) -> int:
    return sum("it waits for a processor, as the others do" in note for note in _notes(world.cluster))


def _row(number: int, play: Callable[[Stage | None, Session], Iterator[FaultRun]], **words: str) -> Row:
    return Row(number=number, play=play, where=Where.VIRTUAL, most=15, **words)  # type: ignore[arg-type]


ROWS = (
    _row(
        37,
        _cut_off,
        fault="operator cut off from all nodes for 5 minutes",
        injected="no agent reaches the operator; in every second run all nodes are Unknown too",
        expected="nothing deleted, nobody replaced, no step lost; ContactLost in the status, one event",
        judged="steps meanwhile; pods during and after; one generation; history empty; condition and events",
    ),
    _row(
        38,
        _dark_zone,
        fault="one of three zones dark for 5 minutes",
        injected="agents of every third of 9 nodes unheard, these nodes Unknown; they train on",
        expected="as row 37",
        judged="as row 37",
    ),
    _row(
        39,
        _stale_leases,
        fault="all kubelets' leases stale for 5 minutes",
        injected="every node Unknown, while agents are heard and training goes on",
        expected="nothing deleted, nobody replaced, no step lost",
        judged="as row 37, with no word of silence",
    ),
    _row(
        40,
        _wrong_clock,
        fault="clock of a node one hour off",
        injected="an hour ahead or behind on the nodes of a member and of a spare; a crash there; another member lost",
        expected="told with its node, interrupts nothing; the other spare is preferred; no hour in any figure",
        judged="condition; history: InPlace, Spare, each below 60 s; less than 120 s lost in the ledger",
    ),
    _row(
        41,
        _loaded_host,
        fault="two stragglers that are victims of a loaded host",
        injected="all wait for half of their processor time, two for 80 %, 5 minutes; then one is slow by itself",
        expected="the two are told of and stay; the one goes to the spare",
        judged="events; pods and history while the host is loaded; then history: Straggler, Spare",
    ),
)
