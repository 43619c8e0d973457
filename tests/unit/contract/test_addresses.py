"""Addresses begin with a scheme; `checkpoint.storage.subPath` stays below the root of the volume."""

import pytest
from pydantic import ValidationError

from trainium_contract.spec.storage import StorageSpec
from trainium_contract.trainer.addresses import is_address
from trainium_contract.trainer.checkpoint import CheckpointConfig


@pytest.mark.parametrize("address", ["s3://bucket", "s3://bucket/prefix", "file:///data", "HTTPS://host"])
def test_an_address_begins_with_its_scheme(address: str) -> None:
    assert is_address(address)


@pytest.mark.parametrize("address", ["/checkpoints", "checkpoints", "/a/http://user", "://", "1://", "/a:b", ""])
def test_a_path_is_never_an_address(address: str) -> None:
    assert not is_address(address)


def test_records_stay_in_a_checkpoint_folder_whose_name_contains_a_scheme() -> None:
    assert CheckpointConfig(path="/checkpoints/http://user").records == "/checkpoints/http://user"


@pytest.mark.parametrize("path", ["a", "team/llama", ".hidden", "..hidden/x", "a..b/c.d", "a//b/", "...", "ünï"])
def test_a_path_below_the_root_is_accepted(path: str) -> None:
    assert StorageSpec(sub_path=path).sub_path == path


@pytest.mark.parametrize("path", ["", "/a", "..", "../x", "a/..", "a/../../b", ".", "./a", "a/./b", "a//../b", "a/../"])
def test_a_path_outside_the_root_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        StorageSpec(sub_path=path)
