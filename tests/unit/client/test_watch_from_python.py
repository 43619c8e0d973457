"""`TrainingJob.watch`: lines for a pipe, a screen for a terminal, and one cell's output in a real notebook kernel."""

import io
import sys
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from tests.testing.api.recorded_jobs import JOBS, RecordedApiServer
from tests.testing.page.html_page import Page
from tests.unit.client.conftest import open_job
from trainium_client.live import NotebookDisplay, TerminalDisplay, find_notebook_display
from trainium_contract.views.curve import CurvePoint

TIMEOUT_SECONDS = 120


class ProgressOnPause:
    """A job that makes ten steps at each pause and completes at the third."""

    def __init__(self, server: RecordedApiServer) -> None:
        self.status = server.answers[f"{JOBS}/llama"]["status"]
        self.pauses = 0

    def pause(self, _seconds: float) -> None:
        self.pauses += 1
        self.status["progress"]["step"] += 10
        if self.pauses == 3:
            self.status["phase"] = "Completed"


def test_in_a_pipe_each_change_is_a_line_until_the_job_has_ended(
    server: RecordedApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    last = open_job(server).watch(pause=ProgressOnPause(server).pause)
    lines = capsys.readouterr().out.splitlines()
    assert last.phase == "Completed"
    assert [line.split()[2].rstrip(",") for line in lines] == ["263/4000", "273/4000", "283/4000", "293/4000"]


def test_an_interrupted_or_timed_out_watch_leaves_the_job_alone(server: RecordedApiServer) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    assert open_job(server).watch(pause=interrupt).phase == "Running"
    assert open_job(server).watch(timeout_seconds=0.0).phase == "Running"
    assert {method for method, _, _ in server.requests} == {"GET"}


def test_a_terminal_shows_the_screen_of_status_in_place(server: RecordedApiServer) -> None:
    file = io.StringIO()
    with Live(console=Console(file=file, force_terminal=True, width=100), auto_refresh=False) as live:
        TerminalDisplay(live).show(open_job(server).status(), ())
    assert "step 263/4000" in file.getvalue()


def test_a_notebook_updates_the_output_of_one_cell(server: RecordedApiServer) -> None:
    shown: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    class Handle:
        def update(self, data: dict[str, str], **options: Any) -> None:
            shown.append(("update", data, options))

    def display(data: dict[str, str], **options: Any) -> Handle:
        shown.append(("display", data, options))
        return Handle()

    view, screen = open_job(server).status(), NotebookDisplay(display)
    screen.show(view, ())
    screen.show(view, [CurvePoint(step, 5.0, 5.0, 5.0, None, None) for step in (1, 2)])
    assert [call for call, _, _ in shown] == ["display", "update"]
    assert shown[0][2] == {"raw": True, "display_id": True}
    page = Page(shown[1][1]["text/html"])
    assert page.open == []
    assert "polyline" in page.tags
    assert not {"script", "img"} & set(page.tags)
    assert shown[1][1]["text/plain"].startswith("Running")


def test_without_a_kernel_there_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert find_notebook_display() is None


def test_in_a_real_kernel_each_cell_shows_the_last_state_alone(server: RecordedApiServer) -> None:
    import nbclient
    import nbformat

    setup = f"""
from trainium_client import TrainingJob
kubeconfig = {str(server.kubeconfig)!r}
"""
    watch = "TrainingJob('llama', kubeconfig=kubeconfig).watch(timeout_seconds=5)"
    cells = [setup, f"view = {watch}\nview.step"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    server.answers[f"{JOBS}/llama"]["status"]["progress"]["step"] = 500
    nbclient.NotebookClient(notebook, timeout=TIMEOUT_SECONDS).execute()
    shown, value = notebook.cells[1].outputs
    assert shown.output_type == "display_data"
    assert "step 500/4000" in Page(shown.data["text/html"]).text
    assert value.data["text/plain"] == "500"
