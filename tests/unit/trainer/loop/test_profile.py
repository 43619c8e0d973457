"""Record traces of steps on real ranks, by configuration and on request, with limits."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.s3_gateway import run_gateway
from tests.unit.trainer.conftest import Launcher, ReferenceRuns
from trainium_contract.exit_codes import ExitCode
from trainium_contract.views.trace import parse_trace
from trainium_trainer.cli import run
from trainium_trainer.loop import profile


def read_spans(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def step_names(spans: list[dict[str, Any]]) -> list[str]:
    return [span["name"] for span in spans if span["name"].startswith("step ")]


def start_request(memory: Path, *, rank: int, first: int, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainium_agent.request_profile", str(rank), str(first), str(steps)]
    variables = os.environ | {"TRAINIUM_MEMORY_DIR": str(memory)}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)


def request_trace(memory: Path, *, rank: int, first: int, steps: int) -> dict[str, Any]:
    """Request a trace, like `kubectl trn profile` in a pod."""
    with start_request(memory, rank=rank, first=first, steps=steps) as process:
        answer: dict[str, Any] = json.loads(process.communicate(timeout=100)[0])
    return answer


def assert_nested(spans: list[dict[str, Any]]) -> None:
    """Check the requirement of trace viewers: a span ends before the enclosing one."""
    open_ends: dict[Any, list[float]] = {}
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        ends = open_ends.setdefault((span["pid"], span["tid"]), [])
        while ends and ends[-1] <= span["ts"]:
            ends.pop()
        assert not ends or span["ts"] + span["dur"] <= ends[-1] + 0.01, span["name"]
        ends.append(span["ts"] + span["dur"])


def test_the_configured_steps_of_the_named_ranks_are_recorded(launch: Launcher, reference_run: ReferenceRuns) -> None:
    job = launch(2, "run", ["monitor.profile={steps: [3, 4], ranks: [1, 7]}"]).finish()
    (path,) = (job.folder / "profiles").iterdir()
    assert path.name == "steps-3-4-rank-1.json.gz"
    assert "monitor.profile.ranks names 7, which is not there: the ranks are 0 to 1" in job.log()
    spans = read_spans(path)
    assert step_names(spans) == ["step 3", "step 4"]
    for step in (span for span in spans if span["name"] in ("step 3", "step 4")):
        inside = [
            span["name"] for span in spans
            if span["tid"] == step["tid"] and step["ts"] <= span["ts"]
            and span["ts"] + span["dur"] <= step["ts"] + step["dur"]
        ]  # fmt: skip
        assert {"wait for data", "forward and backward", "sum totals", "reduce gradients and update"} <= set(inside)
        assert "aten::mm" in inside
    assert "gloo:all_reduce" in {span["name"] for span in spans}
    assert_nested(spans)
    assert parse_trace(path.read_bytes()).content["trainium"] == {"rank": 1}
    assert job.losses() == reference_run(2).losses()


def test_traces_are_compared_and_merged_without_a_cluster(
    launch: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = launch(2, "run", ["steps=4", "monitor.profile={steps: [3, 4], ranks: [0, 1]}"]).finish()
    first, second = sorted((job.folder / "profiles").iterdir())
    merged = tmp_path / "both.json.gz"
    assert run(["profile", str(second), str(first), "--merge", str(merged)]) == 0
    out = capsys.readouterr().out
    assert [line.partition(",")[0] for line in out.splitlines()[:2]] == ["rank 1: steps 3 to 4", "rank 0: steps 3 to 4"]
    assert "DIFFERENCE" in out
    assert "\nreduce gradients and update  " in out
    assert "\naten::" in out
    both = read_spans(merged)
    assert len(both) == sum(isinstance(span["pid"], int) for path in (first, second) for span in read_spans(path))
    assert_nested(both)
    for file, reason in ((tmp_path / "none", "cannot be read"), (job.folder / "metrics.jsonl", "is no trace")):
        assert run(["profile", str(file)]) == ExitCode.USER_ERROR
        assert reason in capsys.readouterr().err
    assert run(["profile", str(first), "--merge", str(tmp_path)]) == ExitCode.USER_ERROR


def test_a_running_rank_records_requested_steps_and_answers(launch: Launcher, tmp_path: Path) -> None:
    progress = tmp_path / "memory" / "progress" / "g1-r0"
    job = launch(1, "run", ["steps=100000"], TRAINIUM_PROGRESS_FILE=str(progress))
    job.wait_for_step(3)
    answers = [
        request_trace(tmp_path / "memory", rank=0, first=job.metrics()[-1]["step"] + 20, steps=steps)
        for steps in (2, 1)
    ]
    for number, answer in zip((2, 1), answers, strict=True):
        first, last = answer["first"], answer["last"]
        assert last - first + 1 == number
        assert step_names(read_spans(Path(answer["file"]))) == [f"step {step}" for step in range(first, last + 1)]
    # Requested steps have passed, so the next ones are recorded.
    late = request_trace(tmp_path / "memory", rank=0, first=1, steps=1)
    assert late["first"] > answers[1]["last"]
    assert request_trace(tmp_path / "memory", rank=1, first=1, steps=1) == {"problem": "the rank does not run"}
    job.request_exit()
    assert sorted(progress.parent.glob("*.profile-*")) == []


def test_a_request_for_steps_beyond_the_end_is_answered_at_the_end(launch: Launcher, tmp_path: Path) -> None:
    progress = tmp_path / "memory" / "progress" / "g1-r0"
    job = launch(1, "run", ["steps=100000"], TRAINIUM_PROGRESS_FILE=str(progress))
    job.wait_for_step(3)
    with start_request(tmp_path / "memory", rank=0, first=100_001, steps=2) as process:
        while not progress.with_name("g1-r0.profile").exists():
            time.sleep(0.02)
        job.request_exit()
        problem = json.loads(process.communicate(timeout=60)[0])["problem"]
    assert "the ranks ended" in problem or "the rank ended" in problem
    after = request_trace(tmp_path / "memory", rank=0, first=1, steps=1)["problem"]
    assert after == "the rank makes no steps now (yielded, stage Train)"


def test_a_trace_that_cannot_be_written_stops_no_step(launch: Launcher) -> None:
    folder = launch(1, "run", ["steps=2"]).finish().folder
    (folder / "profiles").write_text("not a folder")
    job = launch(1, "run", ["steps=5", "monitor.profile={steps: [3, 4]}"]).finish()
    assert "the trace of steps 3 to 4 cannot be written" in job.log()
    assert job.metrics()[-1]["step"] == 5


def test_a_trace_is_copied_into_the_object_store_of_the_records(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_gateway(tmp_path, monkeypatch) as server:
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        variables["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        overrides = ["steps=4", "monitor.profile={steps: [3, 3]}", "checkpoint.path=s3://bucket/run"]
        job = launch(1, "run", overrides, **variables)
        assert job.wait() == [0], job.log()
        stored = server.objects("bucket")["run/profiles/steps-3-3-rank-0.json.gz"]
    (kept,) = (tmp_path / "cache").rglob("steps-3-3-rank-0.json.gz")
    assert kept.read_bytes() == stored
    assert "trace of steps 3 to 3: s3://bucket/run/profiles/steps-3-3-rank-0.json.gz" in job.log()


def test_the_newest_ten_traces_of_a_rank_are_kept(launch: Launcher) -> None:
    folder = launch(1, "run", ["steps=2"]).finish().folder / "profiles"
    folder.mkdir()
    for number in range(11):
        old = folder / f"steps-{number}-{number}-rank-0.json.gz"
        old.touch()
        os.utime(old, (number, number))
    other = folder / "steps-1-1-rank-10.json.gz"
    other.touch()
    launch(1, "run", ["steps=4", "monitor.profile={steps: [3, 4]}"]).finish()
    assert other.exists()
    kept = sorted(path.name for path in folder.glob("*-rank-0.json.gz"))
    assert len(kept) == 10
    assert {"steps-3-4-rank-0.json.gz", "steps-2-2-rank-0.json.gz"} <= set(kept)
    assert not {"steps-0-0-rank-0.json.gz", "steps-1-1-rank-0.json.gz"} & set(kept)


def test_a_restart_records_the_remaining_configured_steps(launch: Launcher) -> None:
    launch(1, "run", ["steps=4"]).finish()
    job = launch(1, "run", ["steps=7", "monitor.profile={steps: [4, 6]}"]).finish()
    assert [path.name for path in (job.folder / "profiles").iterdir()] == ["steps-5-6-rank-0.json.gz"]


def test_a_trace_above_the_limit_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_MAX_BYTES", 10)
    draft = tmp_path / "a.draft"
    draft.write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="record fewer steps"):
        profile._compress(draft, tmp_path / "a.json.gz")
    assert list(tmp_path.iterdir()) == [draft]
