"""The standby process and its manager: start of ranks, replacement of a lost standby, and imports before a fork."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.agent.pod_environment import environment
from trainium_agent.linux import kernel
from trainium_agent.ranks import standby as standby_process
from trainium_agent.ranks import standby_manager
from trainium_agent.ranks.output import OutputTail
from trainium_agent.ranks.processes import RankProcess, Reaper
from trainium_agent.ranks.standby import StandbyPlan, StartRequest
from trainium_agent.ranks.standby_manager import Standby, StandbyLostError, StandbyManager
from trainium_agent.settings import parse_settings
from trainium_agent.workload.workload import Workload

REQUEST = StartRequest(("--step", "1"), {"RANK": "0"}, "trainium-rank 0 of 1", "module:main")


class FakeStandby:
    """A standby whose replies are written by the test."""

    def __init__(self, pid: int = 100) -> None:
        ours, self.channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.standby = Standby(pid, ours)
        self._ours = ours

    def report(self, **body: Any) -> None:
        self.channel.send(json.dumps(body).encode())

    def close(self) -> None:
        self.channel.close()
        self._ours.close()


@pytest.fixture
def fake() -> Iterator[FakeStandby]:
    fake = FakeStandby()
    yield fake
    fake.close()


@pytest.fixture
def dev_null() -> Iterator[int]:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def test_a_standby_is_warm_from_its_report_until_its_end(fake: FakeStandby) -> None:
    assert not fake.standby.warm
    fake.report(ready=True, threads=[])
    assert fake.standby.warm
    fake.standby.record_end()
    assert not fake.standby.warm


def test_a_standby_that_ends_early_never_becomes_warm(fake: FakeStandby) -> None:
    fake.channel.close()
    assert not fake.standby.warm


def test_threads_that_a_fork_loses_are_logged(
    fake: FakeStandby, dev_null: int, caplog: pytest.LogCaptureFixture
) -> None:
    fake.report(ready=True, threads=["pool-1"])
    fake.report(pid=7)
    fake.standby.start(REQUEST, dev_null).run()
    assert "left with threads pool-1" in caplog.text


def test_a_start_sends_arguments_environment_output_and_permission_to_run(fake: FakeStandby, dev_null: int) -> None:
    fake.report(ready=True, threads=[])
    for pid in (7, 8):
        fake.report(pid=pid)
    forked = [fake.standby.start(REQUEST, dev_null) for _ in range(2)]
    assert [rank.pid for rank in forked] == [7, 8]
    packet, descriptors = standby_process.receive(fake.channel)
    received = StartRequest.decode(packet)
    assert ([*received.argv], received.environment) == (["--step", "1"], {"RANK": "0"})
    output, permission = descriptors
    assert os.fstat(output).st_rdev == Path(os.devnull).stat().st_rdev
    forked[0].run()
    assert os.read(permission, 2) == b"1"
    assert os.read(permission, 2) == b"", "the agent holds no end of it any more"
    for descriptor in descriptors:
        os.close(descriptor)
    forked[1].run()


def test_an_ended_standby_starts_no_rank(fake: FakeStandby, dev_null: int) -> None:
    fake.channel.close()
    for _ in range(2):
        with pytest.raises(StandbyLostError, match="the standby process"):
            fake.standby.start(REQUEST, dev_null)


def test_a_standby_that_does_not_answer_is_lost(
    fake: FakeStandby, dev_null: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.report(ready=True, threads=[])
    monkeypatch.setattr(standby_manager, "_START_SECONDS", 0.01)
    with pytest.raises(StandbyLostError, match="no answer in 0 s"):
        fake.standby.start(REQUEST, dev_null)
    assert not fake.standby.warm


WARM_RANK = """
import os, sys
from trainium_agent.linux import kernel
from trainium_agent.ranks.standby import StandbyPlan, StartRequest
from trainium_agent.ranks.standby_manager import Standby

kernel.adopt_orphans()
folder = sys.argv[1]
plan = StandbyPlan(modules=("library_of_the_agent",), python=sys.executable, environment={"PYTHONPATH": folder})
environment = {"PYTHONPATH": folder}
code = "import library_of_the_agent as library; print(library.__file__)"
read_end, write_end = os.pipe()
rank = Standby.spawn(plan).start(StartRequest([sys.executable, "-c", code], environment, "rank 0"), write_end)
rank.run()
os.close(write_end)
print(os.read(read_end, 65536).decode())
"""


def test_a_warm_rank_finds_what_its_pythonpath_names(tmp_path: Path) -> None:
    library = tmp_path / "library_of_the_agent.py"
    library.touch()
    run = subprocess.run(
        [sys.executable, "-c", WARM_RANK, str(tmp_path)], check=False, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.split() == [str(library)], run.stderr


class PodWithFakeStandbys:
    """A StandbyManager with fake standbys, which runs functions of the main thread at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, respawns: bool = True, python: str = "") -> None:
        self.reaper = Reaper()
        self.peers = [FakeStandby(101)]
        self.respawns = respawns
        self.plans: list[StandbyPlan] = []
        monkeypatch.setattr(Standby, "spawn", self._spawn)
        monkeypatch.setattr(os, "kill", lambda pid, _: self.end(pid))
        pump = SimpleNamespace(open=lambda source, _: (os.open(os.devnull, os.O_WRONLY), OutputTail(source.prefix)))
        self.standby_manager = StandbyManager(
            StandbyPlan(python=python), self.peers[0].standby, self.reaper, pump, lambda function: function()
        )

    def _spawn(self, plan: StandbyPlan) -> Standby:
        self.plans.append(plan)
        self.peers.append(FakeStandby(101 + len(self.peers)))
        self.peers[-1].report(ready=True, threads=[])
        self.peers[-1].report(pid=7)
        return self.peers[-1].standby

    def end(self, pid: int) -> None:
        """End a standby as the kernel does, and notify the reaper."""
        on_exit = self.reaper._watched.pop(pid, None) if self.respawns else None
        if on_exit is not None:
            threading.Thread(target=on_exit, args=(9,)).start()

    def start(self) -> RankProcess:
        return self.standby_manager.start(REQUEST, local_rank=0, rank=0, attempt=0, on_exit=lambda _: None)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def test_a_lost_standby_is_replaced_before_the_start_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = PodWithFakeStandbys(monkeypatch)
    pod.peers[0].channel.close()
    assert pod.start().pid == 7
    assert pod.standby_manager._standby.pid == 102
    assert pod.standby_manager.warm
    pod.close()


