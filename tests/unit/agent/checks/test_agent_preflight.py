"""The checks before a worker may join: each one's finding, and that nothing else than wrong numbers fails a node."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pod_environment import environment

from trainium_agent.checks import node_checks, preflight
from trainium_agent.checks.node_checks import NodeChecks, NodeTask
from trainium_agent.checks.preflight import driver_version, mismatch, runtime_version
from trainium_agent.ranks.standby_keeper import StandbyLostError
from trainium_agent.settings import QUICK_CHECKS, AgentSettings, settings_from
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.spec.health import PreflightCheck as Check
from trainium_trainer.checks.node_test import product_is_right

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainium_agent.ranks.standby import StartRequest
    from trainium_contract.wire.messages import CheckResult


def settings(tmp_path: Path, **changes: Any) -> AgentSettings:
    given = {"TRAINIUM_NODE_NAME": "node-3", **{key: value for key, value in changes.items() if key.isupper()}}
    made = settings_from(environment(tmp_path, **given))
    return replace(made, **{key: value for key, value in changes.items() if not key.isupper()})


def passed(found: AgentSettings) -> dict[str, bool]:
    findings = preflight.preflight(found)
    return {result.check.value: result.passed for result in preflight.results(found, findings, 0.01)}


def test_the_checks_are_those_that_the_operator_names(tmp_path: Path) -> None:
    assert settings(tmp_path).checks == QUICK_CHECKS
    assert settings(tmp_path, TRAINIUM_PREFLIGHT="").checks == frozenset()
    named = settings(tmp_path, TRAINIUM_PREFLIGHT="Devices,Matmul,OfTheFuture", TRAINIUM_PREFLIGHT_SECONDS="7")
    assert named.checks == {Check.DEVICES, Check.MATMUL}
    assert named.check_seconds == 7.0


def test_a_fit_pod_passes_every_quick_check(tmp_path: Path) -> None:
    assert passed(settings(tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))) == {
        "Devices": True,
        "Memory": True,
        "Disk": True,
    }


def test_a_check_that_is_not_asked_for_is_not_made(tmp_path: Path) -> None:
    found = settings(tmp_path, TRAINIUM_PREFLIGHT="Memory", TRAINIUM_NEURON_DEVICES="99")
    assert passed(found) == {"Memory": True}
    assert not [finding for finding in preflight.preflight(found) if finding.check is Check.DEVICES]


def test_a_scratch_folder_that_cannot_be_written_stops_nothing_but_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = settings(tmp_path, XDG_CACHE_HOME=str(tmp_path / "file" / "cache"))
    (finding,) = [each for each in preflight.preflight(found) if each.check is Check.DISK]
    assert finding.code is None
    assert "not writable" in finding.sentence
    assert passed(found)["Disk"] is False


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        ("MemTotal: 8 kB\nMemAvailable:   200000 kB\n", 1),
        ("MemAvailable: 9000000 kB\n", 0),
        ("MemAvailable: much\n", 0),
        ("nonsense", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_host_memory_that_cannot_be_read_reports_nothing(tmp_path: Path, text: str | None, findings: int) -> None:
    meminfo = tmp_path / "meminfo"
    if text is not None:
        meminfo.write_text(text)
    assert len(list(preflight._memory(2, meminfo))) == findings


@pytest.mark.parametrize(
    ("theirs", "asked", "answered", "good"),
    [(100.0, 99.9, 100.1, True), (107.0, 99.9, 100.1, False), (93.0, 99.9, 100.1, False), (106.0, 98.0, 102.0, True)],
)
def test_clocks_may_be_seconds_apart_and_half_the_round_trip(
    theirs: float, asked: float, answered: float, good: bool
) -> None:
    result = preflight.compare_clocks(theirs, asked, answered)
    assert result.passed is good
    assert ("NTP" in result.detail) is not good


def test_a_product_of_whole_numbers_is_exact_and_a_wrong_one_is_seen() -> None:
    assert product_is_right(0)

    def flipped(left: Any, right: Any) -> Any:
        product = left @ right
        product[3, 5] += 1.0
        return product

    assert not product_is_right(0, flipped)


class Process:
    def __init__(self, on_kill: Callable[[], None], *, ends: bool) -> None:
        self.alive = not ends
        self._on_kill = on_kill

    def signal(self, _: int) -> None:
        self.alive = False
        self._on_kill()


class Keeper:
    """A standby whose processes leave the given outcomes in place of real ones."""

    def __init__(self, texts: list[str | None], *, ends: bool = True, warm: bool = True) -> None:
        self.texts, self.ends, self.warm = texts, ends, warm
        self.killed = 0

    def start(self, request: StartRequest, **_: Any) -> Process:
        task = NodeTask(**json.loads(request.argv[0]))
        if not self.texts:
            raise StandbyLostError("gone")
        text = self.texts[task.index]
        if text is not None:
            task.result.write_text(text)
        return Process(self._kill, ends=self.ends)

    def _kill(self) -> None:
        self.killed += 1


def checked(found: AgentSettings, keeper: Keeper) -> tuple[str, dict[str, CheckResult]]:
    reported: dict[str, CheckResult] = {}
    checks = NodeChecks(found, keeper, report=lambda result: reported.update({result.check.value: result}))
    return checks.run(), reported


GOOD = '{"matmul": true, "loopback": true}'


def active(tmp_path: Path, seconds: float = 5.0, processes: int = 2) -> AgentSettings:
    return settings(
        tmp_path,
        TRAINIUM_PREFLIGHT="Matmul,Loopback",
        TRAINIUM_PROCESSES_PER_NODE=str(processes),
        check_seconds=seconds,
    )


def test_right_numbers_make_a_node_fit(tmp_path: Path) -> None:
    unfit, reported = checked(active(tmp_path), Keeper([GOOD, GOOD]))
    assert unfit == ""
    assert {name: (result.passed, result.detail) for name, result in reported.items()} == {
        "Matmul": (True, ""),
        "Loopback": (True, ""),
    }
    assert not (tmp_path / "memory" / "preflight").exists()


def test_wrong_numbers_name_the_core(tmp_path: Path) -> None:
    unfit, reported = checked(active(tmp_path), Keeper([GOOD, '{"matmul": false, "loopback": null}']))
    assert unfit == "node node-3: a matrix product is wrong on core 1"
    assert not reported["Matmul"].passed
    assert reported["Loopback"].passed


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "null", '{"matmul": "false"}', '{"matmul": 0}', '{"matmul": null}', "\x00"]
)
def test_an_outcome_that_cannot_be_read_counts_as_passed_and_is_reported(tmp_path: Path, text: str | None) -> None:
    unfit, reported = checked(active(tmp_path), Keeper([GOOD, text]))
    assert unfit == ""
    assert reported["Matmul"].passed
    assert "counts as passed" in reported["Matmul"].detail


@given(st.text('{}[]:,"matmul 019.eE-\\', max_size=40))
def test_no_text_in_a_result_fails_a_node_or_the_agent(text: str) -> None:
    assert isinstance(node_checks._read(_Task(text)), dict)


class _Task:
    def __init__(self, text: str) -> None:
        self.result = self
        self.text = text

    def read_text(self, encoding: str) -> str:
        return self.text


def test_what_does_not_end_within_the_budget_is_ended_and_counts_as_passed(tmp_path: Path) -> None:
    keeper = Keeper([None, None], ends=False)
    unfit, reported = checked(active(tmp_path, seconds=0.1), keeper)
    assert unfit == ""
    assert keeper.killed == 2
    assert "did not end in time" in reported["Matmul"].detail


@pytest.mark.parametrize("keeper", [Keeper([]), Keeper([GOOD, GOOD], warm=False)])
def test_a_standby_that_is_lost_or_never_warm_fails_no_node(tmp_path: Path, keeper: Keeper) -> None:
    unfit, reported = checked(active(tmp_path, seconds=0.1), keeper)
    assert unfit == ""
    assert all(result.passed for result in reported.values())


def test_one_process_alone_has_nobody_to_sum_with(tmp_path: Path) -> None:
    _, reported = checked(active(tmp_path, processes=1), Keeper([GOOD]))
    assert set(reported) == {"Matmul"}


def test_without_such_checks_a_node_is_fit_at_once(tmp_path: Path) -> None:
    checks = NodeChecks(settings(tmp_path), Keeper([]), report=lambda _: None)
    assert checks.run() == ""


def test_a_pod_that_ends_does_not_wait_for_its_checks(tmp_path: Path) -> None:
    keeper = Keeper([None, None], ends=False)
    checks = NodeChecks(active(tmp_path, seconds=60), keeper, report=lambda _: None)
    thread = threading.Thread(target=checks.run)
    thread.start()
    checks.cancel()
    thread.join(5)
    assert not thread.is_alive()
    assert keeper.killed in (0, 2)


def test_a_worker_that_may_open_too_few_files_for_the_jobs_size_reports_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_limit", lambda: 1024)
    found = settings(tmp_path)

    def wrong() -> list[preflight.PreflightFinding]:
        return [finding for finding in preflight.preflight(found) if finding.code is not None]

    assert not wrong(), "the operator does not say how large the job is"
    (tmp_path / "nodes").write_text("4\n")
    assert not wrong()
    (tmp_path / "nodes").write_text("500\n")
    (finding,) = wrong()
    assert finding.code == 64
    assert finding.sentence.startswith("Too few open files: a process may open 1,024 files at most (ulimit -Hn), but ")
    assert "are needed with 1,000 training processes: raise LimitNOFILE" in finding.sentence


def test_a_channel_beyond_the_first_1024_descriptors_can_be_waited_for() -> None:
    import fcntl
    import os
    import socket

    from trainium_agent.linux.open_files import raise_limit
    from trainium_agent.ranks.standby import is_readable

    limit = raise_limit()
    if 0 <= limit < 2000:
        pytest.skip("this machine lets no process open so many files")
    mine, theirs = socket.socketpair()
    with theirs, mine, socket.socket(fileno=fcntl.fcntl(mine.fileno(), fcntl.F_DUPFD, 1500)) as high:
        assert high.fileno() >= 1500
        assert not is_readable(high, 0)
        theirs.send(b"x")
        assert is_readable(high, 10)
        os.read(high.fileno(), 1)
        theirs.close()
        assert is_readable(high, -1), "the end counts, and a time that is over is none"


STATUS = """Package: aws-neuronx-collectives
Status: install ok installed
Version: 2.99.1.0

