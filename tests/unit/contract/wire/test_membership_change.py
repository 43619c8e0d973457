"""A membership that is sent as the difference from the previous one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.operator import wire_messages
from tests.testing.operator.wire_messages import member
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.membership_change import (
    MembershipChange,
    StaleChangeError,
    apply_change,
    diff_memberships,
)
from trainium_contract.wire.messages import Membership, Transition

PODS = st.lists(st.integers(0, 400), min_size=1, max_size=40, unique=True)


def membership(generation: int, *pods: int, processes: int = 32, **changes: Any) -> Membership:
    changes = {"transition": Transition.GRACEFUL, "processes_per_node": processes, **changes}
    return wire_messages.membership(generation, *(member(f"w-{pod}", node_name=f"n-{pod}") for pod in pods), **changes)


def round_trip(change: MembershipChange) -> MembershipChange:
    """Return the change after serialization and parsing."""
    return MembershipChange.model_validate_json(change.model_dump_json(by_alias=True, exclude_none=True))


@given(PODS, PODS, st.sampled_from(Cause), st.integers(1, 64), st.integers(0, 9))
def test_applying_a_change_to_its_base_gives_the_new_membership(
    before: list[int], after: list[int], cause: Cause, processes: int, accumulation: int
) -> None:
    old = membership(7, *before)
    new = membership(8, *after, cause=cause, processes=processes, accumulation=accumulation)
    change = diff_memberships(old, new)
    if change is not None:
        assert apply_change(round_trip(change), old) == new
    else:
        assert set(new.members) - set(old.members)


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        (range(1000), (*range(500), 2000, *range(501, 1000)), [500]),
        (range(1000), range(900), []),
        (range(900), range(1000), [*range(900, 1000)]),
        ((0, 1), (0, 2), [1]),
    ],
    ids=["one is replaced", "smaller", "larger", "one of two"],
)
def test_a_change_has_only_ranks_with_another_member(before: range, after: tuple[int, ...], ranks: list[int]) -> None:
    change = diff_memberships(membership(1, *before), membership(2, *after))
    assert change is not None
    assert [member.node_rank for member in change.members] == ranks


def test_the_replacement_of_one_of_a_thousand_is_a_few_hundred_bytes() -> None:
    change = diff_memberships(membership(1, *range(1000)), membership(2, *range(999), 5000))
    assert change is not None
    assert len(change.model_dump_json(by_alias=True, exclude_none=True)) < 500


def test_a_change_of_most_members_is_sent_as_a_whole() -> None:
    assert diff_memberships(membership(1, 0, 1, 2), membership(2, 0, 5, 6)) is None
    assert diff_memberships(membership(1, 0), membership(2, *range(10))) is None


def test_a_member_with_the_same_pod_and_another_port_is_reported() -> None:
    old = membership(1, 0, 1)
    moved = old.members[1].replaced(rendezvous_port=29501)
    change = diff_memberships(old, old.replaced(generation=2, members=(old.members[0], moved)))
    assert change is not None
    assert change.members == (moved,)


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        (None, "a change of generation 4 was received, and none is known"),
        (membership(3, 0, 1, 2), "a change of generation 4 was received, and generation 3 is known"),
        (membership(4, 0, 9, 2), "generation 5 does not follow from what is known of 4"),
        (membership(4, 0, 1), "generation 5 does not follow from what is known of 4"),
    ],
)
def test_a_change_of_another_base_is_refused(known: Membership | None, sentence: str) -> None:
    change = diff_memberships(membership(4, 0, 1, 2), membership(5, 0, 1, 2, 3))
    assert change is not None
    with pytest.raises(StaleChangeError, match=sentence):
        apply_change(change, known)


def test_a_change_that_leaves_a_rank_unassigned_is_refused() -> None:
    change = diff_memberships(membership(4, 0, 1, 2, 3), membership(5, 0, 1, 2))
    assert change is not None
    with pytest.raises(StaleChangeError, match="does not follow"):
        apply_change(change.replaced(size=0), membership(4, 0, 1, 2, 3))


def test_unknown_fields_of_a_member_do_not_change_the_digest() -> None:
    change = diff_memberships(membership(1, 0, 1), membership(2, 0, 3))
    assert change is not None
    wire = change.to_wire()
    wire["members"][0]["ofALaterVersion"] = True
    assert apply_change(MembershipChange.model_validate(wire), membership(1, 0, 1)) == membership(2, 0, 3)
