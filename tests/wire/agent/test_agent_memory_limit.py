"""A rank beyond the memory limit of its container: a real cgroup of this machine, where the tests may create one."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.suite.timeouts import until
from tests.wire.agent.agent_job import AgentFactory, AgentJob
from tests.wire.agent.test_agent_program import program_environment, start_generation
from trainium_agent.exits import memory_kills

LIMIT = 700 << 20
"""More than an agent of these tests maps, so that the kernel chooses the rank."""
PROGRAM = """
import os, time
print("start", os.environ["TRAINIUM_ATTEMPT"], flush=True)
ballast = [bytearray(b"x" * (16 << 20)) for _ in range(128)]
time.sleep(300)
"""


@pytest.fixture
def factory() -> Iterator[AgentFactory]:
    """Start the agents of the test in a memory cgroup with a limit."""
    for parent, files in reversed([*memory_kills._list_candidates(Path("/"))]):
        folder = parent / f"trainium-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            (folder / files.limit).write_text(str(LIMIT))
            break
    else:
        pytest.skip("no memory cgroup with a limit can be created on this machine")
    factory = AgentFactory()
    (folder / "cgroup.procs").write_text(str(factory.process.pid))
    yield factory
    factory.close()
    until(lambda: not (folder / "cgroup.procs").read_text(), "the end of all processes in the cgroup")
    folder.rmdir()


async def test_a_rank_beyond_the_memory_limit_is_a_memory_failure(job: AgentJob) -> None:
    await start_generation(job, "a", **program_environment(sys.executable, "-c", PROGRAM))
    verdict = await job.until_verdict("a")
    assert verdict.exit_code == 137
    heartbeat = job.last_heartbeat("a")
    assert heartbeat.attempt == 1, "it restarted once; a second kill without a step is the program's"
    lines = [event.line for event in heartbeat.kernel]  # with those of /dev/kmsg where it can be read
    assert any("the container reached its memory limit of 700 MiB" in line for line in lines)
    assert heartbeat.restarts[-1].cause == "OutOfMemory"
