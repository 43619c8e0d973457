"""The Python class `TrainingJob`: the same results as the commands, and one error class."""

import json
from pathlib import Path

import pytest

from tests.testing.api.recorded_jobs import CORE, JOBS, RecordedApiServer, recorded_log_as_json, recorded_object
from tests.unit.client.conftest import open_job
from trainium_client import ClientError, JobFailedError, TrainingJob
from trainium_contract.job import TrainingJobSpec


def test_a_job_is_read_as_the_commands_read_it(server: RecordedApiServer) -> None:
    job = open_job(server)

    assert job.status().step == 263
    assert job.why().number == 3
    assert job.events()[0].reason == "Recovered"
    assert job.logs(0)
    assert "team/llama" in job._repr_html_()
    with pytest.raises(ClientError, match="no rank 9"):
        job.logs(9)


def test_text_and_json_logs_of_a_rank_read_the_same(server: RecordedApiServer) -> None:
    lines = open_job(server).logs()
    assert lines
    assert lines[0].startswith("02:08:38 rank 0 INFO step 106/4000")
    server.answers[f"{CORE}/pods/llama-w-0/log"] = recorded_log_as_json()
    assert open_job(server).logs() == lines
    stamp = "2026-11-24T08:09:10Z"
    failed = {"time": stamp, "level": "error", "source": "trainer", "logger": "trainium.exit", "rank": 0}
    failed |= {"message": "KeyError: 1", "error": "Traceback\nKeyError: 1"}
    server.answers[f"{CORE}/pods/llama-w-0/log"] = f"{stamp} {json.dumps(failed)}\n"
    assert open_job(server).logs() == ["Traceback", "KeyError: 1", "KeyError: 1"]


def test_a_typed_spec_is_applied_in_the_context_s_namespace(server: RecordedApiServer) -> None:
    spec = TrainingJobSpec.model_validate({"trainer": {"steps": 7}})

    TrainingJob.from_spec("llama", spec, kubeconfig=str(server.kubeconfig)).apply()

    method, path, body = server.requests[-1]
    assert (method, path.partition("?")[0]) == ("PATCH", f"{JOBS}/llama")
    assert "fieldManager=trainium-client" in path
    assert body["metadata"] == {"name": "llama", "namespace": "team"}
    assert body["spec"]["trainer"]["steps"] == 7


def test_a_manifest_is_applied_as_it_is_written(server: RecordedApiServer, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    manifest = {"kind": "TrainingJob", "metadata": {"name": "x", "namespace": "team", "labels": {"a": "b"}}, "spec": {}}
    path.write_text(json.dumps(manifest))

    from_file = TrainingJob.from_file(path, kubeconfig=str(server.kubeconfig))

    assert (from_file.name, from_file.namespace, from_file.metadata) == ("x", "team", {"labels": {"a": "b"}})
    path.write_text("kind: Pod")
    with pytest.raises(ClientError, match="has no TrainingJob"):
        TrainingJob.from_file(path)


def test_waiting_ends_with_the_phase_the_verdict_or_the_time(server: RecordedApiServer) -> None:
    reads = []

    def finish(_seconds: float) -> None:
        completed = recorded_object("job")
        completed["status"]["phase"] = "Completed"
        server.answers[f"{JOBS}/llama"] = completed

    assert open_job(server).wait(on_view=reads.append, pause=finish).phase == "Completed"
    assert [view.phase for view in reads] == ["Running", "Completed"]
    with pytest.raises(JobFailedError, match="there is no such file or folder"):
        open_job(server, "broken").wait()
    with pytest.raises(ClientError, match="has completed, and cannot be Suspended any more"):
        open_job(server).wait("Suspended")


def test_waiting_has_a_limit(server: RecordedApiServer) -> None:
    with pytest.raises(ClientError, match="is Running after 0 s, not Completed"):
        open_job(server).wait(timeout_seconds=0)


def test_delete_sends_the_uid_and_accepts_a_missing_job(server: RecordedApiServer) -> None:
    open_job(server).delete()
    assert server.requests[-1][2]["preconditions"] == {"uid": recorded_object("job")["metadata"]["uid"]}
    open_job(server, "gone").delete()


def test_suspend_and_resume_are_patches(server: RecordedApiServer) -> None:
    open_job(server).suspend()
    open_job(server).resume()

    assert [body for method, _, body in server.requests if method == "PATCH"] == [
        {"spec": {"suspend": True}},
        {"spec": {"suspend": False}},
    ]


def test_retry_needs_a_failed_job_and_takes_a_corrected_spec(server: RecordedApiServer) -> None:
    with pytest.raises(ClientError, match="only a failed job can be retried, and llama is Running"):
        open_job(server).retry()
    server.answers |= {f"POST {JOBS}": 422}
    corrected = TrainingJob("broken", {"trainer": {"seed": 7}}, kubeconfig=str(server.kubeconfig))
    for failed_job in (corrected, open_job(server, "broken")):
        with pytest.raises(ClientError, match="create trainingjobs"):
            failed_job.retry()
    specs = [body["spec"] for method, _, body in server.requests if method == "POST"]
    assert specs == [{"trainer": {"seed": 7}}, recorded_object("failed")["spec"]]
    assert not any(method == "DELETE" for method, _, _ in server.requests)
