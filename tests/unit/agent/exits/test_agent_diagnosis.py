from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from trainium_agent.exits.diagnosis import Signs, describe_exit
from trainium_agent.ranks.output import Tail
from trainium_agent.ranks.processes import RankProcess
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import classify_exit_code
from trainium_contract.faults.responses import Response

if TYPE_CHECKING:
    from pathlib import Path

SRAM = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR nd-id=0"


def ended(code: int, output: str = "") -> RankProcess:
    process = RankProcess(0, 3, 0, 12345, Tail("[rank 3] "))
    process.output.feed(output.encode())
    process.output.close()
    process.ended(code)
    return process


def signs(rules: Path | None = None) -> Signs:
    return Signs(rules, lambda: None)


@pytest.mark.parametrize(
    ("code", "output", "cause", "response"),
    [
        (1, "nrt_execute failed with status 1202", Cause.DEVICE, Response.REPLACE_NODE),
        (1, "NRT_EXEC_HW_ERR_COLLECTIVES", Cause.PEER_LOST, Response.RESTART_IN_PLACE),
        (1, "nrt_execute: status=1003", Cause.NUMERICAL, Response.RESTART_IN_PLACE),
        (134, "nrt_execute: status=1205", Cause.DEVICE_REPAIRABLE, Response.RESTART_IN_PLACE),
        (1, "nrt_execute: status=1206", Cause.NETWORK, Response.RESTART_IN_PLACE),
        (64, "nrt_execute: status=1202", Cause.USER_CODE, Response.STOP),
        (76, "nrt_execute: status=5", Cause.PEER_LOST, Response.RESTART_IN_PLACE),
        (76, "nrt_execute: status=1201", Cause.DEVICE, Response.REPLACE_NODE),
        (1, "ImportError: torch", Cause.CRASH, Response.RESTART_IN_PLACE),
    ],
)
def test_a_runtime_status_is_more_specific_than_a_crash(
    code: int, output: str, cause: Cause, response: Response
) -> None:
    verdict = signs().diagnose(ended(code, output)).verdict
    assert (verdict.cause, verdict.response) == (cause, response)


GLOO = "[rank1]: RuntimeError: [/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4242\n"
SUMMARY = "".join(f"{line}\n" for line in range(30))
"""Lines of the length of torchrun's report about its ranks."""


@pytest.mark.parametrize(
    ("code", "output", "cause"),
    [
        (1, f"Traceback (most recent call last):\n{GLOO}", Cause.PEER_LOST),
        (134, f"{GLOO}terminate called without an active exception\n", Cause.PEER_LOST),
        (1, f"{GLOO}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{SUMMARY}", Cause.PEER_LOST),
        (1, f"{GLOO}IndexError: list index out of range\n", Cause.CRASH),
        (1, f"{GLOO}my.own.StateError\n", Cause.CRASH),
        (137, GLOO, Cause.CRASH),
        (139, GLOO, Cause.CRASH),
        (1, GLOO + "step 1\n" * 200, Cause.CRASH),
        (1, "requests.exceptions.ConnectionError: Connection reset by peer\n", Cause.CRASH),
        (64, GLOO, Cause.USER_CODE),
    ],
)
def test_a_program_that_ends_with_the_error_of_a_lost_peer_is_a_victim(code: int, output: str, cause: Cause) -> None:
    assert signs().diagnose(ended(code, output)).verdict.cause is cause


def test_a_device_error_in_the_kernels_log_is_behind_a_crash_and_a_lost_peer_alike() -> None:
    for code in (1, 76, 139):
        made = signs()
        made.kernel.take(SRAM, time.time())
        assert made.diagnose(ended(code, "Connection closed by peer")).verdict.cause is Cause.DEVICE


def test_a_kill_by_the_kernel_for_memory_is_distinguished_from_another_kill() -> None:
    made = signs()
    assert made.diagnose(ended(137)).verdict.cause is Cause.CRASH
    made.kernel.take("Memory cgroup out of memory: Killed process 12 (python) total-vm:1kB", time.time())
    assert made.diagnose(ended(137)).verdict.cause is Cause.MEMORY
    assert made.diagnose(ended(1)).verdict.cause is Cause.CRASH


def test_an_old_kernel_line_explains_nothing() -> None:
    made = signs()
    made.kernel.take(SRAM, time.time() - 3600)
    assert made.diagnose(ended(1)).verdict.cause is Cause.CRASH


def test_a_repairable_device_that_fails_again_on_this_node_was_seen_before() -> None:
    made = signs()
    assert not made.diagnose(ended(1, "nrt_execute: status=1205")).seen_before
    assert made.diagnose(ended(1, "nrt_execute: status=1205")).seen_before
    assert not made.diagnose(ended(1, "nrt_execute: status=1206")).seen_before
    assert not made.diagnose(ended(1, "nrt_execute: status=1206")).seen_before  # a healthy node may report it too


def write(path: Path, *rules: dict[str, Any]) -> Path:
    path.write_text(json.dumps(rules))
    return path


