"""The cause of a rank's end, from its exit code, its output, the kernel's lines and the rules of the job."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.pod_environment import ended_rank
from trainium_agent.exits.diagnosis import ExitDiagnoser, describe_exit
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import classify_exit_code
from trainium_contract.faults.responses import Response

SRAM = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR nd-id=0"


def build_diagnoser(rules: Path | None = None) -> ExitDiagnoser:
    return ExitDiagnoser(rules, lambda: None)


@pytest.mark.parametrize(
    ("code", "output", "cause", "response"),
    [
        (1, "nrt_execute failed with status 1202", Cause.DEVICE, Response.REPLACE_NODE),
        (1, "NRT_EXEC_HW_ERR_COLLECTIVES", Cause.PEER_LOST, Response.RESTART_IN_PLACE),
        (1, "nrt_execute: status=1003", Cause.NUMERICAL, Response.RESTART_IN_PLACE),
        (134, "nrt_execute: status=1205", Cause.DEVICE_REPAIRABLE, Response.RESTART_IN_PLACE),
        (1, "nrt_execute: status=1206", Cause.NETWORK, Response.RESTART_IN_PLACE),
        (64, "nrt_execute: status=1202", Cause.USER_ERROR, Response.STOP),
        (76, "nrt_execute: status=5", Cause.PEER_LOST, Response.RESTART_IN_PLACE),
        (76, "nrt_execute: status=1201", Cause.DEVICE, Response.REPLACE_NODE),
        (1, "ImportError: torch", Cause.CRASH, Response.RESTART_IN_PLACE),
    ],
)
def test_a_runtime_status_takes_precedence_over_a_crash(
    code: int, output: str, cause: Cause, response: Response
) -> None:
    verdict = build_diagnoser().diagnose(ended_rank(code, output)).verdict
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
        (64, GLOO, Cause.USER_ERROR),
    ],
)
def test_an_error_of_a_lost_connection_at_the_end_is_a_lost_peer(code: int, output: str, cause: Cause) -> None:
    assert build_diagnoser().diagnose(ended_rank(code, output)).verdict.cause is cause


def test_a_device_error_in_the_kernel_log_explains_a_crash_and_a_lost_peer() -> None:
    for code in (1, 76, 139):
        diagnoser = build_diagnoser()
        diagnoser.kernel.add(SRAM, time.time())
        assert diagnoser.diagnose(ended_rank(code, "Connection closed by peer")).verdict.cause is Cause.DEVICE


def test_an_oom_kill_in_the_kernel_log_is_a_memory_failure() -> None:
    diagnoser = build_diagnoser()
    assert diagnoser.diagnose(ended_rank(137)).verdict.cause is Cause.CRASH
    diagnoser.kernel.add("Memory cgroup out of memory: Killed process 12 (python) total-vm:1kB", time.time())
    assert diagnoser.diagnose(ended_rank(137)).verdict.cause is Cause.OUT_OF_MEMORY
    assert diagnoser.diagnose(ended_rank(1)).verdict.cause is Cause.CRASH


def test_an_old_kernel_line_explains_nothing() -> None:
    diagnoser = build_diagnoser()
    diagnoser.kernel.add(SRAM, time.time() - 3600)
    assert diagnoser.diagnose(ended_rank(1)).verdict.cause is Cause.CRASH


def test_a_second_repairable_device_failure_of_a_node_is_seen_before() -> None:
    diagnoser = build_diagnoser()
    assert not diagnoser.diagnose(ended_rank(1, "nrt_execute: status=1205")).seen_before
    assert diagnoser.diagnose(ended_rank(1, "nrt_execute: status=1205")).seen_before
    assert not diagnoser.diagnose(ended_rank(1, "nrt_execute: status=1206")).seen_before
    assert not diagnoser.diagnose(
        ended_rank(1, "nrt_execute: status=1206")
    ).seen_before  # a healthy node may report it too


def write_rules(path: Path, *rules: dict[str, Any]) -> Path:
    path.write_text(json.dumps(rules))
    return path


def test_a_rule_of_the_job_takes_precedence_and_is_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    diagnoser = build_diagnoser(path)
    assert diagnoser.diagnose(ended_rank(3)).verdict.cause is Cause.CRASH
    write_rules(path, {"exitCodes": [3], "message": "license", "cause": "UserError", "action": "Stop"})
    assert diagnoser.diagnose(ended_rank(3)).verdict.cause is Cause.CRASH
    verdict = diagnoser.diagnose(ended_rank(3, "no license left")).verdict
    assert (verdict.cause, verdict.response) == (Cause.USER_ERROR, Response.STOP)
    write_rules(path, {"reason": "NRT_TIMEOUT", "cause": "Device", "action": "AvoidNode"})
    assert diagnoser.diagnose(ended_rank(1, "nrt_execute: status=5")).verdict.response is Response.REPLACE_NODE


@pytest.mark.parametrize("text", ["", "{", "[{}]", '[{"cause": "UserError"}]', "[1]", "\xff", "null"])
def test_unreadable_rules_are_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text, encoding="latin-1")
    assert build_diagnoser(path).diagnose(ended_rank(1)).verdict.cause is Cause.CRASH


def test_a_runtime_status_stays_in_the_message_after_many_later_lines() -> None:
    text = describe_exit(ended_rank(1, "nrt_execute failed with status 1202\n" + "frame\n" * 500))
    assert text.startswith("NRT_EXEC_HW_ERR_NC_UE (1202): nrt_execute failed")
    assert len(text) <= 1024
    assert "NRT_EXEC" not in describe_exit(ended_rank(1, "nrt_execute failed with status 1202"))


FULL = (
    "checkpoint storage /checkpoints: No space left on device: the store is full (or a file-size limit was hit): "
    "free space, raise the limit or lower keepLast"
)


def test_a_message_starts_with_the_last_error_and_leaves_out_steps() -> None:
    steps = "".join(
        f"2026-01-01 12:00:{second:02} INFO step {second}/40: loss 6.7386, 948 tokens/s\n" for second in range(15)
    )
    text = describe_exit(ended_rank(81, f"{steps}WARNING a save failed\n{FULL}\n"))
    assert text == f"{FULL}\nWARNING a save failed"
    assert describe_exit(ended_rank(81, steps)).startswith("2026-01-01"), "the only line"


def test_a_message_starts_with_the_last_line_of_a_long_output() -> None:
    text = describe_exit(ended_rank(1, "a frame of the traceback\n" * 200 + "ValueError: the cause\n"))
    assert text.startswith("ValueError: the cause\na frame of the traceback\n"), "no half line"
    assert len(text) <= 1024
    long_line = "x" * 3000 + " cause"
    assert describe_exit(ended_rank(1, f"line\n{long_line}")) == long_line[:1024]


def test_a_message_has_python_frames_before_cpp_frames() -> None:
    python = 'Traceback (most recent call last):\n  File "train.py", line 7, in main\nRuntimeError: Connection reset'
    native = "".join(f"frame #{number}: c10d::TCPStore::get() + 0x2 (0x7f12 in libtorch.so)\n" for number in range(30))
    text = describe_exit(
        ended_rank(1, f"{python}\nException raised from get at a.cpp:1 (most recent call first):\n{native}")
    )
    assert text.startswith("RuntimeError: Connection reset\nTraceback")
    assert "train.py" in text
    assert "c10d" not in text
    assert describe_exit(ended_rank(1, native)) == classify_exit_code(1).sentence


def test_a_message_of_a_killed_process_has_its_newest_lines_in_order() -> None:
    assert describe_exit(ended_rank(137, "one\ntwo\n")) == "killed by signal 9\none\ntwo"
    lines = "".join(f"line {number:04} of many\n" for number in range(400))
    text = describe_exit(ended_rank(134, lines))
    assert re.fullmatch(r"killed by signal 6\n(line \d{4} of many\n)+line 0399 of many", text), "no half line"
    text = describe_exit(ended_rank(137, lines))
    assert text == "killed by signal 9\nline 0397 of many\nline 0398 of many\nline 0399 of many", "none explains it"


def test_a_message_has_the_error_before_later_advice() -> None:
    text = describe_exit(
        ended_rank(1, "Traceback (most recent call last):\n  in load\nEOFError\n\nSet A=1 for a stack trace.\n")
    )
    assert text == "EOFError\nSet A=1 for a stack trace.\nTraceback (most recent call last):\n  in load"


CHAINED = """Traceback (most recent call last):
  File "/venv/lib/transformers/utils/import_utils.py", line 2044, in _get_module
    return importlib.import_module("." + module_name, self.__name__)
