"""Timeouts of tests, scaled by the speed and load of the machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.suite import timeouts
from tests.testing.suite.timeouts import (
    MOST,
    VARIABLE,
    Deadline,
    NotInTimeError,
    async_until,
    scaled,
    slowness,
    slowness_of,
    until,
)

ROOT = Path(__file__).parents[3]
FAST_LOOP_SECONDS = 0.001
"""Seconds of the loop on a fast processor."""


@pytest.mark.parametrize(
    ("loop_seconds", "load", "running", "factor"),
    [
        (FAST_LOOP_SECONDS, 0.0, 1, 1.0),
        (FAST_LOOP_SECONDS, 1.9, 2, 1.0),
        (FAST_LOOP_SECONDS, 5.0, 1, 2.5),
        (FAST_LOOP_SECONDS, 0.3, 9, 4.0),  # the current load, which the average lags behind
        (2 * timeouts._LOOP_SECONDS, 0.0, 1, 2.0),
        (2 * timeouts._LOOP_SECONDS, 4.0, 1, 4.0),
        (9.0, 400.0, 500, MOST),
    ],
)
def test_slowness_follows_speed_and_load_up_to_a_maximum(
    loop_seconds: float, load: float, running: int, factor: float
) -> None:
    assert slowness_of(loop_seconds, load, running, processors=2) == factor


def test_this_machine_has_a_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert 1.0 <= slowness() <= MOST


def test_a_slowness_can_be_set_and_an_invalid_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2.5")
    assert scaled(10) == 25
    for invalid in ("fast", "0", "-1", "inf", "nan"):
        monkeypatch.setenv(VARIABLE, invalid)
        with pytest.raises(ValueError, match=f"{VARIABLE} is '{invalid}': give how many times"):
            slowness()


def test_a_deadline_follows_the_current_slowness() -> None:
    now, slow = [100.0], [1.0]
    deadline = Deadline(10, clock=lambda: now[0], slow=lambda: slow[0])
    now[0] = 109.0
    assert not deadline.is_over()
    now[0], slow[0] = 115.0, 2.0  # the machine became slow
    assert not deadline.is_over()
    now[0] = 121.0
    with pytest.raises(NotInTimeError, match="not within 21 s: the pod runs"):
        deadline.check("the pod runs")
    now[0], slow[0] = 112.0, 1.0
    with pytest.raises(NotInTimeError, match="a message of that time"):
        deadline.check(lambda: "a message of that time")


async def test_until_returns_the_first_true_value_or_fails_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    answers = iter([None, "", "value"])
    assert until(lambda: next(answers), "never seen", pause=0) == "value"
    numbers = iter([0, 7])
    assert await async_until(lambda: next(numbers), "never seen", pause=0) == 7
    with pytest.raises(NotInTimeError, match="never seen"):
        until(lambda: None, "never seen", 0.01, pause=0.001)
    with pytest.raises(NotInTimeError, match="never seen"):
        await async_until(lambda: None, "never seen", 0.01, pause=0.001)


SAMPLE = """
import time, pytest

@pytest.mark.timeout(0.5)
def test_that_takes_a_second(): time.sleep(1)
"""


@pytest.mark.parametrize(("factor", "code"), [("1", 1), ("100", 0)])
def test_the_timeout_of_a_test_is_scaled(tmp_path: Path, factor: str, code: int) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-o", f"pythonpath={ROOT}", "-p", "no:cacheprovider", "test_sample.py"]
    environment = os.environ | {VARIABLE: factor}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert "Timeout (>0.5s)" in done.stdout


# Waits of a `JobDriver` in tests and rows of the fault table are scaled by `Job.slowness`.
LIMIT = re.compile(
    r"""timeout=\d|--timeout=\d|monotonic\(\) \+ \d|asyncio\.timeout\(\d|\.wait\(\d\d?\)|asyncio\.wait_for\(.*, \d+\)"""
)
ALLOWED = {
    # These are no waits of tests: polls in a pod, lifetimes of servers, waits under test.
    "tests/cluster/node/test_node_network.py": 1,
    "tests/wire/cluster/execute/test_optional_writes.py": 1,
    "tests/wire/cluster/test_like_kubectl.py": 6,
    "tests/wire/cluster/test_operator_lease.py": 1,
    "tests/wire/cluster/test_operator_transport.py": 1,
    "tests/wire/agent/coordinator_server.py": 1,
    "tests/wire/operator/test_operator_stored_json.py": 1,
    "tests/testing/api/http_api_server.py": 1,
}


def test_waits_for_processes_use_scaled_limits() -> None:
    folders = ("tests/cluster", "tests/wire", "tests/fleet", "tests/testing", "benchmarks/faults")
    lines_by_file: dict[str, list[str]] = {}
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        lines = [line.strip() for line in path.read_text().splitlines() if LIMIT.search(line)]
        if lines:
            lines_by_file[str(path.relative_to(ROOT))] = lines
    assert {path: lines for path, lines in lines_by_file.items() if len(lines) > ALLOWED.get(path, 0)} == {}, (
        "use until(), Deadline or scaled() of tests.testing.suite.timeouts"
    )


def test_no_test_asserts_that_something_is_fast() -> None:
    """A loaded machine is slow: assert an order, a count, processor time, or what ends the wait."""
    clock = re.compile(r"^\s*assert (time\.)?(monotonic|perf_counter|time)\(\) - \w+ <")
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text().splitlines()
        if clock.search(line)
    ]
    assert lines == []
