"""Apply bodies mean the same as JSON and as YAML: the server reads them as YAML."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainium_contract.api_server.connection import as_yaml

GLOO = "Check the logs of the remote worker before reporting an error. GLHF! \U0001f596\ufe0f"


@pytest.mark.parametrize(
    "text", [GLOO, "\x85\u2028\u2029\x7f\x9f\ufeff\ufffe", "\\ud83d", 'quote " and \\', "tab\tline\n"]
)
def test_any_text_arrives_as_it_was(text: str) -> None:
    body = as_yaml({"status": {"message": text}})
    assert json.loads(body) == yaml.safe_load(body) == {"status": {"message": text}}


def test_characters_beyond_the_first_plane_are_not_written_as_surrogates_which_yaml_does_not_know() -> None:
    assert b"\\ud" not in as_yaml({"message": GLOO})


def test_half_a_pair_is_replaced_since_no_server_could_read_it() -> None:
    assert json.loads(as_yaml(["a\ud83db"])) == ["a\ufffdb"]


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_json_and_yaml_agree_on_every_text(text: str) -> None:
    body = as_yaml([text])
    assert json.loads(body) == yaml.safe_load(body) == [text]