ModuleNotFoundError: No module named 'opentelemetry'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
{frames}  File "/src/train.py", line 3, in <module>
    from transformers import Trainer
RuntimeError: Failed to import transformers.trainer because of the following error (look up to see its traceback):
No module named 'opentelemetry'
"""


@pytest.mark.parametrize("frames", [0, 30])
def test_a_message_has_all_lines_of_the_last_error_and_frames_in_their_order(frames: int) -> None:
    extra = "".join(f'  File "/src/module_{number}.py", line 1, in <module>\n' for number in range(frames))
    text = describe_exit(ended_rank(1, CHAINED.format(frames=extra)))
    first, second, *others = text.split("\n")
    assert first.startswith("RuntimeError: Failed to import transformers.trainer")
    assert second == "No module named 'opentelemetry'"
    printed = [line for line in CHAINED.format(frames=extra).splitlines() if line and line not in (first, second)]
    assert others == printed[-len(others) :], "the newest lines, in order"
    assert len(text) <= 1024
    assert others[-1] == "    from transformers import Trainer"


def test_the_last_error_of_an_exception_group_comes_first() -> None:
    group = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/src/train.py", line 9, in <module>\n'
        "  | ExceptionGroup: loaders (2 sub-exceptions)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | ValueError: shard 3 is empty\n"
        "    +---------------- 2 ----------------\n"
        "    | KeyError: 'text'\n"
        "    +------------------------------------\n"
    )
    assert describe_exit(ended_rank(1, group)).split("\n")[0] == "KeyError: 'text'"


PROGRAMS = {
    "Unsupported: no kernel": "import atexit\n"
    "atexit.register(lambda: print('\\n'.join(f'closing {n}' for n in range(12))))\n"
    "class Unsupported(Exception): pass\n"
    "raise Unsupported('no kernel')",
    "struct.error: unpack requires a buffer of 4 bytes": "import atexit, struct, warnings\n"
    "atexit.register(lambda: warnings.warn('1 leaked semaphore'))\nstruct.unpack('i', b'1')",
    "KeyError: 'text'": "class Loader:\n def __del__(self): self.file.close()\n"
    "loader = Loader()\nraise KeyError('text')",
    "ValueError: 2 keys": "raise ValueError('2 keys\\n' + '\\n'.join(f'no key {n}' for n in range(20)))",
    "TypeError: b": "raise ExceptionGroup('loaders', [ValueError('a'), TypeError('b')])",
}
"""The error that explains the end, and the program that raises it."""


@pytest.mark.parametrize("error", PROGRAMS)
def test_the_error_of_a_program_comes_first_whatever_its_name_and_what_follows_it(error: str) -> None:
    program = [sys.executable, "-c", PROGRAMS[error]]
    ended = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    text = describe_exit(ended_rank(ended.returncode, ended.stdout))
    assert text.split("\n")[0] == error
    assert "Traceback (most recent call last):" in text


def test_names_of_ranks_are_no_part_of_an_error() -> None:
    output = (
        "[default1]:[rank1]: Traceback (most recent call last):\n"
        '[default1]:[rank1]:   File "/src/train.py", line 4, in <module>\n'
        "[default1]:[rank1]: torch._dynamo.exc.Unsupported: call x\n"
        "[default1]:W1129 12:00:00 destroy_process_group() was not called\n"
    )
    assert describe_exit(ended_rank(1, output)).startswith("torch._dynamo.exc.Unsupported: call x\n")


def test_a_line_of_equal_signs_is_not_an_error() -> None:
    report = "Root Cause:\n  exitcode  : -9 (pid: 15)\n  traceback : Signal 9 (SIGKILL) received by PID 15\n" + "=" * 60
    assert (
        describe_exit(ended_rank(1, report)).split("\n")[0].strip()
        == "traceback : Signal 9 (SIGKILL) received by PID 15"
    )


def test_a_message_contains_no_secret() -> None:
    text = describe_exit(
        ended_rank(1, "AWS_SECRET_ACCESS_KEY=abcdEFGH1234 Authorization: Bearer abc.def-ghi http://u:pw12@h/x")
    )
    assert "abcdEFGH1234" not in text
    assert "abc.def-ghi" not in text
    assert "pw12" not in text


def test_unreadable_rules_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rules.json"
    diagnoser = build_diagnoser(path)
    assert diagnoser._read_rules() == ()
    assert build_diagnoser()._read_rules() == ()
    path.write_text("no JSON")
    assert diagnoser._read_rules() == ()
    assert diagnoser._read_rules() == ()
    assert caplog.text.count("cannot be read") == 1
