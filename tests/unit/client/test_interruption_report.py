"""Reports of `kubectl trn why` on interruptions and verdicts, from recorded objects of a real job."""

import re
import textwrap

from tests.testing.api.recorded_jobs import NOW, recorded_log
from tests.unit.client.recorded_views import condition, job_view, recorded_job, render_plain, view_alone, why_text
from trainium_client.render.interruption import render_interruption
from trainium_client.render.tables import (
    render_goodput,
)
from trainium_client.views.interruption_report import MAX_LINES, explain_interruption
from trainium_contract.pages.formatting import format_duration
from trainium_contract.pages.job_page import JobReport, report_html
from trainium_operator.plan.model.text import format_sentence


def test_why_shows_pod_cause_and_log_line_of_a_crash() -> None:
    report = explain_interruption(recorded_job(), log=recorded_log())

    assert report.entry is not None
    assert (report.entry.cause, report.entry.pod, report.number) == ("Crash", "llama-w-0", 3)
    assert any("rank 0 ended with code 137" in line for line in report.log_lines)
    assert len(report.log_lines) <= MAX_LINES
    output = render_plain(render_interruption(report))
    assert f"restart {format_duration(report.entry.stages['restart'])}" in output
    assert "processes restarted in place, pods kept" in output


VERDICT = (
    "Configuration or user error (bad config, missing data, import error, shape): rank 3 of pod llama-w-0 on node "
    "node-5, exit code 64: data.source /data/corpus.txt: there is no such file or folder: correct the path or mount "
    "the data. Correct the configuration, the data or the image and run the job again (kubectl trn retry); it resumes "
    "from its newest checkpoint."
)


def report_of(message: str, *, response: str, log: str) -> str:
    job = recorded_job()
    job["status"]["history"][-1] |= {"message": message, "response": response}
    return why_text(job, 110, log=log)


def seen_part(report: str) -> str:
    """Return what the report shows of the failure's message."""
    return report.partition("Seen")[2].partition("Response")[0]


def test_why_shows_the_whole_verdict_before_the_log() -> None:
    output = " ".join(report_of(VERDICT, response="Stop", log=recorded_log()).split())
    assert "Log of llama-w-0 at that time" in output
    assert VERDICT in output


def test_why_shows_a_traceback_in_lines_with_the_error_first() -> None:
    frames = 'Traceback (most recent call last):\n  File "/src/train.py", line 3, in <module>\n    import missing'
    error = "ModuleNotFoundError: No module named 'missing'"
    message = format_sentence(f"Rank 0 of pod llama-w-0, exit code 1: {error}\n{frames}\nCorrect the program.")
    seen = seen_part(report_of(message, response="Stop", log="")).splitlines()
    assert textwrap.dedent("\n".join(seen[1:])).splitlines() == [*frames.split("\n"), "Correct the program."]
    assert seen[0].endswith(error)


def test_why_shows_a_traceback_of_a_verdict_once() -> None:
    (time,) = re.findall(r"^(\S+) .*rank 0 ended with code 137", recorded_log(), re.MULTILINE)[-1:]
    frames = ["Traceback (most recent call last):", '  File "/src/train.py", line 3, in <module>', "    import missing"]
    error = "ModuleNotFoundError: No module named 'missing'"
    log = "\n".join(f"{time} [rank 0] {line}" for line in ("loading the data", *frames, error))
    message = format_sentence("\n".join((error, *frames, "Correct the program.")))
    output = report_of(message, response="Stop", log=log)
    assert "[rank 0] loading the data" in output
    assert all(output.count(line.strip()) == 1 for line in (*frames, error))


def test_why_cuts_long_messages_at_words_and_drops_step_lines() -> None:
    steps = " | ".join(
        f"23:12:{step} rank 0 INFO step {step}/900: loss 5.1400, 1593 tokens/s" for step in range(10, 40)
    )
    output = report_of(f"rank 0 crashed; killed by signal 9 | {steps}", response="InPlace", log=recorded_log())
    assert "rank 0 crashed; killed by signal 9\n           …\n" in output
    words = " ".join(f"word{number}" for number in range(100))
    seen = seen_part(report_of(words, response="InPlace", log=recorded_log())).split()
    assert seen[-1] == "…"
    assert seen[:-1] == words.split()[: len(seen) - 1]


def test_why_shows_python_frames_and_no_cpp_frames() -> None:
    (time,) = re.findall(r"^(\S+) .*rank 0 ended with code 137", recorded_log(), re.MULTILINE)[-1:]
    python = ["Traceback (most recent call last):", '  File "/app/mine.py", line 7, in columns', "KeyError: 'text'"]
    native = ["Exception raised from get at /pytorch/a.cpp:9 (most recent call first):"]
    native += [f"frame #{number}: c10::Error::Error(std::string) + 0x8 (0x7 in libc10.so)" for number in range(20)]
    log = "".join(f"{time} [rank 0] {line}\n" for line in [*python, *native])

    shown = explain_interruption(recorded_job(), log=log).log_lines

    assert list(shown) == [f"[rank 0] {line}" for line in python]


def test_wrapped_lines_are_indented() -> None:
    output = why_text(recorded_job("failed"), 60, advice=("word " * 40,))
    assert re.search(r"^- word .*\n  word ", output, re.MULTILINE)
    report = why_text(recorded_job(), 60, log=recorded_log())
    lines = report.partition(" at that time\n")[2]
    assert all(line.startswith("  ") for line in lines.splitlines())


def test_the_stage_decide_is_labelled_as_the_wait_for_a_worker() -> None:
    job = recorded_job()
    job["status"]["history"][-1]["stages"]["decide"] = 41.0
    job["status"]["goodput"]["lostByStage"]["Decide"] = 41.0

    output = why_text(job, 200)
    assert f"decide (wait for a worker) {format_duration(41.0)}" in output
    ledger = render_plain(render_goodput(view_alone(job).goodput, 100))
    assert re.search(r"Decide \(wait for a worker\) +41\.0", ledger)
    assert "Decide (wait for a worker): 41.0 s" in report_html(JobReport(view_alone(job), (), None, None, (), ()), NOW)


def test_the_report_of_an_earlier_interruption_is_chosen_by_its_number() -> None:
    report = explain_interruption(recorded_job(), number=2, log_note="llama-w-1 was deleted, and its log with it")

    assert report.entry is not None
    assert report.entry.cause == "Preempted"
    assert report.log_lines == ()
    assert "was deleted" in report.log_note


def test_the_report_of_a_failed_job_is_its_verdict() -> None:
    report = explain_interruption(recorded_job("failed"))

    assert report.entry is not None
    assert report.entry.stopped
    assert "stopped for good" in why_text(recorded_job("failed"))


def test_a_job_without_interruptions_has_nothing_to_explain() -> None:
    assert "nothing has interrupted this job" in why_text(recorded_job(history=[]))


def test_a_job_that_exceeds_its_deadline_shows_it_while_stopping_and_afterwards() -> None:
    output = "The job has been active for 60 s, as long as activeDeadlineSeconds allows."
    target = condition("FailureTarget", "DeadlineExceeded", output, "True")
    view = job_view(phase="Stopping", conditions=[target])

    assert view.advice == (f"{output} Its workers save and leave, then it fails.",)
    entry = {"generation": 1, "time": "2026-01-01T00:00:00Z", "cause": "Yielded", "response": "Stop", "message": output}
    job = recorded_job(phase="Failed", verdict=output, history=[entry])
    report = why_text(job, advice=view_alone(job).advice)
    assert "stopped for good" in report
    assert "active for 60 s" in report
    assert "kubectl trn retry" in report
