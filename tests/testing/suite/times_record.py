"""`--times FILE`: write the duration and processor seconds of each test as JSON, the most expensive first.

Processor seconds include all descendants of the test process, also those that live on between tests. Other load of the
machine changes only the durations.
"""

import json
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

_SHORT = 0.2
"""Seconds below which processor seconds are not sampled after a test; they count for the next sampled one."""


class TimesRecord:
    """Plug-in that measures in the process that runs tests and writes in the one that reports them."""

    def __init__(self, path: Path | None) -> None:
        """`path`: the file to write, or None in a lane."""
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
            # The seconds of a process that no parent waits for are lost.
            report.user_properties.append(("processor", max(0.0, used - self._used)))
            self._sampled_at, self._used = time.monotonic(), used
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._tests.setdefault(report.nodeid, {"processor": 0.0, "setup": 0.0, "call": 0.0, "teardown": 0.0})
        row[report.when] += report.duration
        if report.when == "teardown":
            samples = [value for name, value in report.user_properties if name == "processor"]
            row["processor"] += sum(value for value in samples if isinstance(value, float))

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
