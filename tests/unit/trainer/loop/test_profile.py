"""Traces of steps: recorded on real ranks, by the configuration and on request, and bounded."""

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


def spans(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def steps_of(found: list[dict[str, Any]]) -> list[str]:
    return [each["name"] for each in found if each["name"].startswith("step ")]


def asked(memory: Path, *, rank: int, first: int, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainium_agent.request_profile", str(rank), str(first), str(steps)]
    variables = os.environ | {"TRAINIUM_MEMORY_DIR": str(memory)}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)


def answer(memory: Path, *, rank: int, first: int, steps: int) -> dict[str, Any]:
    """Request a trace as `kubectl trn profile` does in a pod."""
    with asked(memory, rank=rank, first=first, steps=steps) as asking:
        found: dict[str, Any] = json.loads(asking.communicate(timeout=100)[0])
    return found


def assert_nested(found: list[dict[str, Any]]) -> None:
    """Check what a viewer of this format requires of a thread: a span ends before the one around it."""
    around: dict[Any, list[float]] = {}
    for each in sorted(found, key=lambda each: (each["ts"], -each["dur"])):
        ends = around.setdefault((each["pid"], each["tid"]), [])
        while ends and ends[-1] <= each["ts"]:
            ends.pop()
        assert not ends or each["ts"] + each["dur"] <= ends[-1] + 0.01, each["name"]
        ends.append(each["ts"] + each["dur"])


def test_the_configured_steps_of_the_named_ranks_are_recorded_and_each_span_lies_within_its_step(
    launch: Launcher, reference_run: ReferenceRuns
) -> None:
    job = launch(2, "run", ["monitor.profile={steps: [3, 4], ranks: [1, 7]}"]).finish()
    (path,) = (job.folder / "profiles").iterdir()
    assert path.name == "steps-3-4-rank-1.json.gz"
    assert "monitor.profile.ranks names 7, which is not there: the ranks are 0 to 1" in job.log()
    found = spans(path)
    assert steps_of(found) == ["step 3", "step 4"]
    for step in (each for each in found if each["name"] in ("step 3", "step 4")):
        inside = [
            each["name"] for each in found
            if each["tid"] == step["tid"] and step["ts"] <= each["ts"]
            and each["ts"] + each["dur"] <= step["ts"] + step["dur"]
        ]  # fmt: skip
        assert {"wait for data", "forward and backward", "sum totals", "reduce gradients and update"} <= set(inside)
        assert "aten::mm" in inside
    assert "gloo:all_reduce" in {each["name"] for each in found}
    assert_nested(found)
    assert parse_trace(path.read_bytes()).content["trainium"] == {"rank": 1}
    assert job.losses() == reference_run(2).losses()


def test_a_trace_is_shown_and_put_beside_another_one_without_a_cluster(
    launch: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = launch(2, "run", ["steps=4", "monitor.profile={steps: [3, 4], ranks: [0, 1]}"]).finish()
    one, other = sorted((job.folder / "profiles").iterdir())
    merged = tmp_path / "both.json.gz"
    assert run(["profile", str(other), str(one), "--merge", str(merged)]) == 0
    out = capsys.readouterr().out
    assert [line.partition(",")[0] for line in out.splitlines()[:2]] == ["rank 1: steps 3 to 4", "rank 0: steps 3 to 4"]
    assert "DIFFERENCE" in out
    assert "\nreduce gradients and update  " in out
    assert "\naten::" in out
    both = spans(merged)
    assert len(both) == len([each for path in (one, other) for each in spans(path) if isinstance(each["pid"], int)])
    assert_nested(both)
    for file, reason in ((tmp_path / "none", "cannot be read"), (job.folder / "metrics.jsonl", "is no trace")):
        assert run(["profile", str(file)]) == ExitCode.USER_ERROR
        assert reason in capsys.readouterr().err
    assert run(["profile", str(one), "--merge", str(tmp_path)]) == ExitCode.USER_ERROR


def test_a_running_rank_records_requested_steps_and_answers(launch: Launcher, tmp_path: Path) -> None:
    progress = tmp_path / "memory" / "progress" / "g1-r0"
    job = launch(1, "run", ["steps=100000"], TRAINIUM_PROGRESS_FILE=str(progress))
    job.wait_for_step(3)
    answers = [
        answer(tmp_path / "memory", rank=0, first=job.metrics()[-1]["step"] + 20, steps=steps) for steps in (2, 1)
    ]
    for number, found in zip((2, 1), answers, strict=True):
        first, last = found["first"], found["last"]
        assert last - first + 1 == number
        assert steps_of(spans(Path(found["file"]))) == [f"step {step}" for step in range(first, last + 1)]
    # Steps that have passed: the next ones are recorded.
    late = answer(tmp_path / "memory", rank=0, first=1, steps=1)
    assert late["first"] > answers[1]["last"]
    assert answer(tmp_path / "memory", rank=1, first=1, steps=1) == {"problem": "the rank does not run"}
    job.request_exit()
    assert sorted(progress.parent.glob("*.profile-*")) == []


def test_steps_that_a_run_does_not_reach_are_answered_when_it_ends(launch: Launcher, tmp_path: Path) -> None:
    progress = tmp_path / "memory" / "progress" / "g1-r0"
    job = launch(1, "run", ["steps=100000"], TRAINIUM_PROGRESS_FILE=str(progress))
    job.wait_for_step(3)
    with asked(tmp_path / "memory", rank=0, first=100_001, steps=2) as asking:
        while not progress.with_name("g1-r0.profile").exists():
            time.sleep(0.02)
        job.request_exit()
        problem = json.loads(asking.communicate(timeout=60)[0])["problem"]
    assert "the ranks ended" in problem or "the rank ended" in problem
    after = answer(tmp_path / "memory", rank=0, first=1, steps=1)["problem"]
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
    left = sorted(each.name for each in folder.glob("*-rank-0.json.gz"))
    assert len(left) == 10
    assert {"steps-3-4-rank-0.json.gz", "steps-2-2-rank-0.json.gz"} <= set(left)
    assert not {"steps-0-0-rank-0.json.gz", "steps-1-1-rank-0.json.gz"} & set(left)


def test_a_restart_records_what_is_left_of_the_configured_steps(launch: Launcher) -> None:
    launch(1, "run", ["steps=4"]).finish()
    job = launch(1, "run", ["steps=7", "monitor.profile={steps: [4, 6]}"]).finish()
    assert [each.name for each in (job.folder / "profiles").iterdir()] == ["steps-5-6-rank-0.json.gz"]


def test_a_trace_above_the_limit_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_MOST_BYTES", 10)
    draft = tmp_path / "a.draft"
    draft.write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="record fewer steps"):
        profile._compress(draft, tmp_path / "a.json.gz")
    assert list(tmp_path.iterdir()) == [draft]
