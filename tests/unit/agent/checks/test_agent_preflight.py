"""Checks before a worker may join: what each finds, and that only wrong numbers fail a node."""

import fcntl
import json
import os
import shutil
import socket
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.agent.pod_environment import environment
from trainium_agent.checks import node_checks, preflight
from trainium_agent.checks.node_checks import NodeChecks
from trainium_agent.checks.preflight import explain_version_mismatch, read_driver_version, read_runtime_version
from trainium_agent.ranks.standby import StartRequest, is_readable
from trainium_agent.ranks.standby_manager import StandbyLostError
from trainium_agent.settings import QUICK_CHECKS, AgentSettings, parse_settings
from trainium_contract.exit_codes import ExitCode
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.check_tasks import NodeTask
from trainium_contract.wire.messages import CheckResult
from trainium_contract.worker_process.open_files import raise_limit
from trainium_trainer.checks import pair_test
from trainium_trainer.checks.pair_test import has_exact_product


def build_settings(tmp_path: Path, **changes: Any) -> AgentSettings:
    variables = {"TRAINIUM_NODE_NAME": "node-3", **{key: value for key, value in changes.items() if key.isupper()}}
    return replace(
        parse_settings(environment(tmp_path, **variables)),
        **{key: value for key, value in changes.items() if not key.isupper()},
    )


def quick_check_results(agent_settings: AgentSettings) -> dict[str, bool]:
    findings = preflight.run_preflight(agent_settings)
    return {result.check.value: result.passed for result in preflight.check_results(agent_settings, findings, 0.01)}


def fatal_findings(agent_settings: AgentSettings, devices: Path = Path("/dev")) -> list[preflight.PreflightFinding]:
    return [finding for finding in preflight.run_preflight(agent_settings, devices) if finding.code is not None]


def test_the_environment_selects_the_checks(tmp_path: Path) -> None:
    assert build_settings(tmp_path).checks == QUICK_CHECKS
    assert build_settings(tmp_path, TRAINIUM_PREFLIGHT="").checks == frozenset()
    named = build_settings(tmp_path, TRAINIUM_PREFLIGHT="Devices,Matmul,OfTheFuture", TRAINIUM_PREFLIGHT_SECONDS="7")
    assert named.checks == {PreflightCheck.DEVICES, PreflightCheck.MATMUL}
    assert named.check_seconds == 7.0


def test_a_healthy_pod_passes_every_quick_check(tmp_path: Path) -> None:
    assert quick_check_results(build_settings(tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))) == {
        "Devices": True,
        "Memory": True,
        "Disk": True,
    }


def test_a_check_that_is_not_selected_does_not_run(tmp_path: Path) -> None:
    agent_settings = build_settings(tmp_path, TRAINIUM_PREFLIGHT="Memory", TRAINIUM_NEURON_DEVICES="99")
    assert quick_check_results(agent_settings) == {"Memory": True}
    assert not [
        finding for finding in preflight.run_preflight(agent_settings) if finding.check is PreflightCheck.DEVICES
    ]


def test_a_healthy_pod_has_no_fatal_finding(tmp_path: Path) -> None:
    assert fatal_findings(build_settings(tmp_path)) == []


@pytest.mark.parametrize(
    ("variable", "path", "sentence"),
    [
        ("TRAINIUM_CONFIG", "none.yaml", "none.yaml cannot be read"),
        ("TRAINIUM_CONFIG", "empty", "is empty"),
        ("TRAINIUM_MEMORY_DIR", "empty/memory", "not writable"),
    ],
)
def test_an_unusable_path_is_a_user_error(tmp_path: Path, variable: str, path: str, sentence: str) -> None:
    (tmp_path / "empty").write_text("\n")
    (finding,) = fatal_findings(build_settings(tmp_path, **{variable: str(tmp_path / path)}))
    assert finding.code is ExitCode.USER_ERROR
    assert sentence in finding.sentence


def test_missing_devices_are_a_device_fault(tmp_path: Path) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("neuron0", "neuron1", "neuron_monitor"):
        (devices / name).touch()
    agent_settings = build_settings(tmp_path, TRAINIUM_NEURON_DEVICES="2")
    assert fatal_findings(agent_settings, devices) == []
    (devices / "neuron1").unlink()
    (finding,) = fatal_findings(agent_settings, devices)
    assert finding.code is ExitCode.DEVICE_FAULT
    assert "1 Neuron devices are visible" in finding.sentence


def test_an_unresolvable_coordinator_is_a_warning(tmp_path: Path) -> None:
    findings = preflight.run_preflight(build_settings(tmp_path, TRAINIUM_COORDINATOR="no-such-host.invalid:1"))
    assert [finding.code for finding in findings if "no-such-host" in finding.sentence] == [None]


def test_a_read_only_scratch_folder_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    agent_settings = build_settings(tmp_path, XDG_CACHE_HOME=str(tmp_path / "file" / "cache"))
    (finding,) = [
        finding for finding in preflight.run_preflight(agent_settings) if finding.check is PreflightCheck.DISK
    ]
    assert finding.code is None
    assert "not writable" in finding.sentence
    assert quick_check_results(agent_settings)["Disk"] is False


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
    assert len(list(preflight._check_memory(2, meminfo))) == findings