@pytest.mark.parametrize("report", [{"ready": True, "threads": ["pool-1"], "module": "colorsys"}, None])
def test_ranks_start_cold_if_modules_cannot_be_imported_ahead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, report: dict[str, Any] | None
) -> None:
    pod = PodWithFakeStandbys(monkeypatch, python="/usr/bin/python3")
    if report is None:
        pod.peers[0].channel.close()
    else:
        pod.peers[0].report(**report)
    assert pod.start().pid == 7
    assert pod.plans == [StandbyPlan()], "no other one is tried"
    reason = (
        "the process that imports them ended with code 9" if report is None else "module colorsys left threads pool-1"
    )
    assert f"the program's modules cannot be imported ahead ({reason}" in caplog.text
    pod.close()


def test_a_program_whose_imports_take_too_long_starts_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = PodWithFakeStandbys(monkeypatch, python="/usr/bin/python3")
    assert not pod.standby_manager.warm
    monkeypatch.setattr(standby_manager, "_WARM_UP_SECONDS", 0)
    assert not pod.standby_manager.warm
    assert pod.start().pid == 7
    assert pod.plans == [StandbyPlan()]
    pod.close()


def test_a_standby_that_cannot_be_replaced_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = PodWithFakeStandbys(monkeypatch, respawns=False)
    pod.peers[0].channel.close()
    monkeypatch.setattr(standby_manager, "_RESPAWN_SECONDS", 0.01)
    with pytest.raises(StandbyLostError, match="no new standby could be started"):
        pod.start()
    pod.close()


def test_a_closed_manager_spawns_no_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = PodWithFakeStandbys(monkeypatch, respawns=False)
    pod.standby_manager.close()
    pod.reaper._watched[101](0)
    assert len(pod.peers) == 1
    pod.close()


TWO_STARTS = """
import os, sys
from trainium_agent.linux import kernel
from trainium_agent.ranks import standby
from trainium_agent.ranks.standby_manager import Standby
kernel.adopt_orphans()
process = Standby(*standby.fork(standby.StandbyPlan()))
output = os.open(os.devnull, os.O_WRONLY)
for name, runs in (("given-up", False), ("run", True)):
    rank = process.start(standby.StartRequest(("touch", os.path.join(sys.argv[1], name)), {}, "rank"), output)
    rank.run() if runs else os.close(rank.permission)
    os.waitpid(rank.pid, 0)
process.kill()
"""


def test_a_rank_whose_start_was_given_up_runs_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", TWO_STARTS, str(tmp_path)], check=True, timeout=60)
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


ORPHAN = """
import socket
from trainium_agent.ranks import standby
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
standby.serve(theirs, 1, standby.StandbyPlan(entry="os:abort"))
"""


def test_a_standby_whose_agent_has_ended_exits() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], check=False, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("entry", "reported"),
    [
        ("no_such_module:main", "warming up failed; ranks will start cold"),
        ("leaves_when_imported:main", "an import left with 3; ranks will start cold"),
        ("os:abort", ""),
    ],
)
def test_an_entry_that_cannot_be_imported_is_reported(
    entry: str, reported: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "leaves_when_imported.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kernel, "lower_thread_priority", lambda: None)
    standby_process._import_modules(standby_process.StandbyPlan(entry=entry), None)
    assert reported in capsys.readouterr().err


def test_the_standby_of_our_trainer_imports_its_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warmed: list[str] = []
    warm = ModuleType("trainium_trainer.warm")
    warm.warm = warmed.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trainium_trainer.warm", warm)
    plan = Workload(parse_settings(environment(tmp_path))).ranks.plan
    monkeypatch.setattr(kernel, "lower_thread_priority", lambda: None)
    standby_process._import_modules(plan, None)
    assert warmed == [str(tmp_path / "trainer.yaml")]


def test_a_forked_rank_ignores_sigpipe() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as some other program may have left it
        standby_process._reset_signals()
        try:
            os.write(ours.fileno(), b"x")
        except BrokenPipeError:
            os._exit(7)
        os._exit(0)
    ours.close()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
