"""Output of a process in the pod's log, the lines that are kept of it, and statuses of the Neuron runtime in it."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.operator.agent_settings import agent_settings
from tests.unit.agent.pod_environment import ended_rank
from trainium_agent.exits.diagnosis import describe_exit
from trainium_agent.ranks import output
from trainium_agent.ranks.output import OutputSource, OutputTail, create_line_formatter
from trainium_agent.ranks.runtime_status import RuntimeMessages, find_status
from trainium_contract.faults.signs import RUNTIME_STATUSES, Sign
from trainium_contract.wire.log_line import EXIT_LOGGER, LINE_BYTES, LogFormat, LogLine, build_log_line, read_log_line

SETTINGS = agent_settings(Path("agent"))
JSON = replace(SETTINGS, log_format=LogFormat.JSON)
RANK = OutputSource("rank 3", 3, 2, 1)


def lines(log: bytes) -> list[LogLine]:
    parsed = [read_log_line(line) for line in log.decode().splitlines()]
    assert all(parsed)
    return [line for line in parsed if line is not None]


def trainer_line(message: str, **fields: Any) -> bytes:
    defaults = {"time": "2026-11-24T08:09:10Z", "level": "warning", "source": "trainer", "logger": "trainium.loop"}
    return build_log_line(message, **{**defaults, "rank": 3, **fields}).to_line().encode()


def test_a_text_line_is_prefixed_with_its_process() -> None:
    assert create_line_formatter(SETTINGS, RANK)(b"any {words}").log == b"[rank 3] any {words}\n"
    assert create_line_formatter(SETTINGS, OutputSource("precompile"))(b"").log == b"[precompile] \n"


def test_printed_lines_are_wrapped_and_logged_lines_keep_their_fields() -> None:
    format_line = create_line_formatter(JSON, RANK)
    (printed,) = lines(format_line(b'{"my": "own json"}\r').log)
    assert (printed.message, printed.source, printed.logger) == ('{"my": "own json"}', "output", "program")
    (logged,) = lines(format_line(trainer_line("step 3/9: loss 2.5")).log)
    assert (logged.message, logged.level, logged.time) == ("step 3/9: loss 2.5", "warning", "2026-11-24T08:09:10Z")
    for line in (printed, logged):
        assert (line.namespace, line.job, line.pod, line.node) == (
            SETTINGS.namespace,
            SETTINGS.job,
            SETTINGS.pod_name,
            SETTINGS.node_name,
        )
        assert (line.generation, line.attempt, line.rank) == (2, 1, 3)
    assert format_line(b"  ").log == b"", "an empty line is not logged"


def test_a_line_that_claims_another_source_is_attributed_to_its_writer() -> None:
    format_line = create_line_formatter(JSON, RANK)
    (line,) = lines(format_line(trainer_line("m", rank=0, job="other", namespace="prod", generation=9, pod="p")).log)
    assert (line.rank, line.job, line.namespace, line.generation) == (3, SETTINGS.job, SETTINGS.namespace, 2)
    assert line.pod == SETTINGS.pod_name
    claimed = trainer_line("all is well", source="operator")
    (line,) = lines(format_line(claimed).log)
    assert (line.source, line.message) == ("output", claimed.decode())


def test_another_program_of_the_pod_is_logged_without_a_rank() -> None:
    (line,) = lines(create_line_formatter(JSON, OutputSource("precompile"))(b"2 nodes: ready").log)
    assert (line.logger, line.rank, line.generation, line.message) == ("precompile", None, None, "2 nodes: ready")


@given(st.text(st.characters(exclude_characters="\r\n"), max_size=20_000))
def test_a_line_of_any_length_is_logged_completely(text: str) -> None:
    log = create_line_formatter(JSON, RANK)(text.encode(errors="replace")).log
    reported = "".join(line.message for line in lines(log))
    assert reported == text.encode(errors="replace").decode() or not text.strip()
    assert all(len(line) <= LINE_BYTES for line in log.splitlines())


def test_bytes_that_are_not_utf_8_are_escaped() -> None:
    (line,) = lines(create_line_formatter(JSON, RANK)(b"\xff\x00 \xe2\x82").log)
    assert line.message == "\\xff\x00 \\xe2\\x82"


@pytest.mark.parametrize("code", [1, 64, 137])
def test_a_diagnosis_is_the_same_from_text_and_json(code: int) -> None:
    steps = [f"step {number}/9: loss 2.5, 10 tokens/s" for number in range(1, 4)]
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1'
    printed = b"nrt_execute: status=1004 from the user's own code"
    as_text = [*(f"08:09:10 rank 3 INFO {step}".encode() for step in steps), printed, *trace.encode().split(b"\n")]
    as_json = [
        *(trainer_line(step, level="info") for step in steps),
        printed,
        trainer_line("KeyError: 1 (the sentence)", error=trace, logger=EXIT_LOGGER),
    ]
    as_text.append(b"KeyError: 1 (the sentence)")
    text_rank, json_rank = (
        ended_rank(code, b"\n".join(output).decode(), create_line_formatter(settings, RANK))
        for settings, output in ((SETTINGS, as_text), (JSON, as_json))
    )
    assert describe_exit(text_rank) == describe_exit(json_rank)
    assert "(the sentence)" in describe_exit(text_rank)
    messages = [rank.output.find_last_message(rank.ended_at) for rank in (text_rank, json_rank)]
    assert [message.status if message else None for message in messages] == [1004, 1004]


def test_a_partial_line_is_held_until_it_is_complete() -> None:
    tail = OutputTail("", create_line_formatter(JSON, RANK))
    whole = trainer_line("m")
    assert tail.feed(whole[:40]) == b""
    assert json.loads(tail.feed(whole[40:] + b"\nrest"))["message"] == "m"
    assert json.loads(tail.close())["message"] == "rest"


def test_a_line_that_is_overwritten_is_logged_at_intervals_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tail = OutputTail("[rank 3] ")
    log = tail.feed(b"start\n\r 1/900 [00:01]")
    assert log == b"[rank 3] start\n[rank 3]  1/900 [00:01]\n"
    assert tail.feed(b"\r 2/900 [00:02]") + tail.feed(b"\r 3/900 [00:03]") == b""
    monkeypatch.setattr(output, "_BAR_SECONDS", 0.0)
    assert tail.feed(b"\r 4/900 [00:04]") == b"[rank 3]  4/900 [00:04]\n"
    assert tail.feed(b"\nnext\n") == b"[rank 3] next\n", "it is in the log"
    monkeypatch.undo()
    assert tail.feed(b"a\rb\rc\n") + tail.feed(b"windows\r\n\r\n") == b"[rank 3] c\n[rank 3] windows\n[rank 3] \n"
    assert tail.feed(b"5/9\r") + tail.close() == b"[rank 3] 5/9\n"
    assert tail.read_text(1000) == "start\n 4/900 [00:04]\nnext\nc\nwindows\n5/9"


def test_a_message_has_no_colours() -> None:
    tail = OutputTail("")
    assert tail.feed(b"\x1b[31mValueError: \x1b[0mno\n") == b"\x1b[31mValueError: \x1b[0mno\n", "the log keeps them"
    assert tail.read_text(100) == "ValueError: no"


def test_lines_end_at_newlines_and_carriage_returns() -> None:
    lines: list[bytes] = []
    tail = OutputTail("", on_line=lines.append)
    for chunk in (b"load", b"ing\n\r 1/9 [", b"00:01]\r 2/9 [00:02]\r\n", b"\n" + b"x" * 40_000, b"end"):
        tail.feed(chunk)
    tail.close()
    assert lines[:3] == [b"loading", b" 1/9 [00:01]", b" 2/9 [00:02]"]
    assert len(lines) == 4
    assert lines[3].endswith(b"xend")
    assert len(lines[3]) <= (1 << 14) + 3


def test_a_line_that_never_ends_is_shown_in_pieces() -> None:
    tail = OutputTail("[rank 0] ")
    assert tail.feed(b"x" * output._MAX_LINE_BYTES) == b""
    assert tail.feed(b"y").count(b"x") > 0
    assert tail.feed(b"z\n") == b"[rank 0] z\n"


def test_the_newest_lines_are_kept() -> None:
    tail = OutputTail("[rank 3] ")
    assert tail.feed(b"one\ntw") == b"[rank 3] one\n"
    assert tail.feed(b"o\n\n") == b"[rank 3] two\n[rank 3] \n"
    assert tail.feed(b"rest") == b""
    assert tail.close() == b"[rank 3] rest\n"
    assert tail.read_text(100) == "one\ntwo\nrest"
    for number in range(100):
        tail.feed(f"{number}\n".encode())
    assert tail.read_text(1000).split("\n") == [str(number) for number in range(40, 100)]


NOW = 1_800_000_000.0


STAMP = "2026-Jul-30 14:22:31.305961 65191:69012"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("RuntimeError: Nrt::Load failed on NeuronCores 0-0(2): nrt_load status=1, error message=...", 1),
        ('Execute failed: nrt_execute: status=1004, error message="other errors".', 1004),
        ('nrt::infer_wait failed with grpc status code 0; nrt status code 1004, details "..."', 1004),
        (f"{STAMP} ERROR   NRT:nrt_infodump                   Failure: NRT_RESOURCE in nrt_load()", 4),
        (f"{STAMP} ERROR  NMGR:kmgr_load_nn_post_metrics      Failed to load NN: /tmp/x/file.neff, err: 4", 4),
        ("XlaRuntimeError: UNKNOWN: nrt_execute failed with status 1202", 1202),
        ("status_code=101 message=NRT_EXEC_UNIT_UNRECOVERABLE", 101),
        ("(FATAL-RT-UNDEFINED-STATE) missing collectives status on Neuron Device 0 NC 0, model 0", 1200),
        ("(FATAL-RT-UNDEFINED-STATE) execution timeout (30000 ms) on Neuron Device 0 NC 0, model x.neff", 5),
        ("(FATAL-RT-UNDEFINED-STATE) [ND 0][NC 0] Uncorrectable memory error is detected, metadata: 0x16.", 1202),
        ("Uncorrectable HBM memory error is detected. Please terminate this instance", 1201),
        ("Uncorrectable HBM memory error is detected. Please reload the neuron driver or reboot", 1205),
        ("[MLA 0][NC 0] DMA TX engine 0 is in an abort state", 1203),
    ],
)
def test_a_runtime_status_is_parsed_from_a_line(line: str, status: int) -> None:
    assert find_status(line) == status


@pytest.mark.parametrize(
    "line",
    [
        "step 1200/5000: loss 5.1, 1202 tokens/s",
        f"{STAMP} INFO   NRT:nrt_init      Neuron Runtime 2.22.14.0, error code 5 is documented",
        f"{STAMP} ERROR   NRT:nrt_close     Unexpected runtime state: NRT_STATE_START",
        "nrt_execute status=0",
        "nrt_execute status=77777",
        "exit status 5",
        "NRT_SUCCESS",
    ],
)
def test_a_line_without_a_runtime_status_has_none(line: str) -> None:
    assert find_status(line) is None


@given(st.sampled_from(RUNTIME_STATUSES))
def test_every_status_of_the_table_is_found_by_name_and_by_number(sign: Sign) -> None:
    assert find_status(f"RuntimeError: {sign.key}") == sign.number
    assert find_status(f"nrt_execute failed with status {sign.number}") == sign.number


@given(st.binary(max_size=6000))
def test_any_bytes_are_parsed_without_backtracking(data: bytes) -> None:
    messages = RuntimeMessages()
    started_at = time.thread_time()
    messages.read(b"nrt " + data, NOW)
    assert time.thread_time() - started_at < 5
    message = messages.find_last(NOW)
    assert message is None or message.status in {sign.number for sign in RUNTIME_STATUSES}


def test_the_most_specific_of_several_statuses_counts() -> None:
    messages = RuntimeMessages()
    messages.read(b"Uncorrectable HBM memory error is detected. Please terminate this instance", NOW - 3)
    messages.read(b"nrt_execute status=5", NOW - 2)
    messages.read(b"NRT_CLOSED", NOW - 1)
    assert messages.find_last(NOW).status == 1201


def test_an_old_status_does_not_count() -> None:
    messages = RuntimeMessages()
    messages.read(b"nrt_execute status=1202", NOW - 600)
    assert messages.find_last(NOW) is None


def test_a_status_before_a_long_dump_counts() -> None:
    tail = OutputTail("[rank 0] ")
    tail.feed(b"ERROR NRT:nrt_infodump Failure: NRT_EXEC_HW_ERR_NC_UE in nrt_execute()\n")
    tail.feed(b"ERROR NRT:nrt_infodump Environment:\n" * 200)
    assert tail.find_last_message(time.time()).status == 1202
