"""Classification of exits, kernel lines and rules of a job; redaction of secrets."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Blame, Cause
from trainium_contract.faults.classify import (
    classify_exit,
    classify_exit_code,
    find_runtime_status,
    match_kernel_line,
    match_rules,
    select_kernel_lines,
)
from trainium_contract.faults.responses import Response
from trainium_contract.faults.rules import RecoveryRule
from trainium_contract.faults.signs import RUNTIME_STATUSES
from trainium_contract.redaction import redact_secrets
from trainium_contract.wire.messages import KernelEvent

HW = "NEURON_HW_ERR={} instance-id=i-0592464924bd45322 nd-id=0 nc-id=0 serial-num=19fc action=TERMINATE_INSTANCE"
OOM = "Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB"
EFA = "efa 0000:00:1d.0: Failed to process command: -110"
DISK = "EXT4-fs error (device nvme0n1p1): ext4_find_entry: reading directory lblock 0"


def test_an_unknown_runtime_status_has_no_sign() -> None:
    assert find_runtime_status(0) is None
    assert find_runtime_status(4711) is None


@pytest.mark.parametrize(
    ("line", "cause", "decisive"),
    [
        (HW.format("DMA_ERROR"), Cause.DEVICE, True),
        (OOM, Cause.OUT_OF_MEMORY, False),
        ("infiniband rdmap0s29: Completion timed out", Cause.NETWORK, False),
        ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10", Cause.HOST, False),
        ("blk_update_request: I/O error, dev nvme1n1, sector 0 op 0x0:(READ)", Cause.HOST, False),
    ],
)
def test_further_forms_of_kernel_lines_are_recognized(line: str, cause: Cause, decisive: bool) -> None:
    sign = match_kernel_line(line)
    assert sign is not None
    assert (sign.cause, sign.decisive) == (cause, decisive)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "EXT4-fs (nvme0n1p3): mounted filesystem with ordered data mode",
        "mce: [Hardware Error]: Machine check events logged",
        "efa 0000:00:1d.0: Setup irq:101 name:efa-mgmnt@pci:0000:00:1d.0",
        "eth0: renamed from veth12",
        "python[42]: segfault at 0 ip 0 sp 0 error 4 in libtorch.so",
        "neuron:ncdev_open: nd0 opened by python",
    ],
)
def test_harmless_kernel_lines_match_no_sign(line: str) -> None:
    assert match_kernel_line(line) is None


@pytest.mark.parametrize(
    ("code", "status", "kernel", "cause"),
    [
        (76, 5, (HW.format("DMA_ERROR"),), Cause.DEVICE),
        (64, 1202, (HW.format("DMA_ERROR"),), Cause.USER_ERROR),
        (137, None, (DISK, OOM), Cause.OUT_OF_MEMORY),
        (76, 1, (), Cause.PEER_LOST),
        (80, 5, (), Cause.DEVICE),
        (81, 5, (DISK,), Cause.STORAGE),
        (65, 1201, (), Cause.DEVICE),
        (65, 1003, (), Cause.NUMERICAL),
        (1, 1003, (DISK,), Cause.NUMERICAL),
    ],
)
def test_the_most_specific_of_several_signs_determines_the_cause(
    code: int, status: int | None, kernel: tuple[str, ...], cause: Cause
) -> None:
    assert classify_exit(code, runtime_status=status, kernel=kernel).cause is cause


def test_only_kernel_lines_from_the_time_of_the_failure_explain_it() -> None:
    events = [KernelEvent(sequence=delay, line=str(delay), at=1000.0 + delay) for delay in (0, 5, 300)]
    assert select_kernel_lines(events, 1000.0) == ("0", "5")
    assert select_kernel_lines(events, 1600.0) == ()


def rule(**fields: Any) -> RecoveryRule:
    return RecoveryRule.model_validate({"cause": "Host", "action": "AvoidNode", **fields})


def test_the_first_rule_that_matches_counts_and_all_its_conditions_must_hold() -> None:
    rules = (rule(exitCodes=[3], message="seat", cause="UserError", action="Stop"), rule(exitCodes=[3]))
    assert match_rules(rules, code=3, texts=("no seat",)).response is Response.STOP
    assert match_rules(rules, code=3, texts=("other",)).response is Response.REPLACE_NODE
    assert match_rules(rules, code=4, texts=("no seat",)) is None
    assert "rules[1]" in match_rules(rules, code=3).sentence


def test_a_rule_matches_whole_reasons_and_case_sensitive_parts_of_messages() -> None:
    assert match_rules((rule(reason="OOMKilled"),), reason="OOMKilled")
    assert not match_rules((rule(reason="OOMKilled"),), reason="OOM")
    assert match_rules((rule(message="boom"),), texts=("a", "big boom"))
    assert not match_rules((rule(message="boom"),), texts=("BOOM",))
    assert classify_exit(1, runtime_status=5, rules=(rule(reason="NRT_TIMEOUT"),)).cause is Cause.HOST


def test_rules_without_a_condition_or_with_a_non_fault_cause_never_match() -> None:
    assert match_rules((rule(),), code=1, reason="x", texts=("y",)) is None
    assert match_rules((rule(exitCodes=[1], cause="Finished"),), code=1) is None


codes = st.one_of(st.sampled_from([int(code) for code in ExitCode]), st.integers(0, 255))
statuses = st.one_of(st.none(), st.sampled_from([sign.number for sign in RUNTIME_STATUSES]), st.integers(-5, 2000))
lines = st.lists(st.one_of(st.text(max_size=80), st.sampled_from([HW.format("DMA_ERROR"), OOM, EFA, DISK])), max_size=4)


@given(codes, statuses, st.text(max_size=50), lines)
def test_user_errors_suspect_no_node_and_only_exit_codes_stop_a_job(
    code: int, status: int | None, message: str, kernel: list[str]
) -> None:
    verdict = classify_exit(code, runtime_status=status, message=message, kernel=kernel)
    if verdict.blame is Blame.USER:
        assert Response.REPLACE_NODE not in (verdict.response, verdict.repeated)
    if verdict.response is Response.STOP:
        assert verdict == classify_exit_code(code)
    if verdict.indirect:
        assert verdict.response is Response.RESTART_IN_PLACE


def test_secrets_are_redacted_and_other_text_is_unchanged() -> None:
    for secret in (
        "AKIAABCDEFGHIJKLMNOP",
        "aws_secret_access_key = wJalrXUtnFEMI",
        "Authorization: Bearer abcdefgh.ijklmnop",
        "https://user:hunter22@example.org/x",
        "hf_abcdefghijklmnopqrstuvwx",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.abc",
        "https://x/y?X-Amz-Signature=0123456789abcdef&z=1",
        "api_key='0123456789'",
        "-----BEGIN RSA PRIVATE KEY-----\nabc",
    ):
        assert "***" in redact_secrets(f"before {secret}"), secret
    plain = "step 12: loss 2.5, 1024 tokens/s; token count 17; NRT_TIMEOUT (5); /data/secret-sauce/file.parquet"
    assert redact_secrets(plain) == plain


@given(st.text(max_size=3000))
def test_redaction_is_idempotent_and_never_backtracks(text: str) -> None:
    started_at = time.thread_time()
    once = redact_secrets(text)
    assert redact_secrets(once) == once
    assert time.thread_time() - started_at < 5
