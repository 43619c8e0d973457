"""A text that begins as an address does is one; a folder whose name has `://` further on is none."""

from __future__ import annotations

import pytest

from trainium_contract.trainer.addresses import is_address
from trainium_contract.trainer.checkpoint import CheckpointConfig


@pytest.mark.parametrize("place", ["s3://bucket", "s3://bucket/prefix", "file:///data", "HTTPS://host"])
def test_an_address_begins_with_its_scheme(place: str) -> None:
    assert is_address(place)


@pytest.mark.parametrize("place", ["/checkpoints", "checkpoints", "/a/http://user", "://", "1://", "/a:b", ""])
def test_a_folder_is_no_address_whatever_it_is_called(place: str) -> None:
    assert not is_address(place)


def test_checkpoints_in_a_folder_with_such_a_name_keep_their_records_there() -> None:
    assert CheckpointConfig(path="/checkpoints/http://user").records == "/checkpoints/http://user"