Package: aws-neuronx-runtime-lib
Status: install ok installed
Priority: optional
Maintainer: x
Version: 2.32.8.0-abc
Description: y

Package: zlib1g
Version: 1:1.3
"""


@pytest.mark.parametrize(
    ("driver", "runtime", "advice"),
    [
        ((2, 26), (2, 32), "update the node"),
        ((2, 19), (2, 35), "update the node"),
        ((2, 29), (2, 32), "use an image"),
        ((2, 31), (2, 20), "use an image"),
        ((2, 27), (2, 32), ""),
        ((2, 26), (2, 31), ""),
        ((2, 29), (2, 33), ""),
        ((2, 31), (2, 35), ""),
        (None, (2, 32), ""),
        ((2, 26), None, ""),
    ],
)
def test_pairs_that_do_not_work_together_are_reported_with_what_to_do(
    driver: tuple[int, int] | None, runtime: tuple[int, int] | None, advice: str
) -> None:
    sentence = mismatch(driver, runtime)
    assert bool(sentence) is bool(advice)
    assert advice in sentence


def test_versions_are_read_of_the_module_and_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("2.26.10.0\n")
    (tmp_path / "status").write_text(STATUS)
    assert driver_version(tmp_path / "version") == (2, 26)
    assert runtime_version(tmp_path / "status") == (2, 32)
    assert driver_version(tmp_path / "none") is None
    assert runtime_version(tmp_path / "none") is None


@given(st.text(max_size=300))
def test_any_content_is_no_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "odd"
    path.write_text(text, encoding="utf-8", errors="replace")
    assert driver_version(path) is None or "." in text
    runtime_version(path)


def test_a_pair_that_does_not_work_is_reported_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "driver_version", lambda: (2, 26))
    monkeypatch.setattr(preflight, "runtime_version", lambda: (2, 32))
    (finding,) = preflight._versions(16)
    assert (finding.code, finding.check) == (None, PreflightCheck.DEVICES)
    assert finding.sentence.startswith("The node's Neuron driver 2.26 and the image's runtime 2.32")
    assert list(preflight._versions(0)) == [], "a worker without devices does not ask"