@pytest.mark.parametrize(
    ("coordinator_time", "sent_at", "received_at", "is_close"),
    [(100.0, 99.9, 100.1, True), (107.0, 99.9, 100.1, False), (93.0, 99.9, 100.1, False), (106.0, 98.0, 102.0, True)],
)
def test_clocks_may_differ_by_seconds_and_half_the_round_trip(
    coordinator_time: float, sent_at: float, received_at: float, is_close: bool
) -> None:
    result = preflight.compare_clocks(coordinator_time, sent_at, received_at)
    assert result.passed is is_close
    assert ("NTP" in result.detail) is not is_close


def test_a_wrong_matrix_product_is_detected() -> None:
    assert has_exact_product(0)

    def multiply_wrongly(left: Any, right: Any) -> Any:
        product = left @ right
        product[3, 5] += 1.0
        return product

    assert not has_exact_product(0, multiply_wrongly)


class FakeProcess:
    def __init__(self, on_kill: Callable[[], None], *, ends: bool) -> None:
        self.alive = not ends
        self._on_kill = on_kill

    def signal(self, _: int) -> None:
        self.alive = False
        self._on_kill()


class FakeCheckManager:
    """A manager whose processes write the given results."""

    def __init__(self, texts: list[str | None], *, ends: bool = True, warm: bool = True) -> None:
        self.texts, self.ends, self.warm = texts, ends, warm
        self.killed = 0

    def start(self, request: StartRequest, **_: Any) -> FakeProcess:
        task = NodeTask(**json.loads(request.argv[0]))
        if not self.texts:
            raise StandbyLostError("the standby ended")
        text = self.texts[task.index]
        if text is not None:
            task.result.write_text(text)
        return FakeProcess(self._kill, ends=self.ends)

    def _kill(self) -> None:
        self.killed += 1


def run_checks(agent_settings: AgentSettings, manager: FakeCheckManager) -> tuple[str, dict[str, CheckResult]]:
    reported: dict[str, CheckResult] = {}
    checks = NodeChecks(agent_settings, manager, report=lambda result: reported.update({result.check.value: result}))
    return checks.run(), reported


GOOD = '{"matmul": true, "loopback": true}'


def with_active_checks(tmp_path: Path, seconds: float = 5.0, processes: int = 2) -> AgentSettings:
    return build_settings(
        tmp_path,
        TRAINIUM_PREFLIGHT="Matmul,Loopback",
        TRAINIUM_PROCESSES_PER_NODE=str(processes),
        check_seconds=seconds,
    )


def test_a_node_with_correct_results_passes(tmp_path: Path) -> None:
    unfit, reported = run_checks(with_active_checks(tmp_path), FakeCheckManager([GOOD, GOOD]))
    assert unfit == ""
    assert {name: (result.passed, result.detail) for name, result in reported.items()} == {
        "Matmul": (True, ""),
        "Loopback": (True, ""),
    }
    assert not (tmp_path / "memory" / "preflight").exists()


def test_a_wrong_result_names_its_core(tmp_path: Path) -> None:
    unfit, reported = run_checks(
        with_active_checks(tmp_path), FakeCheckManager([GOOD, '{"matmul": false, "loopback": null}'])
    )
    assert unfit == "node node-3: a matrix product is wrong on core 1"
    assert not reported["Matmul"].passed
    assert reported["Loopback"].passed


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "null", '{"matmul": "false"}', '{"matmul": 0}', '{"matmul": null}', "\x00"]
)
def test_an_unreadable_result_counts_as_passed_and_is_reported(tmp_path: Path, text: str | None) -> None:
    unfit, reported = run_checks(with_active_checks(tmp_path), FakeCheckManager([GOOD, text]))
    assert unfit == ""
    assert reported["Matmul"].passed
    assert "counts as passed" in reported["Matmul"].detail


@given(st.text('{}[]:,"matmul 019.eE-\\', max_size=40))
def test_any_text_of_a_result_is_parsed(text: str) -> None:
    assert isinstance(node_checks._read(TaskWithResult(text)), dict)


class TaskWithResult:
    def __init__(self, text: str) -> None:
        self.result = self
        self.text = text

    def read_text(self, encoding: str) -> str:
        return self.text


def test_a_check_beyond_its_time_limit_is_killed_and_counts_as_passed(tmp_path: Path) -> None:
    manager = FakeCheckManager([None, None], ends=False)
    unfit, reported = run_checks(with_active_checks(tmp_path, seconds=0.1), manager)
    assert unfit == ""
    assert manager.killed == 2
    assert "did not end in time" in reported["Matmul"].detail


@pytest.mark.parametrize("manager", [FakeCheckManager([]), FakeCheckManager([GOOD, GOOD], warm=False)])
def test_a_standby_that_is_lost_or_never_warm_fails_no_node(tmp_path: Path, manager: FakeCheckManager) -> None:
    unfit, reported = run_checks(with_active_checks(tmp_path, seconds=0.1), manager)
    assert unfit == ""
    assert all(result.passed for result in reported.values())


