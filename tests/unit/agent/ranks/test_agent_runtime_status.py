from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_agent.ranks.output import Tail
from trainium_agent.ranks.runtime_status import RuntimeMessages, status_in
from trainium_contract.faults.signs import RUNTIME_STATUSES, Sign

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
def test_the_runtimes_status_is_read_from_its_own_words(line: str, status: int) -> None:
    assert status_in(line) == status


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
def test_what_is_no_status_of_the_runtime_is_left_alone(line: str) -> None:
    assert status_in(line) is None


@given(st.sampled_from(RUNTIME_STATUSES))
def test_every_status_of_the_table_is_found_by_name_and_by_number(sign: Sign) -> None:
    assert status_in(f"RuntimeError: {sign.key}") == sign.number
    assert status_in(f"nrt_execute failed with status {sign.number}") == sign.number


@given(st.binary(max_size=6000))
def test_no_bytes_whatsoever_break_the_reader_or_keep_it_busy(data: bytes) -> None:
    words = RuntimeMessages()
    began = time.perf_counter()
    words.read(b"nrt " + data, NOW)
    assert time.perf_counter() - began < 0.5
    word = words.last(NOW)
    assert word is None or word.status in {sign.number for sign in RUNTIME_STATUSES}


def test_of_several_statuses_the_most_specific_counts() -> None:
    words = RuntimeMessages()
    words.read(b"Uncorrectable HBM memory error is detected. Please terminate this instance", NOW - 3)
    words.read(b"nrt_execute status=5", NOW - 2)
    words.read(b"NRT_CLOSED", NOW - 1)
    assert words.last(NOW).status == 1201


def test_what_was_written_long_before_the_end_does_not_count() -> None:
    words = RuntimeMessages()
    words.read(b"nrt_execute status=1202", NOW - 600)
    assert words.last(NOW) is None


def test_a_status_counts_even_when_a_long_dump_follows_it() -> None:
    tail = Tail("[rank 0] ")
    tail.feed(b"ERROR NRT:nrt_infodump Failure: NRT_EXEC_HW_ERR_NC_UE in nrt_execute()\n")
    tail.feed(b"ERROR NRT:nrt_infodump Environment:\n" * 200)
    assert tail.last_message(time.time()).status == 1202
