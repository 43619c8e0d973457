"""The last report of an agent: it fits a termination message, and only a pod's own agent can give it."""

import pytest

from tests.testing.operator.wire_messages import heartbeat, process_failure
from trainium_contract.faults.causes import Cause
from trainium_contract.status.results import MAX_ARTIFACTS, Alert, ArtifactReport
from trainium_contract.wire.last_report import (
    MAX_MESSAGE_BYTES,
    MAX_REPORT_BYTES,
    encode_last_report,
    parse_last_report,
)
from trainium_contract.wire.messages import (
    HeartbeatRequest,
    KernelEvent,
    ProcessFailure,
    Progress,
    RestartRecord,
    WorkerPhase,
)

TIMES = {"failed_at": 1.5e9, "detected_at": 1.5e9 + 0.25, "resumed_at": 1.5e9 + 3.125}
STEPS = {"step_before": 400, "resume_step": 395}
RESTARTS = tuple(
    RestartRecord(sequence=number, generation=2, attempt=number + 1, cause=Cause.CRASH, **TIMES, **STEPS)
    for number in range(8)
)


def finished(**changes: object) -> HeartbeatRequest:
    progress = Progress(step=500, total_steps=500, loss=1.25, durable_step=500, updated=1.5e9)
    return heartbeat(**{"phase": WorkerPhase.FINISHED, "generation": 2, "progress": progress, **changes})


def failure(number: int, message: str = "boom") -> ProcessFailure:
    return process_failure(64, sequence=number, attempt=number, generation=2, message=message, step=499)


def failed(message: str = "boom", **changes: object) -> HeartbeatRequest:
    failures = (failure(0, "earlier"), failure(1, message))
    return finished(**{"phase": WorkerPhase.FAILED, "failures": failures, "verdict": failures[1], **changes})


def test_a_completion_has_the_final_figures_and_restarts() -> None:
    report = finished(attempt=1, restarts=RESTARTS[:1])
    assert parse_last_report(encode_last_report(report), report.pod_uid, 0) == (report, "")


@pytest.mark.parametrize("message", ["", "boom", "ModuleNotFoundError: x\n  File a\n  File b"])
def test_the_report_of_a_failed_worker_shows_its_output_to_people(message: str) -> None:
    kernel = (KernelEvent(sequence=0, line="nd0: HBM error", at=1.5e9),)
    report = failed(message, attempt=1, restarts=RESTARTS[:1], kernel=kernel)
    text = encode_last_report(report, "asked to end")
    assert text.partition("\n")[2] == (message or "asked to end")
    assert text.count("boom") == message.count("boom"), "it is there once"
    parsed, shown = parse_last_report(text + "\n", report.pod_uid, 64)
    assert shown.strip() == (message or "asked to end")
    assert parsed == (report if message else failed("asked to end", attempt=1, restarts=RESTARTS[:1], kernel=kernel))


def test_a_worker_that_was_asked_to_end_reports_its_figures() -> None:
    report = finished(phase=WorkerPhase.YIELDED)
    text = encode_last_report(report, "the pod was asked to end")
    assert parse_last_report(text, report.pod_uid, 75) == (report, "the pod was asked to end")


def test_the_longest_heartbeat_fits_a_termination_message_with_its_figures() -> None:
    failures = tuple(
        process_failure(sequence=n, generation=2, attempt=n, rank=3, message="ß" * 1024, at=1.5e9) for n in range(8)
    )
    artifacts = tuple(ArtifactReport(kind="Model", path="/" + "p" * 1000, step=n) for n in range(MAX_ARTIFACTS))
    texts = {"notice": "n" * 1024, "problem": "p" * 1024, "artifacts": artifacts}
    alerts = (Alert(kind="LossSpike", step=3, message="m" * 1024),)
    progress = Progress(step=500, total_steps=500, loss=1.25, durable_step=500, alerts=alerts, **texts)
    names = {"namespace": "n" * 63, "job": "j" * 63, "pod": "p" * 253, "pod_uid": "u" * 36}
    report = finished(failures=failures, restarts=RESTARTS, progress=progress, attempt=8, **names)
    kernel = tuple(KernelEvent(sequence=n, line="ß" * 1024, at=1.5e9) for n in range(8))
    lost = report.replaced(phase=WorkerPhase.FAILED, verdict=failures[-1], kernel=kernel)
    for last, code in ((report, 0), (lost, 139)):
        text = encode_last_report(last, "ß" * 4096)
        assert len(text.encode()) < MAX_MESSAGE_BYTES
        assert len(text.partition("\n")[0].encode()) <= MAX_REPORT_BYTES
        parsed, _ = parse_last_report(text, report.pod_uid, code)
        assert parsed is not None
        assert parsed.progress is not None
        assert (parsed.progress.step, parsed.progress.loss, parsed.progress.durable_step) == (500, 1.25, 500)
        assert parsed.restarts == RESTARTS[-2:]
        shown = parsed.verdict.message if parsed.verdict else ""
        assert (last.verdict is None) == (shown == "")
        assert HeartbeatRequest.model_validate(parsed.model_dump()) == parsed, "no longer than a heartbeat may be"


def test_another_message_is_no_report() -> None:
    text = encode_last_report(finished())
    uid = finished().pod_uid

    def read(message: str, code: int | None = 0, pod_uid: str = uid) -> HeartbeatRequest | None:
        report, shown = parse_last_report(message, pod_uid, code)
        assert report is not None or shown == message
        return report

    assert read(text + "\n") is not None
    assert read(text, pod_uid="uid-other") is None, "another pod's"
    assert read(encode_last_report(finished(generation=0))) is None, "of no generation"
    assert read(text[:-9]) is None, "cut"
    assert read(text.replace('"protocol":2', '"protocol":1')) is None
    for other in ("", "{}", "[]", "{" * 100_000, "the last lines of a log", '{"phase": "Finished"}', "null"):
        assert read(other) is None


@pytest.mark.parametrize(
    ("report", "codes"),
    [
        (finished(), (0,)),
        (finished(phase=WorkerPhase.TRAINING), (75,)),
        (failed(verdict=None), (75,)),
        (failed(), (64, 75)),
    ],
    ids=["finished", "asked to end", "another failed", "failed"],
)
def test_a_report_counts_only_with_the_exit_code_of_its_agent(report: HeartbeatRequest, codes: tuple[int, ...]) -> None:
    """A kubelet's SIGKILL, or a program that writes the message of an agent, proves nothing."""
    text = encode_last_report(report)
    believed = [code for code in (None, 0, 1, 64, 75, 137) if parse_last_report(text, report.pod_uid, code)[0]]
    assert tuple(believed) == codes
