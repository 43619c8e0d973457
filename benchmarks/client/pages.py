"""The page of a job in a real browser: jobs of 2, 128 and 1,000 workers with a week of training behind them.

The page is `live_job_html` of the recorded job, multiplied: 2,000,000 steps, ten interruptions, a hundred events. It is
served on loopback with the headers of a live page. Times are the browser's own: from the start of the navigation to the
first contents, and to the end of loading; the floor is an empty page with the same headers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import statistics
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.testing.api.recorded_jobs import NOW, recorded
from tests.testing.page.browser import browser
from tests.testing.suite.loopback_http import LoopbackServer
from trainium_contract.pages.job_page import JobReport, live_job_html
from trainium_contract.pages.live import HEADERS
from trainium_contract.views.curve import MOST_POINTS, CurvePoint
from trainium_contract.views.events import event_views
from trainium_contract.views.interruptions import interruptions
from trainium_contract.views.job_from_status import job_view
from trainium_contract.views.status_part import shown_status
from trainium_contract.views.workers import MemberRow, Members, PodRow, workers_view

SIZES = (2, 128, 1000)
STEPS = 2_000_000
ROUNDS = 5
GOAL_SECONDS = 2.0
"""Of a job of 1,000 workers, until all is loaded."""
LOADED = """(() => {
  const entry = performance.getEntriesByType('navigation')[0];
  const paint = performance.getEntriesByName('first-contentful-paint')[0];
  return [paint ? paint.startTime : 0, entry.loadEventEnd];
})()"""


def report_of(workers: int) -> JobReport:
    """The recorded job as one of so many workers, after a week."""
    job = recorded("job")
    events = event_views(recorded("events")["items"])
    entries = interruptions(shown_status(job))
    week = tuple(
        replace(
            entries[at % len(entries)],
            at=NOW - 600_000 + 60_000 * at,
            step_before=STEPS * at // 10,
            generation=1 + at,
            pod=f"llama-w-{at * workers // 10}",
        )
        for at in range(10)
    )
    members = Members(11, 32, tuple(MemberRow(at, f"llama-w-{at}", f"ip-10-0-0-{at}") for at in range(workers)))
    pods = tuple(PodRow(row.pod, "Running", row.node, NOW - 605_000) for row in members.rows)
    steps = [STEPS * at // MOST_POINTS for at in range(1, MOST_POINTS + 1)]
    losses = [2 + 8 * math.exp(-step / 300_000) for step in steps]
    both = zip(steps, losses, strict=True)
    curve = tuple(CurvePoint(step, loss, loss - 0.2, loss + 0.2, None, 1e6) for step, loss in both)
    view = job_view(job, now=NOW, workers=workers_view(pods, members), events=(events * 20)[:100])
    return JobReport(view, week, members, None, curve, (), pods)


def serve(bodies: dict[str, bytes]) -> LoopbackServer:
    """Packed pages by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bodies.get(self.path, b"")
            headers = {**HEADERS, "Content-Type": "text/html; charset=utf-8", "Content-Encoding": "gzip"}
            self.send_response(200 if body else 404)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's signature
            pass

    server = LoopbackServer(Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = f"{os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.1f}"
    empty = gzip.compress(b"<!doctype html><title>empty</title><p>nothing")
    rows: list[dict[str, Any]] = [{"page": "/empty", "bytes": 0, "packedBytes": len(empty), "makeCpuSeconds": 0.0}]
    bodies = {"/empty": empty}
    for workers in SIZES:
        report = report_of(workers)
        taken = []
        for _ in range(ROUNDS):
            began = time.process_time()
            text = live_job_html(report, NOW, jobs="/ui/team").encode()
            packed = gzip.compress(text, 1)
            taken.append(time.process_time() - began)
        bodies[f"/{workers}"] = packed
        made = round(statistics.median(taken), 4)
        rows.append({"page": f"/{workers}", "bytes": len(text), "packedBytes": len(packed), "makeCpuSeconds": made})
    server = serve(bodies)
    with browser() as tab:
        for row in rows:
            seen = []
            for _ in range(ROUNDS):
                tab.open(f"{server.url}{row['page']}")
                tab.until("performance.getEntriesByName('first-contentful-paint').length > 0")
                seen.append(tab.evaluate(LOADED))
            paints, loads = (sorted(each[at] / 1000 for each in seen) for at in (0, 1))
            row |= {"paintSeconds": round(statistics.median(paints), 3), "loadRange": [loads[0], loads[-1]]}
            row["loadSeconds"] = round(statistics.median(loads), 3)
    server.shutdown()
    server.server_close()
    print(f"{'page':>8}{'KiB':>8}{'packed':>8}{'made CPU s':>12}{'painted s':>11}{'loaded s':>10}  lowest to highest")
    for row in rows:
        sizes = (row["bytes"] / 1024, row["packedBytes"] / 1024)
        cells = (row["page"], *sizes, row["makeCpuSeconds"], row["paintSeconds"], row["loadSeconds"], *row["loadRange"])
        print("{:>8}{:>8.0f}{:>8.1f}{:>12.4f}{:>11.3f}{:>10.3f}  {:.3f} to {:.3f}".format(*cells))
    print(machine)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"goalSeconds": GOAL_SECONDS, "machine": machine, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
