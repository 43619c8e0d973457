"""`kubectl trn profile`: recording ranks and steps, and refusals before any request."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.testing.api.recorded_jobs import JOBS, RecordedApiServer
from tests.unit.client.conftest import Command
from trainium_client import pod_exec
from trainium_client.commands import profile
from trainium_client.pod_exec import ExecOutput
from trainium_contract.api_server.errors import ClientError


class FakeWorkers:
    """Two workers with one rank each, of which one has slower matrix products."""

    def __init__(self) -> None:
        self.step, self.total, self.seconds = 100, 1000, 0.5
        self.commands: list[tuple[str, tuple[str, ...]]] = []
        self.problems: dict[str, str] = {}
        self.trace: bytes | None = None

    def run(self, _: Any, pod: str, command: tuple[str, ...], **__: Any) -> ExecOutput:
        self.commands.append((pod, tuple(command)))
        if command[0] == "cat":
            return ExecOutput(self.trace or self._trace(int(command[1][-1])), b"")
        if command[2] == "trainium_agent.show_ranks":
            record = {"localRank": 0, "step": self.step, "step_seconds": self.seconds, "total_steps": self.total}
            return ExecOutput(json.dumps(record).encode(), b"")
        if pod in self.problems:
            return ExecOutput(json.dumps({"problem": self.problems[pod]}).encode(), b"")
        rank = pod[-1]
        return ExecOutput(json.dumps({"file": f"/run/{rank}", "stored": f"s3://b/{rank}"}).encode(), b"")

    def _trace(self, rank: int) -> bytes:
        spans = [("step 9", 1000.0), ("aten::mm", 100.0 * (1 + rank))]
        events = [
            {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 0.0, "dur": length}
            for name, length in spans
        ]
        return gzip.compress(json.dumps({"trainium": {"rank": rank}, "traceEvents": events}).encode())


@pytest.fixture
def workers() -> Iterator[FakeWorkers]:
    fake = FakeWorkers()
    with mock.patch.object(profile, "run_in_pod", fake.run), mock.patch.object(pod_exec, "run_in_pod", fake.run):
        yield fake


def profile_requests(workers: FakeWorkers) -> dict[str, tuple[str, ...]]:
    return {
        pod: command[3:] for pod, command in workers.commands if command[-4:-3] == ("trainium_agent.request_profile",)
    }


def test_the_slowest_rank_and_another_record_the_same_steps_a_few_seconds_ahead(
    trn: Command, server: RecordedApiServer, workers: FakeWorkers, tmp_path: Path
) -> None:
    pods = [row["cells"][0] for row in server.answers["/api/v1/namespaces/team/pods"]["rows"]]
    server.answers[f"{JOBS}/llama"]["status"]["stragglers"] = [{"pod": "llama-w-2", "slowdown": 1.8}]
    file = tmp_path / "trace.json.gz"
    code, out, err = trn("profile", "llama", "-f", str(file))
    assert (code, set(profile_requests(workers)) <= set(pods)) == (0, True)
    assert profile_requests(workers) == {"llama-w-0": ("0", "107", "3"), "llama-w-2": ("0", "107", "3")}
    assert "recording steps 107 to 109 of ranks 1, 0\n" in err
    assert f"{file} opens in https://ui.perfetto.dev; in the job's storage: s3://b/2, s3://b/0\n" in err
    assert "aten::mm" in out
    assert len(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]) == 4
    rows = json.loads(trn("profile", "llama", "-f", str(file), "-o", "json").out)
    assert [(row["pod"], row["stored"]) for row in rows] == [("llama-w-2", "s3://b/2"), ("llama-w-0", "s3://b/0")]


def test_only_named_ranks_record_and_near_the_end_they_start_at_once(
    trn: Command, workers: FakeWorkers, tmp_path: Path
) -> None:
    workers.total = 104
    code, _, err = trn("profile", "llama", "--ranks", "1", "--steps", "4", "-f", str(tmp_path / "a"))
    assert code == 0, err
    assert {pod for pod, _ in workers.commands} == {"llama-w-2"}
    assert profile_requests(workers) == {"llama-w-2": ("0", "101", "4")}
    code, _, err = trn("profile", "llama", "--ranks", "1", "--steps", "5")
    assert code == 1
    assert "llama has completed step 100 of 104: --steps 5 is more than the 4 that are left" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "2"), "there is no rank 2: llama has ranks 0 to 1"),
        (("--ranks", "0,x"), "--ranks 0,x: give up to 16 ranks, such as 0,3"),
        (("--steps", "21"), "--steps is 21: at most 20 steps are recorded at once"),
        (("--steps", "0"), "should be greater than or equal to 1"),
    ],
)
def test_ranks_and_steps_that_do_not_exist_are_refused(
    trn: Command, workers: FakeWorkers, words: tuple[str, ...], message: str
) -> None:
    code, out, err = trn("profile", "llama", *words)
    assert (code, out) == (1, "")
    assert message in err
    assert workers.commands == []


def test_a_job_that_cannot_be_recorded_reports_why(
    trn: Command, server: RecordedApiServer, workers: FakeWorkers
) -> None:
    assert "broken is Failed: only the steps of a job that trains can be recorded" in trn("profile", "broken").err
    server.answers[f"{JOBS}/llama"]["spec"]["program"] = {"command": ["python"]}
    assert "record them in the program with torch.profiler; `kubectl trn stacks llama`" in trn("profile", "llama").err
    assert workers.commands == []


def test_a_rank_that_fails_to_record_is_named_and_the_others_are_shown(
    trn: Command, workers: FakeWorkers, tmp_path: Path
) -> None:
    file = tmp_path / "a"
    workers.problems = {"llama-w-0": "the rank makes no steps now"}
    code, out, err = trn("profile", "llama", "-f", str(file))
    assert code == 0
    assert "rank 0 in llama-w-0: the rank makes no steps now\n" in err
    assert "SHARE" in out
    workers.problems["llama-w-2"] = "the rank ended"
    file.unlink()
    code, out, err = trn("profile", "llama", "-f", str(file))
    assert (code, out, file.exists()) == (1, "", False)
    workers.problems, workers.trace = {}, b"nonsense"
    assert "cannot be read: it is not JSON" in trn("profile", "llama", "-f", str(file)).err


def test_an_unreachable_worker_is_reported(trn: Command) -> None:
    with mock.patch.object(pod_exec, "run_in_pod", side_effect=ClientError("no such pod")):
        assert "is not training now: no such pod" in trn("profile", "llama").err
