"""The proof that a worker has finished: it fits a termination message, and only a pod's own agent can give it."""

from tests.testing.operator.wire_messages import heartbeat
from trainium_contract.faults.causes import Cause
from trainium_contract.status.results import MAX_ARTIFACTS, Alert, ArtifactReport
from trainium_contract.wire.completion import MAX_COMPLETION_BYTES, encode_completion, parse_completion
from trainium_contract.wire.messages import HeartbeatRequest, ProcessFailure, Progress, RestartRecord, WorkerPhase

RESTARTS = tuple(
    RestartRecord(
        sequence=number, generation=2, attempt=number + 1, cause=Cause.CRASH, failed_at=1.5e9, detected_at=1.5e9 + 0.25,
        resumed_at=1.5e9 + 3.125, step_before=400, resume_step=395,
    )
    for number in range(8)
)  # fmt: skip


def finished(**changes: object) -> HeartbeatRequest:
    progress = Progress(step=500, total_steps=500, loss=1.25, durable_step=500, updated=1.5e9)
    return heartbeat(**{"phase": WorkerPhase.FINISHED, "generation": 2, "progress": progress, **changes})


def test_a_completion_has_the_final_figures_and_restarts() -> None:
    report = finished(attempt=1, restarts=RESTARTS[:1])
    assert parse_completion(encode_completion(report), report.pod_uid) == report


def test_the_longest_heartbeat_fits_a_termination_message_with_its_figures() -> None:
    failures = tuple(
        ProcessFailure(sequence=n, generation=2, attempt=n, rank=3, exit_code=139, message="ß" * 1024, at=1.5e9)
        for n in range(8)
    )
    artifacts = tuple(ArtifactReport(kind="Model", path="/" + "p" * 1000, step=n) for n in range(MAX_ARTIFACTS))
    progress = Progress(
        step=500, total_steps=500, loss=1.25, durable_step=500, notice="n" * 1024, problem="p" * 1024,
        alerts=(Alert(kind="LossSpike", step=3, message="m" * 1024),), artifacts=artifacts,
    )  # fmt: skip
    names = {"namespace": "n" * 63, "job": "j" * 63, "pod": "p" * 253, "pod_uid": "u" * 36}
    report = finished(failures=failures, restarts=RESTARTS, progress=progress, attempt=8, **names)
    text = encode_completion(report)
    assert len(text.encode()) <= MAX_COMPLETION_BYTES
    parsed = parse_completion(text, report.pod_uid)
    assert parsed is not None
    assert parsed.progress is not None
    assert (parsed.progress.step, parsed.progress.loss, parsed.progress.durable_step) == (500, 1.25, 500)
    assert parsed.restarts == RESTARTS[-2:]


def test_another_message_is_no_proof() -> None:
    text = encode_completion(finished())
    uid = finished().pod_uid
    assert parse_completion(text + "\n", uid) is not None
    assert parse_completion(text, "uid-other") is None, "another pod's"
    assert parse_completion(encode_completion(finished(phase=WorkerPhase.TRAINING)), uid) is None
    assert parse_completion(text[:-9], uid) is None, "cut"
    assert parse_completion(text.replace('"protocol":2', '"protocol":1'), uid) is None
    for other in ("", "{}", "[]", "{" * 100_000, "the last lines of a log", '{"phase": "Finished"}', "null"):
        assert parse_completion(other, uid) is None