def test_a_rule_of_the_job_comes_first_and_a_change_of_it_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    made = signs(path)
    assert made.diagnose(ended(3)).verdict.cause is Cause.CRASH
    write(path, {"exitCodes": [3], "message": "license", "cause": "UserCode", "action": "Stop"})
    assert made.diagnose(ended(3)).verdict.cause is Cause.CRASH
    verdict = made.diagnose(ended(3, "no license left")).verdict
    assert (verdict.cause, verdict.response) == (Cause.USER_CODE, Response.STOP)
    write(path, {"reason": "NRT_TIMEOUT", "cause": "Device", "action": "AvoidNode"})
    assert made.diagnose(ended(1, "nrt_execute: status=5")).verdict.response is Response.REPLACE_NODE


@pytest.mark.parametrize("text", ["", "{", "[{}]", '[{"cause": "UserCode"}]', "[1]", "\xff", "null"])
def test_rules_that_cannot_be_read_are_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text, encoding="latin-1")
    assert signs(path).diagnose(ended(1)).verdict.cause is Cause.CRASH


def test_the_runtimes_word_stays_in_the_message_when_later_lines_drive_it_out() -> None:
    text = describe_exit(ended(1, "nrt_execute failed with status 1202\n" + "frame\n" * 500))
    assert text.startswith("NRT_EXEC_HW_ERR_NC_UE (1202): nrt_execute failed")
    assert len(text) <= 1024
    assert "NRT_EXEC" not in describe_exit(ended(1, "nrt_execute failed with status 1202"))


FULL = (
    "checkpoint storage /checkpoints: No space left on device: the store is full (or a file-size limit was hit): "
    "free space, raise the limit or lower keepLast"
)


def test_the_last_message_of_a_program_comes_first_and_steps_that_went_well_are_left_out() -> None:
    steps = "".join(
        f"2026-01-01 12:00:{second:02} INFO step {second}/40: loss 6.7386, 948 tokens/s\n" for second in range(15)
    )
    text = describe_exit(ended(81, f"{steps}WARNING a save failed\n{FULL}\n"))
    assert text == f"{FULL}\nWARNING a save failed"
    assert describe_exit(ended(81, steps)).startswith("2026-01-01"), "better than nothing"


def test_the_last_word_survives_a_long_output_and_a_short_bound() -> None:
    text = describe_exit(ended(1, "a frame of the traceback\n" * 200 + "ValueError: the cause\n"))
    assert text.startswith("ValueError: the cause\na frame of the traceback\n"), "no half line"
    assert len(text) <= 1024
    word = "x" * 3000 + " cause"
    assert describe_exit(ended(1, f"line\n{word}")) == word[:1024]


def test_frames_of_cpp_leave_the_space_to_the_lines_of_python() -> None:
    python = 'Traceback (most recent call last):\n  File "train.py", line 7, in main\nRuntimeError: Connection reset'
    native = "".join(f"frame #{number}: c10d::TCPStore::get() + 0x2 (0x7f12 in libtorch.so)\n" for number in range(30))
    text = describe_exit(
        ended(1, f"{python}\nException raised from get at a.cpp:1 (most recent call first):\n{native}")
    )
    assert text.startswith("RuntimeError: Connection reset\nTraceback")
    assert "train.py" in text
    assert "c10d" not in text
    assert describe_exit(ended(1, native)) == classify_exit_code(1).sentence


def test_of_a_process_that_was_killed_the_newest_lines_are_reported_in_their_order() -> None:
    assert describe_exit(ended(137, "one\ntwo\n")) == "killed by signal 9\none\ntwo"
    lines = "".join(f"line {number:04} of many\n" for number in range(400))
    text = describe_exit(ended(134, lines))
    assert re.fullmatch(r"killed by signal 6\n(line \d{4} of many\n)+line 0399 of many", text), "no half line"
    text = describe_exit(ended(137, lines))
    assert text == "killed by signal 9\nline 0397 of many\nline 0398 of many\nline 0399 of many", "none explains it"


def test_the_error_comes_before_advice_that_is_printed_after_it() -> None:
    text = describe_exit(
        ended(1, "Traceback (most recent call last):\n  in load\nEOFError\n\nSet A=1 for a stack trace.\n")
    )
    assert text == "EOFError\nSet A=1 for a stack trace.\nTraceback (most recent call last):\n  in load"


def test_a_ruler_below_the_report_of_a_launcher_is_no_reason() -> None:
    report = "Root Cause:\n  exitcode  : -9 (pid: 15)\n  traceback : Signal 9 (SIGKILL) received by PID 15\n" + "=" * 60
    assert describe_exit(ended(1, report)).split("\n")[0].strip() == "traceback : Signal 9 (SIGKILL) received by PID 15"


def test_a_message_holds_no_secret() -> None:
    text = describe_exit(
        ended(1, "AWS_SECRET_ACCESS_KEY=abcdEFGH1234 Authorization: Bearer abc.def-ghi http://u:pw12@h/x")
    )
    assert "abcdEFGH1234" not in text
    assert "abc.def-ghi" not in text
    assert "pw12" not in text
