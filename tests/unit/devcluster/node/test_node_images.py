"""Images of a node are names: some have their own modules, some cannot be pulled, all others are as ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainium_devcluster.node.spec.images import Image, PullError, read_image, write_image

if TYPE_CHECKING:
    from pathlib import Path


def test_an_image_may_have_its_own_modules_that_come_first(tmp_path: Path) -> None:
    folder, name = tmp_path / "images", "registry:5000/team/trainer:1"
    assert read_image(folder, name) == Image()
    assert Image().environment() == {}
    write_image(folder, name, [tmp_path / "contract", tmp_path / "operator"])
    found = read_image(folder, name)
    assert found.environment() == {"PYTHONPATH": f"{tmp_path}/contract:{tmp_path}/operator"}
    assert read_image(folder, "trainer:1") == read_image(folder, "") == Image()


def test_an_image_that_cannot_be_pulled_is_a_sentence_until_somebody_pushes_it(tmp_path: Path) -> None:
    write_image(tmp_path, "trainer:2", None)
    with pytest.raises(PullError, match="failed to pull and unpack image 'trainer:2': not found"):
        read_image(tmp_path, "trainer:2")
    write_image(tmp_path, "trainer:2", [])
    assert read_image(tmp_path, "trainer:2") == Image()
