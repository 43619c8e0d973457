"""Processes that the kernel killed for memory, as the counters of cgroups show them."""

import time
from pathlib import Path

import pytest

from tests.unit.agent.pod_environment import ended_rank
from trainium_agent.exits.diagnosis import ExitDiagnoser
from trainium_agent.exits.kernel_log import KernelEvents
from trainium_agent.exits.memory_kills import MemoryKills
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import classify_exit, classify_failed_pod

POD = "/kubepods/burstable/pod1/abc"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate"
V1_MOUNTS = "\n".join(
    (
        "30 23 0:25 / /sys/fs/cgroup ro - tmpfs tmpfs rw,mode=755",
        f"31 30 0:26 {POD} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct",
        f"32 30 0:27 {POD} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
        f"33 30 0:28 {POD} /sys/fs/cgroup/unified ro - cgroup2 cgroup rw",
    )
)


class Machine:
    """A root with the files that a container sees of its cgroup."""

    def __init__(self, root: Path, version: int, path: str = "/", limit: str = str(512 << 20)) -> None:
        self.root, self.version = root, version
        self.folder = root / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
        self.folder.mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)
        cgroups = f"0::{path}\n" if version == 2 else f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/\n"
        (root / "proc/self/cgroup").write_text(cgroups)
        (root / "proc/self/mountinfo").write_text(V2_MOUNT if version == 2 else V1_MOUNTS)
        (self.folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(f"{limit}\n")
        self.count(0, 0)

    def count(self, kills: int, limit_hits: int) -> None:
        if self.version == 2:
            text = f"low 0\nhigh 0\nmax {limit_hits}\noom {limit_hits}\noom_kill {kills}\noom_group_kill 0\n"
            (self.folder / "memory.events").write_text(text)
        else:
            (self.folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
            (self.folder / "memory.failcnt").write_text(f"{limit_hits}\n")


@pytest.mark.parametrize(("version", "path"), [(1, POD), (1, "/"), (2, "/"), (2, POD)])
@pytest.mark.parametrize(
    ("limit_hits", "limit", "cause"),
    [(7, str(512 << 20), Cause.OUT_OF_MEMORY), (0, str(512 << 20), Cause.HOST), (0, "", Cause.OUT_OF_MEMORY)],
)
def test_a_kill_is_attributed_to_the_limit_or_to_the_node(
    tmp_path: Path, version: int, path: str, limit_hits: int, limit: str, cause: Cause
) -> None:
    machine = Machine(tmp_path, version, path, limit or ("max" if version == 2 else "9223372036854771712"))
    events = KernelEvents(lambda: None)
    kills = MemoryKills(events, tmp_path)
    kills.observe()
    assert events.newest == ()
    machine.count(1, limit_hits)
    kills.observe()
    kills.observe()
    (event,) = events.newest
    assert event.at == pytest.approx(time.time(), abs=60)
    for code in (137, 1, 139):  # a rank whose child was killed ends with another code
        assert classify_exit(code, kernel=[event.line]).cause is cause
    assert classify_exit(64, kernel=[event.line]).cause is Cause.USER_ERROR


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("seconds", "cause"), [(0.5, Cause.OUT_OF_MEMORY), (60.0, Cause.HOST)])
def test_a_limit_that_is_counted_shortly_before_its_kill_explains_the_kill(
    tmp_path: Path, version: int, seconds: float, cause: Cause
) -> None:
    machine = Machine(tmp_path, version)
    events, now = KernelEvents(lambda: None), 1000.0
    kills = MemoryKills(events, tmp_path, clock=lambda: now)
    machine.count(0, 7)
    kills.observe()
    machine.count(1, 7)
    now += seconds
    kills.observe()
    assert classify_exit(137, kernel=[event.line for event in events.newest]).cause is cause


@pytest.mark.parametrize(("peak", "cause"), [((512 << 20) - 65536, Cause.OUT_OF_MEMORY), (300 << 20, Cause.HOST)])
def test_a_kernel_that_counts_no_hits_of_the_limit_shows_them_by_the_highest_usage(
    tmp_path: Path, peak: int, cause: Cause
) -> None:
    """Linux 6.18 leaves memory.failcnt at 0 when it kills at the limit of a v1 cgroup."""
    machine, events = Machine(tmp_path, 1), KernelEvents(lambda: None)
    kills = MemoryKills(events, tmp_path)
    machine.count(1, 0)
    (machine.folder / "memory.max_usage_in_bytes").write_text(f"{peak}\n")
    kills.observe()
    assert classify_exit(137, kernel=[event.line for event in events.newest]).cause is cause


@pytest.mark.parametrize("limit_hits", [7, 0], ids=["counted", "by the highest usage"])
@pytest.mark.parametrize(("cache", "cause"), [(10 << 20, Cause.OUT_OF_MEMORY), (400 << 20, Cause.HOST)])
def test_page_cache_that_reached_the_limit_of_a_v1_cgroup_explains_no_kill(
    tmp_path: Path, limit_hits: int, cache: int, cause: Cause
) -> None:
    machine, events = Machine(tmp_path, 1), KernelEvents(lambda: None)
    (machine.folder / "memory.max_usage_in_bytes").write_text(f"{512 << 20}\n")
    (machine.folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n")
    kills = MemoryKills(events, tmp_path)
    machine.count(1, limit_hits)
    kills.observe()
    assert classify_exit(137, kernel=[event.line for event in events.newest]).cause is cause


@pytest.mark.parametrize("kept", ["nothing", "no kills", "no memory controller"])
def test_counters_that_cannot_be_read_explain_nothing(tmp_path: Path, kept: str) -> None:
    if kept != "nothing":
        machine = Machine(tmp_path, 1)
        if kept == "no kills":  # before Linux 4.13
            (machine.folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
        else:
            (tmp_path / "proc/self/mountinfo").write_text(
                "30 23 0:26 / /sys/fs/cgroup/unified ro - cgroup2 cgroup rw\n"
            )
    events = KernelEvents(lambda: None)
    MemoryKills(events, tmp_path).observe()
    assert events.newest == ()


def test_a_kill_of_the_container_explains_more_than_a_line_of_the_whole_node(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    diagnoser = ExitDiagnoser(None, lambda: None)
    diagnoser.memory_kills = MemoryKills(diagnoser.kernel, tmp_path)
    assert diagnoser.diagnose(ended_rank(137)).verdict.cause is Cause.CRASH
    machine.count(1, 0)
    diagnoser.kernel.add("Out of memory: Killed process 4242 (python) total-vm:1kB", time.time())
    assert diagnoser.diagnose(ended_rank(137)).verdict.cause is Cause.HOST


def test_a_pod_that_outlived_a_kill_for_memory_ends_for_its_own_reason() -> None:
    """Containerd keeps the reason of a container in which any process was killed."""
    assert classify_failed_pod(reason="OOMKilled", code=137, disrupted=False) is Cause.OUT_OF_MEMORY
    assert classify_failed_pod(reason="OOMKilled", code=75, disrupted=False) is Cause.POD_LOST
    assert classify_failed_pod(reason="OOMKilled", code=80, disrupted=False) is Cause.DEVICE
