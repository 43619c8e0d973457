"""Whatever a tenant has the API server store, one object never keeps the others of a list from being read."""

from __future__ import annotations

import json

import pytest
from pydantic_core import from_json

from trainium_contract.stored_json import DEEPEST, LEFT_OUT, read_json, shallow


def nested(levels: int, inner: str = "1") -> str:
    return '{"a":' * levels + inner + "}" * levels


def beside(part: bytes) -> bytes:
    """A list of two objects, of which one holds the part."""
    return b'{"items":[{"name":"first","spec":' + part + b'},{"name":"second \\" [ {","spec":[[1],{}]}]}'


@pytest.mark.parametrize(
    "part",
    [
        nested(250).encode(),
        nested(10_000).encode(),
        b"[" * 9_000 + b"]" * 9_000,
        b'{"a":"\\ud800"}',
        b'{"a":"\xff\xfe"}',
        b'{"a":' + b"9" * 5_000 + b"}",
        b'{"a":-' + b"9" * 5_000 + b".5e7}",
    ],
    ids=["deep", "deepest", "lists", "half a pair", "no text", "long", "long and broken"],
)
def test_what_a_usual_parser_does_not_read_takes_nothing_else_of_a_list_with_it(part: bytes) -> None:
    for found in (read_json(beside(part)), read_json(beside(part), from_json)):
        assert [each["name"] for each in found["items"]] == ["first", 'second " [ {']
        assert found["items"][1]["spec"] == [[1], {}]
        json.dumps(found)  # nothing that is left is too deep for anybody


def test_what_is_too_deep_is_left_out_and_reported() -> None:
    found = read_json(nested(10_000).encode())
    for _ in range(DEEPEST):
        found = found["a"]

    assert found == LEFT_OUT


def test_what_is_not_too_deep_stays_as_it_was_byte_for_byte() -> None:
    for inner in ("1", '"}]\\\\"', '"{\\"["', "1.50e3"):
        text = nested(DEEPEST, inner).encode()
        assert shallow(text) == text


@pytest.mark.parametrize("text", [b"", b"<html>", b'{"a":', nested(300)[:-7].encode(), b'{"a":1}}', b'"', b"[" * 300])
def test_what_is_no_json_is_an_error_and_nothing_else(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(text)
