"""`checkpoint.storage.subPath` stays below the volume's root."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from trainium_contract.spec.storage import StorageSpec


@pytest.mark.parametrize("path", ["a", "team/llama", ".hidden", "..hidden/x", "a..b/c.d", "a//b/", "...", "ünï"])
def test_a_path_below_the_root_is_taken(path: str) -> None:
    assert StorageSpec(sub_path=path).sub_path == path


@pytest.mark.parametrize("path", ["", "/a", "..", "../x", "a/..", "a/../../b", ".", "./a", "a/./b", "a//../b", "a/../"])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        StorageSpec(sub_path=path)
