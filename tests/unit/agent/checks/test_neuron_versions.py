"""Driver and runtime of Neuron: which pairs are told of, and what is read of a node and an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_agent.checks import preflight
from trainium_agent.checks.preflight import driver_version, mismatch, runtime_version
from trainium_contract.spec.health import PreflightCheck

if TYPE_CHECKING:
    from pathlib import Path

STATUS = """Package: aws-neuronx-collectives
Status: install ok installed
Version: 2.99.1.0

Package: aws-neuronx-runtime-lib
Status: install ok installed
Priority: optional
Maintainer: x
Version: 2.32.8.0-abc
Description: y

Package: zlib1g
Version: 1:1.3
"""


@pytest.mark.parametrize(
    ("driver", "runtime", "advice"),
    [
        ((2, 26), (2, 32), "update the node"),
        ((2, 19), (2, 35), "update the node"),
        ((2, 29), (2, 32), "use an image"),
        ((2, 31), (2, 20), "use an image"),
        ((2, 27), (2, 32), ""),
        ((2, 26), (2, 31), ""),
        ((2, 29), (2, 33), ""),
        ((2, 31), (2, 35), ""),
        (None, (2, 32), ""),
        ((2, 26), None, ""),
    ],
)
def test_pairs_that_do_not_work_together_are_told_with_what_to_do(
    driver: tuple[int, int] | None, runtime: tuple[int, int] | None, advice: str
) -> None:
    sentence = mismatch(driver, runtime)
    assert bool(sentence) is bool(advice)
    assert advice in sentence


def test_versions_are_read_of_the_module_and_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("2.26.10.0\n")
    (tmp_path / "status").write_text(STATUS)
    assert driver_version(tmp_path / "version") == (2, 26)
    assert runtime_version(tmp_path / "status") == (2, 32)
    assert driver_version(tmp_path / "none") is None
    assert runtime_version(tmp_path / "none") is None


@given(st.text(max_size=300))
def test_whatever_stands_there_is_no_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "odd"
    path.write_text(text, encoding="utf-8", errors="replace")
    assert driver_version(path) is None or "." in text
    runtime_version(path)


def test_a_pair_that_does_not_work_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "driver_version", lambda: (2, 26))
    monkeypatch.setattr(preflight, "runtime_version", lambda: (2, 32))
    (finding,) = preflight._versions(16)
    assert (finding.code, finding.check) == (None, PreflightCheck.DEVICES)
    assert finding.sentence.startswith("The node's Neuron driver 2.26 and the image's runtime 2.32")
    assert list(preflight._versions(0)) == [], "a worker without devices does not ask"
