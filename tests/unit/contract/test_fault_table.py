"""Consistency of the rows of the fault table."""

from dataclasses import replace

import pytest

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import CAUSES, NO_FAULT_CAUSES, USER_CAUSES, Blame, Budget, Cause
from trainium_contract.faults.classify import (
    classify_sign,
    get_budget,
    get_cause_row,
    get_default_responses,
    rank_severity,
    suspects_node,
)
from trainium_contract.faults.node_polarity import POLARITIES
from trainium_contract.faults.responses import RESPONSES, Response
from trainium_contract.faults.signs import CONDITIONS, EXIT_CODES, SIGNS


def test_every_cause_has_one_row() -> None:
    assert [row.cause for row in CAUSES] == list(dict.fromkeys(row.cause for row in CAUSES))
    assert {row.cause for row in CAUSES} == set(Cause)
    assert set(RESPONSES) == set(Cause)
    assert sorted(rank_severity(cause) for cause in Cause) == list(range(len(Cause)))


@pytest.mark.parametrize("cause", Cause)
def test_blame_budget_and_suspicion_of_a_cause_agree(cause: Cause) -> None:
    row = get_cause_row(cause)
    if row.blame is Blame.USER:
        assert not suspects_node(cause)
        assert cause in USER_CAUSES
    if row.blame in (Blame.NODE, Blame.PEER, Blame.STORAGE):
        assert get_budget(cause) is not Budget.PROCESS
    if cause in NO_FAULT_CAUSES:
        assert get_budget(cause) is None
        assert not suspects_node(cause)
    if get_default_responses(cause).repeated is Response.REPLACE_NODE:
        assert suspects_node(cause)


def test_blame_and_sentence_of_a_sign_follow_from_its_cause() -> None:
    for sign in SIGNS:
        row, verdict = get_cause_row(sign.cause), classify_sign(sign)
        assert (verdict.blame, verdict.sentence) == (row.blame, sign.sentence or row.sentence), sign
        if Response.REPLACE_NODE in (verdict.response, verdict.repeated):
            assert row.suspects_node, sign


def test_responses_of_a_sign_are_more_specific_than_those_of_its_cause() -> None:
    same = [
        sign.key
        for sign in SIGNS
        if sign.responses is not None and sign.responses == classify_sign(replace(sign, responses=None)).responses
    ]
    assert same == [], "omit responses that equal those of the cause"


def test_signs_are_unique() -> None:
    keys = [(sign.kind, sign.key, sign.value) for sign in SIGNS]
    assert len(keys) == len(set(keys))
    numbers = [(sign.kind, sign.number) for sign in SIGNS if sign.number >= 0]
    assert len(numbers) == len(set(numbers))
    assert {sign.number for sign in EXIT_CODES} == set(ExitCode)


def test_every_condition_has_a_polarity() -> None:
    assert {sign.key for sign in CONDITIONS} - {"Ready"} == set(POLARITIES)


def test_a_lost_peer_is_the_least_specific_cause_and_a_users_error_the_most() -> None:
    assert rank_severity(Cause.PEER_LOST) == len(Cause) - 1
    assert rank_severity(Cause.USER_ERROR) == 0
    assert (
        rank_severity(Cause.DEVICE)
        < rank_severity(Cause.CRASH)
        < rank_severity(Cause.NODE_LOST)
        < rank_severity(Cause.POD_LOST)
    )


def test_only_exit_codes_of_requested_ends_are_no_fault() -> None:
    codes = {sign.number for sign in SIGNS if sign.cause in NO_FAULT_CAUSES}
    assert codes == {ExitCode.FINISHED, ExitCode.YIELDING}
