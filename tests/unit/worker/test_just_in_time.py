"""A surviving rank saves the newest step for all: real processes that are killed, stopped and restarted."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

import trainium_worker
from tests.testing.suite.timeouts import scaled, until
from tests.unit.worker.programs import SimulatedJob, save_each_step
from trainium_worker.dcp.just_in_time import JustInTimeSave
from trainium_worker.dcp.session import Session
from trainium_worker.progress_record import read_notice
from trainium_worker.save_request import listen, request_path, request_save

STEPS = 12


def run(folder: Path, nodes: list[int], **options: object) -> SimulatedJob:
    folder.mkdir(exist_ok=True)
    job = SimulatedJob(folder)
    assert job.run(nodes=nodes, train=save_each_step, steps=STEPS, case="same", **options) == [0] * len(nodes), (
        job.errors
    )
    return job


def test_most_steps_are_not_copied(tmp_path: Path) -> None:
    for report in run(tmp_path, [0, 1]).reports:
        assert {1, 2} <= set(report["saved"])
        assert 2 <= len(report["sent"]) == len(report["saved"]) <= STEPS // 2


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("failed", [0, 1])
def test_a_surviving_rank_saves_when_another_one_is_killed_or_hangs(
    tmp_path: Path, failed: int, fault: signal.Signals
) -> None:
    expected = run(tmp_path / "whole", [0, 1])
    job = SimulatedJob(tmp_path)
    assert job.run(nodes=[0, 1], train=save_each_step, steps=STEPS, case="same", kill=[failed, 9], fault=fault) != [
        0,
        0,
    ]
    job.lose_node(failed)
    nodes = [2, 1] if failed == 0 else [0, 2]
    assert job.run(nodes=nodes, train=save_each_step, steps=STEPS, case="same") == [0, 0], job.errors
    resumed = {report["resumed"] for report in job.reports}
    assert resumed in ({8}, {9}), "the step that was complete, or the one that failed"
    assert job.reports[1]["weights"] == expected.reports[1]["weights"], "bitwise equal"


def test_a_saved_step_is_loaded_at_another_size(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path)
    assert job.run(nodes=[0, 1, 2], train=save_each_step, steps=STEPS, case="same", kill=[1, 9]) != [0, 0, 0]
    assert job.run(nodes=[0, 2], train=save_each_step, steps=STEPS, case="same") == [0, 0], job.errors
    assert {report["resumed"] for report in job.reports} in ({8}, {9})


def test_a_failure_of_all_ranks_costs_the_steps_since_the_last_copy(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path)
    assert job.run(nodes=[0, 1], train=save_each_step, steps=STEPS, case="same", kill=[-1, 9]) == [-9, -9]
    assert job.run(nodes=[0, 1], train=save_each_step, steps=STEPS, case="same") == [0, 0], job.errors
    resumed = {report["resumed"] for report in job.reports}
    assert len(resumed) == 1
    assert 2 <= min(resumed) <= 8


def test_each_step_is_copied_without_space_for_another_save(tmp_path: Path) -> None:
    job = run(tmp_path, [0, 1], file_limit={1: 2 << 20})
    assert [len(report["sent"]) for report in job.reports] == [STEPS, STEPS]
    assert "each step is copied, because rank 1 cannot prepare to save the newest one" in read_notice(job.progress(1))


def test_ranks_on_one_node_copy_each_step(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path)
    assert job.run(nodes=[0], per_node=2, train=save_each_step, steps=STEPS, case="same", kill=[-1, 9])
    assert job.run(nodes=[0], per_node=2, train=save_each_step, steps=STEPS, case="same") == [0, 0], job.errors
    assert [report["resumed"] for report in job.reports] == [8, 8]


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JustInTimeSave:
    monkeypatch.setenv("TRAINIUM_PROGRESS_FILE", str(tmp_path / "g1-r0"))
    monkeypatch.setattr(trainium_worker, "_reporter", None)
    (tmp_path / "memory").mkdir()
    return JustInTimeSave(Session(tmp_path / "memory"), {"model.weight": torch.zeros(3)})


def test_a_request_within_a_step_of_the_optimizer_gets_the_state_after_it(held: JustInTimeSave, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.full((3,), -1.0)
    held.hold(4, lambda: {"model.weight": weight.detach()}, [weight], optimizer)
    optimizer.step()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(scaled(20))
        connection.connect(str(request_path(tmp_path / "g1-r0")))
        assert connection.recv(1) == b"r"
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        held.hold(5, lambda: {"model.weight": weight.detach()}, [weight], optimizer)
        connection.settimeout(scaled(20))
        assert connection.recv(1) == b"s"
    snapshots = Session(tmp_path / "memory").snapshots
    assert snapshots is not None
    ((path, part),) = snapshots.parts().items()
    payload = snapshots.open(path, part)
    assert part.version.step == 5
    assert payload is not None
    assert payload[:12].view(torch.float32).tolist() == [2.0, 3.0, 4.0]


def test_the_optimizer_waits_while_the_state_is_written(held: JustInTimeSave) -> None:
    is_writing, may_end = threading.Event(), threading.Event()

    def state() -> dict[str, torch.Tensor]:
        is_writing.set()
        may_end.wait(scaled(20))
        return {"model.weight": torch.ones(3)}

    held.hold(1, state)
    writing, releasing = threading.Thread(target=held.write), threading.Thread(target=held.release)
    writing.start()
    assert is_writing.wait(scaled(20))
    releasing.start()
    releasing.join(0.2)
    assert releasing.is_alive()
    may_end.set()
    releasing.join(scaled(20))
    writing.join(scaled(20))
    assert not releasing.is_alive()


def test_a_save_that_fails_becomes_a_notice(held: JustInTimeSave, tmp_path: Path) -> None:
    def state() -> dict[str, torch.Tensor]:
        raise RuntimeError("the device is lost")

    held.hold(3, state)
    assert not held.write()
    assert read_notice(tmp_path / "g1-r0") == "rank 0 could not save step 3: the device is lost"
    assert not request_save(tmp_path / "g1-r0", scaled(20))


def test_weights_that_something_else_has_changed_are_not_saved(held: JustInTimeSave, tmp_path: Path) -> None:
    weight = torch.zeros(3)
    held.hold(3, lambda: {"model.weight": weight}, [weight])
    weight += 1
    assert not held.write()
    assert "something but the optimizer has changed the weights" in read_notice(tmp_path / "g1-r0")


def test_nothing_is_saved_once_it_is_closed(held: JustInTimeSave, tmp_path: Path) -> None:
    held.hold(3, lambda: {"model.weight": torch.zeros(3)})
    held.close()
    assert not held.write()
    assert not [*(tmp_path / "memory").glob("*.snapshot")]


def test_a_request_to_a_process_that_does_not_listen_or_answer_is_not_waited_for(tmp_path: Path) -> None:
    record = tmp_path / ("long" * 60) / "g1-r0"
    record.parent.mkdir()
    assert not request_save(record, 60.0), "no socket"
    code = "import sys; from pathlib import Path; from trainium_worker.save_request import listen;"
    code += "listen(Path(sys.argv[1]), lambda: True); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code, str(record)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert request_save(record, scaled(20))
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, lambda: "it runs")
        was_saved = request_save(record, 60.0)
        process.kill()
        assert not was_saved, "stopped"
    assert request_path(record).is_socket()
    assert not request_save(record, 60.0), "ended"
    listen(record, lambda: True)
    assert request_save(record, scaled(20)), "a later process of the same rank"
