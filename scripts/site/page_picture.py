"""Write docs/images/page.png, a screenshot of the page of the recorded job (tests/testing/api/recorded) in chromium.

Its curves are those of the last steps in the recorded log. Needs chromium on PATH.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.testing.api.recorded_jobs import NOW, recorded_log, recorded_object  # noqa: E402
from tests.testing.page.browser import browser  # noqa: E402 - after the path
from trainium_client.read import decode_members  # noqa: E402
from trainium_contract.pages.job_page import JobReport, report_html  # noqa: E402
from trainium_contract.views.curve import LiveCurve  # noqa: E402
from trainium_contract.views.events import build_event_views  # noqa: E402
from trainium_contract.views.interruptions import read_interruptions  # noqa: E402
from trainium_contract.views.job import build_job_view  # noqa: E402
from trainium_contract.views.status_reader import read_public_status  # noqa: E402
from trainium_contract.views.workers import count_workers, parse_pod_table  # noqa: E402

PICTURE = ROOT / "docs/images/page.png"
HEIGHT = 1650
_STEP = re.compile(r"rank 0 INFO step (\d+)/\d+: loss ([0-9.]+), ([0-9]+) tokens/s")


def main() -> None:
    """Write the image."""
    job, curve = recorded_object("job"), LiveCurve()
    for step, loss, speed in _STEP.findall(recorded_log()):
        curve.add(int(step), float(loss), float(speed))
    members, pods = decode_members(recorded_object("membership")), parse_pod_table(recorded_object("pods"), NOW)
    view = build_job_view(
        job, now=NOW, workers=count_workers(pods, members), events=build_event_views(recorded_object("events")["items"])
    )
    report = JobReport(view, read_interruptions(read_public_status(job)), members, None, curve.points, (), pods)
    with tempfile.TemporaryDirectory() as folder, browser() as tab:
        page = Path(folder) / "page.html"
        page.write_text(report_html(report, NOW), encoding="utf-8")
        tab.open(page.as_uri())
        tab.save_screenshot(PICTURE, height=HEIGHT)


if __name__ == "__main__":
    main()
