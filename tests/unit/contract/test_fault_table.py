"""The rows of the one table of faults agree with each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import CAUSES, NO_FAULT_CAUSES, USER_CAUSES, Blame, Budget, Cause
from trainium_contract.faults.classify import (
    budget_of,
    classify_sign,
    default_responses,
    get_cause_row,
    severity,
    suspects_node,
)
from trainium_contract.faults.node_polarity import POLARITIES
from trainium_contract.faults.responses import RESPONSES, Response
from trainium_contract.faults.signs import CONDITIONS, EXIT_CODES, SIGNS, Sign


def test_every_cause_has_one_row() -> None:
    assert [row.cause for row in CAUSES] == list(dict.fromkeys(row.cause for row in CAUSES))
    assert {row.cause for row in CAUSES} == set(Cause)
    assert set(RESPONSES) == set(Cause)
    assert sorted(severity(cause) for cause in Cause) == list(range(len(Cause)))


@pytest.mark.parametrize("cause", Cause)
def test_users_errors_suspect_no_node_and_infrastructure_never_uses_the_process_budget(cause: Cause) -> None:
    row = get_cause_row(cause)
    if row.blame is Blame.USER:
        assert not suspects_node(cause)
        assert cause in USER_CAUSES
    if row.blame in (Blame.NODE, Blame.PEER, Blame.STORAGE):
        assert budget_of(cause) is not Budget.PROCESS
    if cause in NO_FAULT_CAUSES:
        assert budget_of(cause) is None
        assert not suspects_node(cause)
    if default_responses(cause).repeated is Response.REPLACE_NODE:
        assert suspects_node(cause)


@pytest.mark.parametrize("sign", SIGNS, ids=str)
def test_what_a_sign_stands_for_follows_from_its_cause(sign: Sign) -> None:
    row, verdict = get_cause_row(sign.cause), classify_sign(sign)
    assert (verdict.blame, verdict.sentence) == (row.blame, sign.sentence or row.sentence)
    if Response.REPLACE_NODE in (verdict.response, verdict.repeated):
        assert row.suspects_node


def test_responses_of_a_sign_are_more_specific_than_those_of_its_cause() -> None:
    same = [
        sign.key
        for sign in SIGNS
        if sign.responses is not None and sign.responses == classify_sign(replace(sign, responses=None)).responses
    ]
    assert same == [], "leave it out, it follows from the cause"


def test_each_sign_is_there_once() -> None:
    keys = [(sign.kind, sign.key, sign.value) for sign in SIGNS]
    assert len(keys) == len(set(keys))
    numbers = [(sign.kind, sign.number) for sign in SIGNS if sign.number >= 0]
    assert len(numbers) == len(set(numbers))
    assert {sign.number for sign in EXIT_CODES} == set(ExitCode)


def test_every_condition_has_a_polarity() -> None:
    assert {sign.key for sign in CONDITIONS} - {"Ready"} == set(POLARITIES)


def test_a_lost_peer_is_the_least_specific_cause_and_a_users_error_the_most() -> None:
    assert severity(Cause.PEER_LOST) == len(Cause) - 1
    assert severity(Cause.USER_CODE) == 0
    assert severity(Cause.DEVICE) < severity(Cause.CRASH) < severity(Cause.NODE_LOST) < severity(Cause.POD_LOST)


def test_every_sign_but_that_of_an_end_that_was_asked_for_leads_to_a_fault() -> None:
    asked = {sign.number for sign in SIGNS if sign.cause in NO_FAULT_CAUSES}
    assert asked == {ExitCode.FINISHED, ExitCode.YIELDING}