def test_one_process_runs_no_loopback_check(tmp_path: Path) -> None:
    _, reported = run_checks(with_active_checks(tmp_path, processes=1), FakeCheckManager([GOOD]))
    assert set(reported) == {"Matmul"}


def test_a_node_without_active_checks_passes_at_once(tmp_path: Path) -> None:
    checks = NodeChecks(build_settings(tmp_path), FakeCheckManager([]), report=lambda _: None)
    assert checks.run() == ""


def test_a_pod_that_ends_does_not_wait_for_its_checks(tmp_path: Path) -> None:
    manager = FakeCheckManager([None, None], ends=False)
    checks = NodeChecks(with_active_checks(tmp_path, seconds=60), manager, report=lambda _: None)
    thread = threading.Thread(target=checks.run)
    thread.start()
    checks.cancel()
    thread.join(5)
    assert not thread.is_alive()
    assert manager.killed in (0, 2)


def test_a_limit_of_open_files_below_the_need_of_the_job_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_limit", lambda: 1024)
    agent_settings = build_settings(tmp_path)
    assert not fatal_findings(agent_settings), "the operator does not send the size of the job"
    (tmp_path / "nodes").write_text("4\n")
    assert not fatal_findings(agent_settings)
    (tmp_path / "nodes").write_text("500\n")
    (finding,) = fatal_findings(agent_settings)
    assert finding.code == 64
    assert finding.sentence.startswith("Too few open files: a process may open 1,024 files at most (ulimit -Hn), but ")
    assert "are needed with 1,000 training processes: raise LimitNOFILE" in finding.sentence


def test_a_socket_beyond_descriptor_1024_can_be_polled() -> None:
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
        assert is_readable(high, -1), "the end of the stream is readable, also without time left"


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
def test_incompatible_driver_and_runtime_versions_have_a_remedy(
    driver: tuple[int, int] | None, runtime: tuple[int, int] | None, advice: str
) -> None:
    sentence = explain_version_mismatch(driver, runtime)
    assert bool(sentence) is bool(advice)
    assert advice in sentence


def test_versions_are_read_from_the_module_and_the_package(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("2.26.10.0\n")
    (tmp_path / "status").write_text(STATUS)
    assert read_driver_version(tmp_path / "version") == (2, 26)
    assert read_runtime_version(tmp_path / "status") == (2, 32)
    assert read_driver_version(tmp_path / "none") is None
    assert read_runtime_version(tmp_path / "none") is None


@given(st.text(max_size=300))
def test_any_content_of_a_version_file_is_parsed(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "odd"
    path.write_text(text, encoding="utf-8", errors="replace")
    assert read_driver_version(path) is None or "." in text
    read_runtime_version(path)


def test_incompatible_versions_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "read_driver_version", lambda: (2, 26))
    monkeypatch.setattr(preflight, "read_runtime_version", lambda: (2, 32))
    (finding,) = preflight._check_versions(16)
    assert (finding.code, finding.check) == (None, PreflightCheck.DEVICES)
    assert finding.sentence.startswith("The node's Neuron driver 2.26 and the image's runtime 2.32")
    assert list(preflight._check_versions(0)) == [], "a worker without devices needs no driver"


Usage = namedtuple("Usage", "total used free")  # noqa: PYI024 - as shutil's


def test_a_full_memory_volume_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_find_file_system", lambda _: "tmpfs")
    assert list(preflight._check_memory_directory(tmp_path)) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 30, 1 << 30, 100))
    (finding,) = preflight._check_memory_directory(tmp_path)
    assert finding.code is ExitCode.USER_ERROR
    assert "has 100 bytes left" in finding.sentence


def test_snapshots_on_a_disk_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_find_file_system", lambda _: "ext4")
    (finding,) = preflight._check_memory_directory(tmp_path)
    assert finding.code is None
    assert "is on a disk" in finding.sentence


def test_a_full_scratch_volume_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(preflight._check_disk(None)) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 3 << 20))
    (finding,) = preflight._check_disk(tmp_path)
    assert finding.code is None
    assert "has 3 MiB left" in finding.sentence


NCCOM = """#!/bin/sh
for last; do :; done
{report}
exit {code}
"""


@pytest.mark.parametrize(
    ("report", "code", "healthy"),
    [
        ('echo \'{"results": [{"check": "passed"}]}\' >$last', 0, True),
        ('echo \'{"results": [{"check": "failed"}]}\' >$last', 1, False),
        ('echo \'{"results": [{"check": "failed"}]}\' >$last', 0, True),
        ("echo '{\"results\": [{}]}' >$last", 1, True),
        ("echo no JSON >$last", 1, True),
        ("true", 1, True),
    ],
)
def test_nccom_test_fails_a_node_only_with_a_failed_check_and_exit_code(
    report: str, code: int, healthy: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nccom-test"
    program.write_text(NCCOM.format(report=report, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert pair_test.check_collectives()[0] is healthy
