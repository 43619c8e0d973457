"""The agent's end of the standby: what it answers, when it is given up, and what is started in its place."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pod_environment import environment

from trainium_agent.ranks import standby as standby_process
from trainium_agent.ranks import standby_keeper
from trainium_agent.ranks.output import Tail
from trainium_agent.ranks.processes import Reaper
from trainium_agent.ranks.standby import StartRequest
from trainium_agent.ranks.standby_keeper import Standby, StandbyKeeper, StandbyLostError
from trainium_agent.settings import settings_from
from trainium_trainer import agent_workload as trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_agent.ranks.processes import RankProcess

REQUEST = StartRequest(("--step", "1"), {"RANK": "0"}, "trainium-rank 0 of 1", "module:main")


class Peer:
    """A standby whose process is the test."""

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
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def nowhere() -> Iterator[int]:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def test_a_standby_is_warm_once_it_has_reported_and_cold_again_when_it_has_ended(peer: Peer) -> None:
    assert not peer.standby.warm
    peer.report(ready=True, threads=[])
    assert peer.standby.warm
    peer.standby.ended()
    assert not peer.standby.warm


def test_a_standby_that_ends_before_it_is_warm_never_becomes_it(peer: Peer) -> None:
    peer.channel.close()
    assert not peer.standby.warm


def test_threads_that_a_fork_would_lose_are_reported(
    peer: Peer, nowhere: int, caplog: pytest.LogCaptureFixture
) -> None:
    peer.report(ready=True, threads=["pool-1"])
    peer.report(pid=7)
    assert peer.standby.start(REQUEST, nowhere) == 7
    assert "left with threads pool-1" in caplog.text


def test_a_start_carries_what_the_rank_is_to_be_and_where_its_output_goes(peer: Peer, nowhere: int) -> None:
    peer.report(ready=True, threads=[])
    for pid in (7, 8):
        peer.report(pid=pid)
    assert [peer.standby.start(REQUEST, nowhere) for _ in range(2)] == [7, 8]
    packet, descriptors = standby_process.receive(peer.channel)
    received = StartRequest.decode(packet)
    assert ([*received.argv], received.environment) == (["--step", "1"], {"RANK": "0"})
    assert os.fstat(descriptors[0]).st_rdev == Path(os.devnull).stat().st_rdev
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_standby_that_has_ended_starts_nothing(peer: Peer, nowhere: int) -> None:
    peer.channel.close()
    for _ in range(2):
        with pytest.raises(StandbyLostError, match="the standby process"):
            peer.standby.start(REQUEST, nowhere)


def test_a_standby_that_does_not_answer_is_lost(peer: Peer, nowhere: int, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.report(ready=True, threads=[])
    monkeypatch.setattr(standby_keeper, "_START_SECONDS", 0.01)
    with pytest.raises(StandbyLostError, match="no answer in 0 s"):
        peer.standby.start(REQUEST, nowhere)
    assert not peer.standby.warm


# ---- the keeper ---------------------------------------------------------------------------------------------------


class Pod:
    """A keeper whose standbys are made by the test; what it wants done in the main thread is done at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, respawns: bool = True) -> None:
        self.reaper = Reaper()
        self.peers = [Peer(101)]
        self.respawns = respawns
        monkeypatch.setattr(Standby, "spawn", self._spawn)
        monkeypatch.setattr(standby_keeper.os, "kill", lambda pid, _: self.end(pid))
        pump = SimpleNamespace(open=lambda speaker, _: (os.open(os.devnull, os.O_WRONLY), Tail(speaker.prefix)))
        self.keeper = StandbyKeeper(SimpleNamespace(), self.peers[0].standby, self.reaper, pump, lambda do: do())

    def _spawn(self, _: Any) -> Standby:
        self.peers.append(Peer(101 + len(self.peers)))
        self.peers[-1].report(ready=True, threads=[])
        self.peers[-1].report(pid=7)
        return self.peers[-1].standby

    def end(self, pid: int) -> None:
        """End a standby as the kernel does, and notify the reaper."""
        if self.respawns:
            threading.Thread(target=self.reaper._watched.pop(pid), args=(9,)).start()

    def start(self) -> RankProcess:
        return self.keeper.start(REQUEST, local_rank=0, rank=0, attempt=0, on_exit=lambda _: None)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def test_a_rank_is_started_by_a_new_standby_when_the_first_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod(monkeypatch)
    pod.peers[0].channel.close()
    assert pod.start().pid == 7
    assert pod.keeper.pid == 102
    assert pod.keeper.warm
    pod.close()


def test_when_no_new_standby_comes_the_pod_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod(monkeypatch, respawns=False)
    pod.peers[0].channel.close()
    monkeypatch.setattr(standby_keeper, "_RESPAWN_SECONDS", 0.01)
    with pytest.raises(StandbyLostError, match="no new standby could be started"):
        pod.start()
    pod.close()


def test_a_pod_that_ends_makes_no_new_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod(monkeypatch, respawns=False)
    pod.keeper.close()
    pod.reaper._watched[101](0)
    assert len(pod.peers) == 1
    pod.close()


# ---- the process ----------------------------------------------------------------------------------------------------

ORPHAN = """
import socket
from trainium_agent.ranks import standby
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
standby.serve(theirs, 1, standby.StandbyPlan(entry="os:abort"))
"""


def test_a_standby_whose_agent_has_ended_already_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], check=False, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("entry", "reported"),
    [
        ("a_module_that_nobody_has:main", "warming up failed; ranks will start cold"),
        ("leaves_when_imported:main", "an import left with 3; ranks will start cold"),
        ("os:abort", ""),
    ],
)
def test_what_cannot_be_imported_is_left_for_the_rank_to_report(
    entry: str, reported: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "leaves_when_imported.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(standby_process.kernel, "lower_thread_priority", lambda: None)
    standby_process._import_everything(standby_process.StandbyPlan(entry=entry))
    assert reported in capsys.readouterr().err


def test_before_a_rank_of_this_trainer_all_that_it_needs_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    warmed: list[str] = []
    warm = ModuleType("trainium_trainer.warm")
    warm.warm = warmed.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trainium_trainer.warm", warm)
    monkeypatch.setattr(trainer.importlib, "import_module", lambda _: None)
    monkeypatch.setattr(trainer, "stop_reverse_lookups", lambda: None)
    plan = trainer.Trainer(settings_from(environment(tmp_path))).plan
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "trainium_trainer.warm", warm)
    monkeypatch.setattr(standby_process.kernel, "lower_thread_priority", lambda: None)
    standby_process._import_everything(plan)
    assert warmed == [str(tmp_path / "trainer.yaml")]
