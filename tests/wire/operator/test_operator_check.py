"""`trainium-operator check` against real servers of working and faulty operators."""

import asyncio
import time
from pathlib import Path

import pytest
import trustme

from tests.testing.operator.coordinator_fixture import CoordinatorFixture
from trainium_operator import main as operator_main
from trainium_operator.check import CheckVerdict, Installation, Replica, judge_replicas, poll, poll_until_ready
from trainium_operator.coordinator.certificates import renew_material
from trainium_operator.endpoints.servers import ProbeServer
from trainium_operator.http.tls import ServerTls


class OneReplica:
    """The coordinator and the probe server of one replica, at localhost."""

    def __init__(self, folder: Path) -> None:
        self.coordinator = CoordinatorFixture()
        self.problem = ""
        self.health = ProbeServer(live=lambda: "", ready=lambda: self.problem)
        self.authority = folder / "ca.crt"

    async def start(self) -> Installation:
        made = renew_material(None, ("localhost",), time.time())
        self.authority.write_bytes(made.ca_bundle)
        tls = ServerTls()
        tls.load(made.server_cert, made.server_key)
        probes = await self.health.start("127.0.0.1", 0)
        port = await self.coordinator.server.start("127.0.0.1", 0, tls.context)
        return Installation("localhost", 1, port, probes, self.authority)

    async def stop(self) -> None:
        await self.coordinator.server.stop()
        await self.health.stop()


async def poll_once(installed: Installation) -> CheckVerdict:
    return await asyncio.to_thread(poll, installed, resolve=lambda _name: ["127.0.0.1"])


async def test_a_working_replica_passes_and_each_fault_is_named(
    tmp_path: Path,
) -> None:
    replica = OneReplica(tmp_path)
    installed = await replica.start()
    try:
        works = await poll_once(installed)
        assert works == CheckVerdict(
            works=True,
            sentence="the operator works: the only replica is ready, 127.0.0.1 leads, certificates are its own",
        )
        replica.coordinator.leading = False
        assert "0 of 1 replicas lead: look at the Lease" in (await poll_once(installed)).sentence
        replica.coordinator.leading = True
        replica.problem = "the watch of pods is not in sync"
        verdict = await poll_once(installed)
        assert not verdict.works
        assert "127.0.0.1 is not ready (the watch of pods is not in sync)" in verdict.sentence
        replica.problem = ""
        trustme.CA().cert_pem.write_to_path(str(replica.authority))
        assert "shows a certificate that the release does not trust" in (await poll_once(installed)).sentence
        replica.authority.unlink()
        assert "no replica has written its certificates into the Secret yet" in (await poll_once(installed)).sentence
    finally:
        await replica.stop()
    trustme.CA().cert_pem.write_to_path(str(replica.authority))
    assert "127.0.0.1 does not answer (Connection refused)" in (await poll_once(installed)).sentence


def test_missing_replicas_and_two_leaders_fail_the_check() -> None:
    replica, standby = Replica("10.0.0.1", is_leader=True), Replica("10.0.0.2")
    assert judge_replicas("s", 2, [replica, standby]).works
    assert judge_replicas("s", 1, [replica, standby]).works, "an old pod that is terminating"
    assert "s has 1 of 2 replicas" in judge_replicas("s", 2, [replica]).sentence
    assert "2 of 2 replicas lead" in judge_replicas("s", 2, [replica, Replica("10.0.0.2", is_leader=True)]).sentence


def test_the_check_is_repeated_until_it_passes_or_times_out() -> None:
    bad, good = CheckVerdict(works=False, sentence="bad"), CheckVerdict(works=True, sentence="good")
    pauses: list[float] = []
    answers = iter([bad, bad, good])
    assert poll_until_ready(lambda: next(answers), 30, pauses.append) == good
    assert len(pauses) == 2
    assert poll_until_ready(lambda: bad, 3, pauses.append) == bad
    assert len(pauses) == 5


def test_a_failed_check_prints_one_line_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--service=localhost", f"--authority={tmp_path / 'none'}", "--seconds=0"]
    with pytest.raises(SystemExit) as ended:
        operator_main.main(["check", *arguments])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the operator does not work: ")
    assert "No such file or directory" in line
