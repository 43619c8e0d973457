"""Lists with objects that common JSON parsers reject."""

import json

import pytest
from pydantic_core import from_json

from trainium_contract.stored_json import MAX_DEPTH, OMITTED, read_json, remove_deep_parts


def nest(levels: int, inner: str = "1") -> str:
    return '{"a":' * levels + inner + "}" * levels


def list_with(part: bytes) -> bytes:
    """Return a list of two objects, the first with this part."""
    return b'{"items":[{"name":"first","spec":' + part + b'},{"name":"second \\" [ {","spec":[[1],{}]}]}'


@pytest.mark.parametrize(
    "part",
    [
        nest(250).encode(),
        nest(10_000).encode(),
        b"[" * 9_000 + b"]" * 9_000,
        b'{"a":"\\ud800"}',
        b'{"a":"\xff\xfe"}',
        b'{"a":' + b"9" * 5_000 + b"}",
        b'{"a":-' + b"9" * 5_000 + b".5e7}",
    ],
    ids=["deep", "deepest", "lists", "unpaired surrogate", "invalid UTF-8", "long number", "long fraction"],
)
def test_an_unparsable_object_does_not_hide_the_rest_of_a_list(part: bytes) -> None:
    for parsed in (read_json(list_with(part)), read_json(list_with(part), from_json)):
        assert [item["name"] for item in parsed["items"]] == ["first", 'second " [ {']
        assert parsed["items"][1]["spec"] == [[1], {}]
        json.dumps(parsed)  # no remaining object is too deep for the standard library


def test_nesting_beyond_the_limit_is_replaced_by_a_marker() -> None:
    parsed = read_json(nest(10_000).encode())
    for _ in range(MAX_DEPTH):
        parsed = parsed["a"]

    assert parsed == OMITTED


def test_nesting_within_the_limit_is_kept_byte_for_byte() -> None:
    for inner in ("1", '"}]\\\\"', '"{\\"["', "1.50e3"):
        text = nest(MAX_DEPTH, inner).encode()
        assert remove_deep_parts(text) == text


@pytest.mark.parametrize("text", [b"", b"<html>", b'{"a":', nest(300)[:-7].encode(), b'{"a":1}}', b'"', b"[" * 300])
def test_malformed_json_raises_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(text)
