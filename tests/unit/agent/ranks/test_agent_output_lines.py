"""Lines of a process in the pod's log, and those that are kept, in both forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_agent.exits.diagnosis import describe_exit
from trainium_agent.ranks.output import Speaker, Tail, form_of
from trainium_agent.ranks.processes import RankProcess
from trainium_agent.settings import AgentSettings
from trainium_contract.wire.log_line import EXIT_LOGGER, LINE_BYTES, LogFormat, log_line, read_log_line

if TYPE_CHECKING:
    from trainium_contract.wire.log_line import LogLine

SETTINGS = AgentSettings(
    coordinator=(),
    namespace="team",
    job="job",
    pod_name="job-w-0",
    pod_uid="uid",
    pod_ip="127.0.0.1",
    node_name="node",
    processes_per_node=4,
    max_in_place_restarts=3,
    grace_seconds=30,
    config_path=Path("trainer.yaml"),
    memory_directory=Path("memory"),
    token_path=Path("token"),
    ca_path=Path("ca"),
)
JSON = replace(SETTINGS, log_format=LogFormat.JSON)
RANK = Speaker("rank 3", 3, 2, 1)


def lines(log: bytes) -> list[LogLine]:
    found = [read_log_line(line) for line in log.decode().splitlines()]
    assert all(found)
    return [line for line in found if line is not None]


def of_a_rank(message: str, **fields: Any) -> bytes:
    about = {"time": "2026-11-24T08:09:10Z", "level": "warning", "source": "trainer", "logger": "trainium.loop"}
    return log_line(message, **{**about, "rank": 3, **fields}).to_line().encode()


def test_as_text_a_line_has_its_speaker_in_front() -> None:
    assert form_of(SETTINGS, RANK)(b"any {words}").log == b"[rank 3] any {words}\n"
    assert form_of(SETTINGS, Speaker("precompile"))(b"").log == b"[precompile] \n"


def test_what_a_program_printed_is_wrapped_and_what_the_trainer_logged_is_passed_on() -> None:
    show = form_of(JSON, RANK)
    (printed,) = lines(show(b'{"my": "own json"}\r').log)
    assert (printed.message, printed.source, printed.logger) == ('{"my": "own json"}', "output", "program")
    (logged,) = lines(show(of_a_rank("step 3/9: loss 2.5")).log)
    assert (logged.message, logged.level, logged.time) == ("step 3/9: loss 2.5", "warning", "2026-11-24T08:09:10Z")
    for line in (printed, logged):
        assert (line.namespace, line.job, line.pod, line.node) == (
            SETTINGS.namespace, SETTINGS.job, SETTINGS.pod_name, SETTINGS.node_name,
        )  # fmt: skip
        assert (line.generation, line.attempt, line.rank) == (2, 1, 3)
    assert show(b"  ").log == b"", "an empty line is not logged"


def test_a_line_that_claims_another_source_is_attributed_to_its_writer() -> None:
    show = form_of(JSON, RANK)
    (line,) = lines(show(of_a_rank("m", rank=0, job="other", namespace="prod", generation=9, pod="p")).log)
    assert (line.rank, line.job, line.namespace, line.generation) == (3, SETTINGS.job, SETTINGS.namespace, 2)
    assert line.pod == SETTINGS.pod_name
    claimed = of_a_rank("all is well", source="operator")
    (line,) = lines(show(claimed).log)
    assert (line.source, line.message) == ("output", claimed.decode())


def test_another_program_of_the_pod_writes_under_its_own_name_and_has_no_rank() -> None:
    (line,) = lines(form_of(JSON, Speaker("precompile"))(b"2 nodes: ready").log)
    assert (line.logger, line.rank, line.generation, line.message) == ("precompile", None, None, "2 nodes: ready")


@given(st.text(st.characters(exclude_characters="\r\n"), max_size=20_000))
def test_nothing_that_a_program_printed_is_lost_however_long_it_is(text: str) -> None:
    log = form_of(JSON, RANK)(text.encode(errors="replace")).log
    reported = "".join(line.message for line in lines(log))
    assert reported == text.encode(errors="replace").decode() or not text.strip()
    assert all(len(line) <= LINE_BYTES for line in log.splitlines())


def test_bytes_that_are_no_text_are_logged_too() -> None:
    (line,) = lines(form_of(JSON, RANK)(b"\xff\x00 \xe2\x82").log)
    assert line.message == "\\xff\x00 \\xe2\\x82"


def ended(settings: Any, code: int, *output: bytes) -> RankProcess:
    process = RankProcess(0, 3, 1, 12345, Tail("[rank 3] ", form_of(settings, RANK)))
    process.output.feed(b"".join(line + b"\n" for line in output))
    process.output.close()
    process.ended(code)
    return process


@pytest.mark.parametrize("code", [1, 64, 137])
def test_the_diagnosis_of_an_end_is_the_same_in_both_forms(code: int) -> None:
    steps = [f"step {number}/9: loss 2.5, 10 tokens/s" for number in range(1, 4)]
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1'
    printed = b"nrt_execute: status=1004 from the user's own code"
    as_text = [*(f"08:09:10 rank 3 INFO {step}".encode() for step in steps), printed, *trace.encode().split(b"\n")]
    as_json = [
        *(of_a_rank(step, level="info") for step in steps),
        printed,
        of_a_rank("KeyError: 1 (the sentence)", error=trace, logger=EXIT_LOGGER),
    ]
    one = ended(SETTINGS, code, *as_text, b"KeyError: 1 (the sentence)")
    other = ended(JSON, code, *as_json)
    assert describe_exit(one) == describe_exit(other)
    assert "(the sentence)" in describe_exit(one)
    words = [each.output.last_message(each.ended_at) for each in (one, other)]
    assert [word.status if word else None for word in words] == [1004, 1004]


def test_half_a_line_waits_for_its_other_half() -> None:
    tail = Tail("", form_of(JSON, RANK))
    whole = of_a_rank("m")
    assert tail.feed(whole[:40]) == b""
    assert json.loads(tail.feed(whole[40:] + b"\nrest"))["message"] == "m"
    assert json.loads(tail.close())["message"] == "rest"


def test_who_follows_the_output_gets_lines_and_what_a_progress_bar_overwrites() -> None:
    lines: list[bytes] = []
    tail = Tail("", on_line=lines.append)
    for chunk in (b"load", b"ing\n\r 1/9 [", b"00:01]\r 2/9 [00:02]\r\n", b"\n" + b"x" * 40_000, b"end"):
        tail.feed(chunk)
    tail.close()
    assert lines[:3] == [b"loading", b" 1/9 [00:01]", b" 2/9 [00:02]"]
    assert len(lines) == 4
    assert lines[3].endswith(b"xend")
    assert len(lines[3]) <= (1 << 14) + 3
