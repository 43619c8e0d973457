"""Bodies of writes: merge patches (RFC 7386) that replace content, and apply bodies, which the server reads as YAML."""

import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from trainium_contract.api_server.connection import encode_yaml
from trainium_operator.cluster.execute.merge_patch import replace_content

_KEYS = st.sampled_from(["selector", "matchLabels", "app", "tier"])
_VALUES = st.recursive(
    st.one_of(st.integers(0, 2), st.text("ab", max_size=1), st.lists(st.integers(0, 1), max_size=2)),
    lambda values: st.dictionaries(_KEYS, values, max_size=3),
    max_leaves=8,
)
_CONTENTS = st.dictionaries(_KEYS, _VALUES, max_size=3)


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """Apply a merge patch by the algorithm of RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply_merge_patch(result.get(name), value)
    return result


@settings(max_examples=trials(200), deadline=None)
@given(old=_CONTENTS, new=_CONTENTS)
def test_a_merge_patch_replaces_content_at_any_depth(old: Any, new: Any) -> None:
    current, manifest = {"spec": copy.deepcopy(old), "status": {"seen": 1}}, {"spec": copy.deepcopy(new)}
    after = apply_merge_patch(current, replace_content(current, manifest))
    assert after.get("spec", {}) == new
    assert after["status"] == {"seen": 1}
    assert replace_content(after, manifest) == replace_content(copy.deepcopy(after), manifest)
    assert apply_merge_patch(after, replace_content(after, manifest)) == after, "a second time it changes nothing"


def test_unwanted_content_is_removed_and_metadata_kept() -> None:
    current = {"data": {"a": "1"}, "binaryData": {"b": "2"}, "metadata": {"labels": {"x": "y"}}}
    assert apply_merge_patch(current, replace_content(current, {"data": {"a": "3"}})) == {
        "data": {"a": "3"},
        "metadata": {"labels": {"x": "y"}},
    }


GLOO = "Check the logs of the remote worker before reporting an error. GLHF! \U0001f596\ufe0f"


@pytest.mark.parametrize(
    "text", [GLOO, "\x85\u2028\u2029\x7f\x9f\ufeff\ufffe", "\\ud83d", 'quote " and \\', "tab\tline\n"]
)
def test_text_round_trips_through_yaml(text: str) -> None:
    body = encode_yaml({"status": {"message": text}})
    assert json.loads(body) == yaml.safe_load(body) == {"status": {"message": text}}


def test_apply_bodies_have_no_surrogate_escapes() -> None:
    assert b"\\ud" not in encode_yaml({"message": GLOO})


def test_unpaired_surrogates_are_replaced() -> None:
    assert json.loads(encode_yaml(["a\ud83db"])) == ["a\ufffdb"]


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_json_and_yaml_agree_on_every_text(text: str) -> None:
    body = encode_yaml([text])
    assert json.loads(body) == yaml.safe_load(body) == [text]
