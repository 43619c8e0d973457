"""A merge patch (RFC 7386) after which an object's content is what is wanted, whatever it was."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from trainium_operator.cluster.execute.merge_patch import replace_content

_KEYS = st.sampled_from(["selector", "matchLabels", "app", "tier"])
_VALUES = st.recursive(
    st.one_of(st.integers(0, 2), st.text("ab", max_size=1), st.lists(st.integers(0, 1), max_size=2)),
    lambda values: st.dictionaries(_KEYS, values, max_size=3),
    max_leaves=8,
)
_CONTENTS = st.dictionaries(_KEYS, _VALUES, max_size=3)


def patched(target: Any, patch: Any) -> Any:
    """The algorithm of RFC 7386, as it is written there."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = patched(result.get(name), value)
    return result


@settings(max_examples=trials(200), deadline=None)
@given(old=_CONTENTS, new=_CONTENTS)
def test_content_becomes_what_is_wanted_at_any_depth(old: Any, new: Any) -> None:
    current, manifest = {"spec": copy.deepcopy(old), "status": {"seen": 1}}, {"spec": copy.deepcopy(new)}
    after = patched(current, replace_content(current, manifest))
    assert after.get("spec", {}) == new
    assert after["status"] == {"seen": 1}
    assert replace_content(after, manifest) == replace_content(copy.deepcopy(after), manifest)
    assert patched(after, replace_content(after, manifest)) == after, "a second time it changes nothing"


def test_content_that_is_not_wanted_at_all_goes_and_what_is_not_content_stays() -> None:
    current = {"data": {"a": "1"}, "binaryData": {"b": "2"}, "metadata": {"labels": {"x": "y"}}}
    assert patched(current, replace_content(current, {"data": {"a": "3"}})) == {
        "data": {"a": "3"},
        "metadata": {"labels": {"x": "y"}},
    }
