"""Real agents follow generations: resizes, lost agents, late agents, deletion and termination."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from tests.wire.agent.agent_world import AgentJob, is_alive
from trainium_agent.linux.kernel import descendants
from trainium_contract.wire.messages import Transition


async def test_a_generation_starts_each_rank_on_its_node(world: AgentJob) -> None:
    world.start("a", "b", "spare")
    await world.ready("a", "b", "spare")
    await world.jobs.publish(["b", "a"])
    await world.training("a", "b")
    rows = sorted(world.starts(), key=lambda row: row["rank"])
    assert [(row["rank"], row["world"], row["pod"]) for row in rows] == [(0, 2, "b"), (1, 2, "a")]
    assert rows[0]["argv"] == ["train", "--config", str(world.folder / "trainer.yaml")]
    beat = await world.heartbeat("spare", lambda beat: beat.generation == 1, "generation 1")
    assert (beat.phase, beat.ready) == ("Standby", True)
    assert "[rank 0]" not in world.agents["a"].log


async def test_a_graceful_resize_loses_no_step(world: AgentJob) -> None:
    await world.train("a", "b", "c", step=5)
    await world.jobs.publish(["a", "b"], Transition.GRACEFUL)
    await world.training("a", "b", generation=2)
    assert sorted((row["rank"], row["world"]) for row in world.starts(generation=2)) == [(0, 2), (1, 2)]
    await world.phase("Standby", "c")
    assert all(not world.jobs.last(name).failures for name in "abc")
    assert not [row for row in world.starts(generation=1) if is_alive(row["pid"])]

    await world.jobs.publish(["a", "b", "c"], Transition.GRACEFUL)
    await world.training("a", "b", "c", generation=3)


async def test_a_graceful_resize_does_not_wait_for_ranks_that_cannot_save(world: AgentJob) -> None:
    await world.train("a", "b")
    os.kill(world.starts(rank=0)[0]["pid"], signal.SIGSTOP)
    await world.jobs.publish(["b"], Transition.GRACEFUL)
    await world.phase("Standby", "a")
    assert not is_alive(world.starts(rank=0, generation=1)[0]["pid"])


async def test_a_lost_agent_is_replaced_by_the_spare(world: AgentJob) -> None:
    await world.train("a", "b", spares=("spare",))
    lost = world.starts(rank=1)[0]["pid"]
    world.agents["b"].signal(signal.SIGKILL)
    await world.jobs.publish(["a", "spare"])
    await world.training("a", "spare", generation=2)
    await world.until(lambda: not is_alive(lost), "the lost agent's rank ended with it")
    assert world.starts(generation=2, rank=1)[0]["pod"] == "spare"


async def test_a_newer_generation_supersedes_one_that_is_joining(world: AgentJob) -> None:
    world.start("a", "b")
    await world.ready("a", "b")
    world.jobs.registered["ghost"] = world.jobs.registered["b"].model_copy(
        update={"pod_name": "ghost", "pod_uid": "uid-ghost", "pod_ip": world.fresh_ip()}
    )
    await world.jobs.publish(["a", "b", "ghost"])
    await world.heartbeat("a", lambda beat: beat.waiting_for == (2,), "it waits for node 2")
    await world.heartbeat("b", lambda beat: beat.waiting_for == (2,), "it waits for node 2")
    await world.jobs.publish(["ghost", "b"])
    await world.heartbeat("b", lambda beat: beat.waiting_for == (0,), "it waits for node 0")
    await world.jobs.publish(["a", "b"])
    await world.training("a", "b", generation=3)
    assert not world.starts(generation=1)


async def test_an_older_generation_is_never_joined(world: AgentJob) -> None:
    world.start("a")
    await world.ready("a")
    await world.jobs.publish(["a"])
    first = world.jobs.membership
    await world.jobs.publish(["a"])
    await world.training("a", generation=2)
    world.jobs.membership = first
    await world.servers[0].stop()
    await world.servers[0].start()
    await world.until(lambda: len(world.jobs.registrations) == 2, "registered again, and received generation 1")
    seen, starts = len(world.jobs.heartbeats["a"]), world.starts()
    await world.until(lambda: len(world.jobs.heartbeats["a"]) > seen + 2, "more heartbeats")
    assert world.starts() == starts, "no rank was started again"
    assert world.jobs.last("a").generation == 2
    assert is_alive(world.starts(generation=2)[0]["pid"])


async def test_a_resumed_agent_of_an_old_generation_ends_its_ranks(world: AgentJob) -> None:
    await world.train("a", "b", spares=("spare",))
    zombie = world.starts(rank=1)[0]["pid"]
    for pid in (world.agents["b"].pid, zombie):
        os.kill(pid, signal.SIGSTOP)  # as a machine that hangs
    await world.jobs.publish(["a", "spare"])
    await world.training("a", "spare", generation=2)
    seen = len(world.jobs.heartbeats["b"])

    for pid in (zombie, world.agents["b"].pid):
        os.kill(pid, signal.SIGCONT)
    await world.until(lambda: not is_alive(zombie), "its rank is ended")
    await world.until(lambda: len(world.jobs.heartbeats["b"]) > seen, "b sends heartbeats again")
    late = world.jobs.heartbeats["b"][seen:]
    assert {beat.generation for beat in late} == {2}, "a heartbeat of generation 1 is refused with 409"
    await world.phase("Standby", "b")
    assert not [row for row in world.starts(pod="b") if row["generation"] != 1]
    assert is_alive(world.starts(rank=0, generation=2)[0]["pid"])
    assert not world.starts(attempt=1), "no agent restarted because of it"


async def test_members_leave_a_generation_whose_store_hangs(world: AgentJob) -> None:
    await world.train("a", "b", spares=("spare",))
    world.agents["a"].signal(signal.SIGSTOP)
    try:
        os.kill(world.starts(rank=1)[0]["pid"], signal.SIGKILL)  # b asks the store what to do about it
        await world.until(lambda: world.jobs.last("b").failures, "b knows of its rank's end")
        await world.jobs.publish(["b", "spare"])
        await world.training("b", "spare", generation=2)
    finally:
        world.agents["a"].signal(signal.SIGCONT)


async def test_agents_of_a_finished_job_exit_with_0(world: AgentJob) -> None:
    world.command("last-step", "10")
    world.start("a", "b", "c")
    await world.ready("a", "b", "c")
    await world.jobs.publish(["a", "b", "c"])
    await world.ended("a", "b", "c")
    assert {agent.code for agent in world.agents.values()} == {0}
    assert all(world.jobs.last(name).phase == "Finished" for name in "abc")
    assert world.jobs.last("a").progress.step == 10


async def test_an_agent_that_finished_twice_waits_for_the_second_acknowledgement(world: AgentJob) -> None:
    await world.train("a", "b", spares=("spare",))
    world.command("exit-0", "0")
    await world.phase("Finished", "a")
    await world.jobs.publish(["a", "spare"])
    await world.training("a", "spare", generation=2)
    world.servers[0].leader = False
    world.command("last-step", "10")
    await world.until(lambda: not [row for row in world.starts() if is_alive(row["pid"])], "the ranks ended")
    await asyncio.sleep(1.5)  # node 0 parts from the others, and would leave
    world.factory.poll()
    assert world.agents["a"].code is None
    world.servers[0].leader = True
    await world.ended("a", "spare")
    last = world.jobs.last("a")
    assert (last.generation, last.phase) == (2, "Finished")


async def test_sigterm_saves_and_ends_all_processes(world: AgentJob) -> None:
    await world.train("a", "b")
    below = descendants(world.agents["a"].pid)
    assert len(below) == 2
    world.agents["a"].signal(signal.SIGTERM)
    await world.ended("a")
    assert world.agents["a"].code == 75
    assert not [pid for pid in below if is_alive(pid)]
    await world.phase("Yielded", "b")
    # The other member's pod is ending, so b must not go on alone.
    world.agents["b"].signal(signal.SIGTERM)
    await world.ended("b")
    assert world.agents["b"].code == 75
    assert not [row for row in world.starts() if is_alive(row["pid"])]


async def test_sigterm_to_a_spare_ends_it_at_once(world: AgentJob) -> None:
    world.start("a")
    await world.ready("a")
    below = descendants(world.agents["a"].pid)
    world.agents["a"].signal(signal.SIGTERM)
    await world.ended("a")
    assert world.agents["a"].code == 0
    assert not [pid for pid in below if is_alive(pid)]


async def test_agents_of_a_deleted_job_exit_at_once(world: AgentJob) -> None:
    await world.train("a", spares=("spare",), TRAINIUM_GRACE_SECONDS="600")
    os.kill(world.starts()[0]["pid"], signal.SIGSTOP)  # it would not save within its grace
    world.jobs.deleted = True
    world.servers[0].end_streams()
    await world.ended("a", "spare")
    assert not is_alive(world.starts()[0]["pid"])
    assert "the job no longer exists" in world.agents["a"].log


async def test_ranks_that_ignore_sigterm_are_killed_after_the_grace_period(world: AgentJob) -> None:
    await world.train("a", TRAINIUM_GRACE_SECONDS="0.5")
    os.kill(world.starts()[0]["pid"], signal.SIGSTOP)
    world.agents["a"].signal(signal.SIGTERM)
    await world.ended("a")
    assert not is_alive(world.starts()[0]["pid"])


async def test_ended_generations_leave_no_connection(world: AgentJob) -> None:
    agents = world.start("a", "b", WITHOUT_COLLECTOR="1")
    await world.ready("a", "b")
    counts = []
    for generation in range(1, 5):
        await world.jobs.publish(["a", "b"], Transition.GRACEFUL)
        await world.training("a", "b", generation=generation)
        counts.append([sockets(agent.pid) for agent in agents])
    await world.until(
        lambda: all(sockets(agent.pid) <= count for agent, count in zip(agents, counts[1], strict=True)),
        f"as many sockets as in generation 2: {counts}",
    )


def sockets(pid: int) -> int:
    """Count the sockets of a process."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += entry.readlink().name.startswith("socket:")
    return found
