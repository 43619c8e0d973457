"""Real agents follow generations: resizes, lost agents, late agents, deletion and termination."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from tests.testing.suite.processes import has_ended
from tests.wire.agent.agent_job import AgentJob
from trainium_contract.wire.messages import Transition
from trainium_contract.worker_process.process_tree import list_descendants


async def test_a_generation_starts_each_rank_on_its_node(job: AgentJob) -> None:
    job.start("a", "b", "spare")
    await job.until_ready("a", "b", "spare")
    await job.coordinator.publish(["b", "a"])
    await job.until_training("a", "b")
    rows = sorted(job.rank_starts(), key=lambda row: row["rank"])
    assert [(row["rank"], row["world_size"], row["pod"]) for row in rows] == [(0, 2, "b"), (1, 2, "a")]
    assert rows[0]["argv"] == ["train", "--config", str(job.folder / "trainer.yaml")]
    heartbeat = await job.until_heartbeat("spare", lambda heartbeat: heartbeat.generation == 1, "generation 1")
    assert (heartbeat.phase, heartbeat.ready) == ("Standby", True)
    assert "[rank 0]" not in job.agents["a"].log


async def test_a_graceful_resize_loses_no_step(job: AgentJob) -> None:
    await job.train("a", "b", "c", step=5)
    await job.coordinator.publish(["a", "b"], Transition.GRACEFUL)
    await job.until_training("a", "b", generation=2)
    assert sorted((row["rank"], row["world_size"]) for row in job.rank_starts(generation=2)) == [(0, 2), (1, 2)]
    await job.until_phase("Standby", "c")
    assert all(not job.last_heartbeat(name).failures for name in "abc")
    assert not [row for row in job.rank_starts(generation=1) if not has_ended(row["pid"])]

    await job.coordinator.publish(["a", "b", "c"], Transition.GRACEFUL)
    await job.until_training("a", "b", "c", generation=3)


async def test_a_graceful_resize_does_not_wait_for_ranks_that_cannot_save(job: AgentJob) -> None:
    await job.train("a", "b")
    os.kill(job.rank_starts(rank=0)[0]["pid"], signal.SIGSTOP)
    await job.coordinator.publish(["b"], Transition.GRACEFUL)
    await job.until_phase("Standby", "a")
    assert has_ended(job.rank_starts(rank=0, generation=1)[0]["pid"])


async def test_a_lost_agent_is_replaced_by_the_spare(job: AgentJob) -> None:
    await job.train("a", "b", spares=("spare",))
    lost = job.rank_starts(rank=1)[0]["pid"]
    job.agents["b"].signal(signal.SIGKILL)
    await job.coordinator.publish(["a", "spare"])
    await job.until_training("a", "spare", generation=2)
    await job.until(lambda: has_ended(lost), "the lost agent's rank ended with it")
    assert job.rank_starts(generation=2, rank=1)[0]["pod"] == "spare"


async def test_a_newer_generation_supersedes_one_that_is_joining(job: AgentJob) -> None:
    job.start("a", "b")
    await job.until_ready("a", "b")
    job.coordinator.registered["ghost"] = job.coordinator.registered["b"].model_copy(
        update={"pod_name": "ghost", "pod_uid": "uid-ghost", "pod_ip": job.allocate_ip()}
    )
    await job.coordinator.publish(["a", "b", "ghost"])
    await job.until_heartbeat("a", lambda heartbeat: heartbeat.waiting_for == (2,), "it waits for node 2")
    await job.until_heartbeat("b", lambda heartbeat: heartbeat.waiting_for == (2,), "it waits for node 2")
    await job.coordinator.publish(["ghost", "b"])
    await job.until_heartbeat("b", lambda heartbeat: heartbeat.waiting_for == (0,), "it waits for node 0")
    await job.coordinator.publish(["a", "b"])
    await job.until_training("a", "b", generation=3)
    assert not job.rank_starts(generation=1)


async def test_an_older_generation_is_never_joined(job: AgentJob) -> None:
    job.start("a")
    await job.until_ready("a")
    await job.coordinator.publish(["a"])
    first = job.coordinator.membership
    await job.coordinator.publish(["a"])
    await job.until_training("a", generation=2)
    job.coordinator.membership = first
    await job.coordinators[0].stop()
    await job.coordinators[0].start()
    await job.until(lambda: len(job.coordinator.registrations) == 2, "registered again, and received generation 1")
    count, starts = len(job.coordinator.heartbeats["a"]), job.rank_starts()
    await job.until(lambda: len(job.coordinator.heartbeats["a"]) > count + 2, "more heartbeats")
    assert job.rank_starts() == starts, "no rank was started again"
    assert job.last_heartbeat("a").generation == 2
    assert not has_ended(job.rank_starts(generation=2)[0]["pid"])


async def test_a_resumed_agent_of_an_old_generation_ends_its_ranks(job: AgentJob) -> None:
    await job.train("a", "b", spares=("spare",))
    stale_rank = job.rank_starts(rank=1)[0]["pid"]
    for pid in (job.agents["b"].pid, stale_rank):
        os.kill(pid, signal.SIGSTOP)  # like a machine that hangs
    await job.coordinator.publish(["a", "spare"])
    await job.until_training("a", "spare", generation=2)
    count = len(job.coordinator.heartbeats["b"])

    for pid in (stale_rank, job.agents["b"].pid):
        os.kill(pid, signal.SIGCONT)
    await job.until(lambda: has_ended(stale_rank), "its rank is ended")
    await job.until(lambda: len(job.coordinator.heartbeats["b"]) > count, "b sends heartbeats again")
    late = job.coordinator.heartbeats["b"][count:]
    assert {heartbeat.generation for heartbeat in late} == {2}, "a heartbeat of generation 1 is refused with 409"
    await job.until_phase("Standby", "b")
    assert not [row for row in job.rank_starts(pod="b") if row["generation"] != 1]
    assert not has_ended(job.rank_starts(rank=0, generation=2)[0]["pid"])
    assert not job.rank_starts(attempt=1), "no agent restarted because of it"


async def test_members_leave_a_generation_whose_store_hangs(job: AgentJob) -> None:
    await job.train("a", "b", spares=("spare",))
    job.agents["a"].signal(signal.SIGSTOP)
    try:
        os.kill(job.rank_starts(rank=1)[0]["pid"], signal.SIGKILL)  # b waits for a reply of the store
        await job.until(lambda: job.last_heartbeat("b").failures, "b reports the exit of its rank")
        await job.coordinator.publish(["b", "spare"])
        await job.until_training("b", "spare", generation=2)
    finally:
        job.agents["a"].signal(signal.SIGCONT)


async def test_agents_of_a_finished_job_exit_with_0(job: AgentJob) -> None:
    job.command_ranks("last-step", "10")
    job.start("a", "b", "c")
    await job.until_ready("a", "b", "c")
    await job.coordinator.publish(["a", "b", "c"])
    await job.until_ended("a", "b", "c")
    assert {agent.code for agent in job.agents.values()} == {0}
    assert all(job.last_heartbeat(name).phase == "Finished" for name in "abc")
    assert job.last_heartbeat("a").progress.step == 10


async def test_an_agent_that_finished_twice_waits_for_the_second_acknowledgement(job: AgentJob) -> None:
    await job.train("a", "b", spares=("spare",))
    job.command_ranks("exit-0", "0")
    await job.until_phase("Finished", "a")
    await job.coordinator.publish(["a", "spare"])
    await job.until_training("a", "spare", generation=2)
    job.coordinators[0].leader = False
    job.command_ranks("last-step", "10")
    await job.until(lambda: not [row for row in job.rank_starts() if not has_ended(row["pid"])], "the ranks ended")
    await asyncio.sleep(1.5)  # node 0 passes the exit barrier and would exit
    job.factory.poll()
    assert job.agents["a"].code is None
    job.coordinators[0].leader = True
    await job.until_ended("a", "spare")
    last = job.last_heartbeat("a")
    assert (last.generation, last.phase) == (2, "Finished")


async def test_sigterm_saves_and_ends_all_processes(job: AgentJob) -> None:
    await job.train("a", "b")
    children = list_descendants(job.agents["a"].pid)
    assert len(children) == 3, "the standby, the store of the ranks and a rank"
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    assert job.agents["a"].code == 75
    assert not [pid for pid in children if not has_ended(pid)]
    await job.until_phase("Yielded", "b")
    # The pod of the other member is ending, so b must not continue alone.
    job.agents["b"].signal(signal.SIGTERM)
    await job.until_ended("b")
    assert job.agents["b"].code == 75
    assert not [row for row in job.rank_starts() if not has_ended(row["pid"])]


async def test_sigterm_to_a_spare_ends_it_at_once(job: AgentJob) -> None:
    job.start("a")
    await job.until_ready("a")
    children = list_descendants(job.agents["a"].pid)
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    assert job.agents["a"].code == 75, "it has not finished"
    assert not [pid for pid in children if not has_ended(pid)]


async def test_agents_of_a_deleted_job_exit_at_once(job: AgentJob) -> None:
    await job.train("a", spares=("spare",), TRAINIUM_GRACE_SECONDS="600")
    os.kill(job.rank_starts()[0]["pid"], signal.SIGSTOP)  # it cannot save within its grace period
    job.coordinator.deleted = True
    job.coordinators[0].end_streams()
    await job.until_ended("a", "spare")
    assert has_ended(job.rank_starts()[0]["pid"])
    assert "the job no longer exists" in job.agents["a"].log


async def test_ranks_that_ignore_sigterm_are_killed_after_the_grace_period(job: AgentJob) -> None:
    await job.train("a", TRAINIUM_GRACE_SECONDS="0.5")
    os.kill(job.rank_starts()[0]["pid"], signal.SIGSTOP)
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    assert has_ended(job.rank_starts()[0]["pid"])


async def test_ranks_are_killed_within_the_grace_period_of_the_stored_pod(job: AgentJob) -> None:
    job.start("a", TRAINIUM_GRACE_SECONDS="100000")
    await job.until_ready("a")
    await job.coordinator.publish(["a"], grace_seconds=0.5)
    await job.until_training("a")
    os.kill(job.rank_starts()[0]["pid"], signal.SIGSTOP)
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    assert "the ranks may save for 0.5 s" in job.agents["a"].log
    assert has_ended(job.rank_starts()[0]["pid"])


async def test_ended_generations_leave_no_connection(job: AgentJob) -> None:
    agents = job.start("a", "b", WITHOUT_COLLECTOR="1")
    await job.until_ready("a", "b")
    counts = []
    for generation in range(1, 5):
        await job.coordinator.publish(["a", "b"], Transition.GRACEFUL)
        await job.until_training("a", "b", generation=generation)
        counts.append([count_sockets(agent.pid) for agent in agents])
    await job.until(
        lambda: all(count_sockets(agent.pid) <= count for agent, count in zip(agents, counts[1], strict=True)),
        f"as many sockets as in generation 2: {counts}",
    )


def count_sockets(pid: int) -> int:
    """Count the sockets of a process."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += entry.readlink().name.startswith("socket:")
    return count
