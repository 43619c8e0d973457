"""`--times FILE`: what each test cost, as JSON, dearest first; the figures by which the suite is kept short.

Seconds by the clock, and processor seconds of the process of the tests and of all processes below it, those that live
on between tests as well. A machine that does other work moves the first figure alone.
"""

import json
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

_SHORT = 0.2
"""Seconds by the clock below which a test is not worth a look at all processes; the next one answers for them."""


class TimesRecord:
    """Plug-in: measures where tests run, writes where they are reported (another process in lanes)."""

    def __init__(self, path: Path | None) -> None:
        """`path`: of the file to write; None in a lane."""
        self._path = path
        self._process = psutil.Process()
        self._sampled_at, self._used = time.monotonic(), self._processor_seconds()
        self._tests: dict[str, dict[str, float]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown" and time.monotonic() - self._sampled_at > _SHORT:
            used = self._processor_seconds()
            # A process that ends without a parent that waits for it takes its seconds with it.
            report.user_properties.append(("processor", max(0.0, used - self._used)))
            self._sampled_at, self._used = time.monotonic(), used
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._tests.setdefault(report.nodeid, {"processor": 0.0, "setup": 0.0, "call": 0.0, "teardown": 0.0})
        row[report.when] += report.duration
        if report.when == "teardown":
            noted = [value for name, value in report.user_properties if name == "processor"]
            row["processor"] += sum(value for value in noted if isinstance(value, float))

    def pytest_sessionfinish(self) -> None:
        if self._path is None:
            return
        rows = [
            {"test": test} | {name: round(seconds, 2) for name, seconds in row.items()}
            for test, row in self._tests.items()
        ]
        rows.sort(key=lambda row: row["processor"], reverse=True)
        self._path.write_text(json.dumps(rows, indent=1) + "\n")

    def _processor_seconds(self) -> float:
        total = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total
