"""`trainium-operator check` against real servers: its verdict on an operator that works, and on each that does not."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import trustme

from tests.testing.operator.coordinator_world import World
from trainium_operator import main as operator_main
from trainium_operator.check import CheckVerdict, Installed, Replica, poll, until_it_works, verdict
from trainium_operator.coordinator.certificates import renew_material
from trainium_operator.endpoints.servers import ProbeServer
from trainium_operator.http.tls import ServerTls

if TYPE_CHECKING:
    from pathlib import Path


class OneReplica:
    """The coordinator and the probes of one process, at localhost."""

    def __init__(self, folder: Path) -> None:
        self.world = World()
        self.problem = ""
        self.health = ProbeServer(live=lambda: "", ready=lambda: self.problem)
        self.authority = folder / "ca.crt"

    async def start(self) -> Installed:
        made = renew_material(None, ("localhost",), time.time())
        self.authority.write_bytes(made.ca_bundle)
        tls = ServerTls()
        tls.load(made.server_cert, made.server_key)
        probes = await self.health.start("127.0.0.1", 0)
        port = await self.world.server.start("127.0.0.1", 0, tls.context)
        return Installed("localhost", 1, port, probes, self.authority)

    async def stop(self) -> None:
        await self.world.server.stop()
        await self.health.stop()


async def verdict_of(installed: Installed) -> CheckVerdict:
    return await asyncio.to_thread(poll, installed, resolve=lambda _name: ["127.0.0.1"])


async def test_a_replica_that_is_ready_leads_and_shows_its_certificate_works_and_each_fault_is_named(
    tmp_path: Path,
) -> None:
    one = OneReplica(tmp_path)
    installed = await one.start()
    try:
        works = await verdict_of(installed)
        assert works == CheckVerdict(
            works=True,
            sentence="the operator works: the only replica is ready, 127.0.0.1 leads, certificates are its own",
        )
        one.world.leading = False
        assert "0 of 1 replicas lead: look at the Lease" in (await verdict_of(installed)).sentence
        one.world.leading = True
        one.problem = "the watch of pods is not in sync"
        found = await verdict_of(installed)
        assert not found.works
        assert "127.0.0.1 is not ready (the watch of pods is not in sync)" in found.sentence
        one.problem = ""
        trustme.CA().cert_pem.write_to_path(str(one.authority))
        assert "shows a certificate that the release does not trust" in (await verdict_of(installed)).sentence
        one.authority.unlink()
        assert "no replica has written its certificates into the Secret yet" in (await verdict_of(installed)).sentence
    finally:
        await one.stop()
    trustme.CA().cert_pem.write_to_path(str(one.authority))
    assert "127.0.0.1 does not answer (Connection refused)" in (await verdict_of(installed)).sentence


def test_fewer_replicas_than_asked_for_and_two_leaders_do_not_work() -> None:
    one, other = Replica("10.0.0.1", leads=True), Replica("10.0.0.2")
    assert verdict("s", 2, [one, other]).works
    assert verdict("s", 1, [one, other]).works, "an old pod that is about to go"
    assert "s has 1 of 2 replicas" in verdict("s", 2, [one]).sentence
    assert "2 of 2 replicas lead" in verdict("s", 2, [one, Replica("10.0.0.2", leads=True)]).sentence


def test_it_waits_until_it_works_or_the_time_is_over() -> None:
    bad, good = CheckVerdict(works=False, sentence="bad"), CheckVerdict(works=True, sentence="good")
    pauses: list[float] = []
    answers = iter([bad, bad, good])
    assert until_it_works(lambda: next(answers), 30, pauses.append) == good
    assert len(pauses) == 2
    assert until_it_works(lambda: bad, 3, pauses.append) == bad
    assert len(pauses) == 5


def test_the_command_prints_one_sentence_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--service=localhost", f"--authority={tmp_path / 'none'}", "--seconds=0"]
    with pytest.raises(SystemExit) as ended:
        operator_main.main(["check", *given])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the operator does not work: ")
    assert "No such file or directory" in line
