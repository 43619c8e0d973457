"""Cut what an image installs out of constraints.txt without losing a line of it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("image_requirements", ROOT / "scripts/image_requirements.py")
assert _SPEC is not None
assert _SPEC.loader is not None
script = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(script)

TWICE = """\
Some_Thing==1.0 ; python_full_version < '3.12' \\
    --hash=sha256:aa \\
    --hash=sha256:ab
some-thing==2.0 ; python_full_version >= '3.12' \\
    --hash=sha256:ba
other==3
"""


def test_a_package_that_is_pinned_twice_by_markers_keeps_both_pins_and_their_hashes() -> None:
    found = script.blocks(TWICE)
    assert list(found) == ["some-thing", "other"]
    assert found["some-thing"] == TWICE.rpartition("\nother")[0]
    assert script.without_hashes(found["some-thing"]) == [
        "Some_Thing==1.0 ; python_full_version < '3.12'",
        "some-thing==2.0 ; python_full_version >= '3.12'",
    ]
    assert script.without_hashes(found["other"]) == ["other==3"]


def test_nothing_of_the_projects_constraints_is_lost() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^[A-Za-z0-9][^\\\n]*==[^\\\n]*", text, re.MULTILINE)
    blocks = script.blocks(text)
    kept = [line for block in blocks.values() for line in script.without_hashes(block)]
    assert sorted(kept) == sorted(pin.strip() for pin in pins)
    assert len(kept) > len(blocks)
    assert "".join(blocks.values()).count("--hash=") == text.count("--hash=")


def test_a_torch_that_is_there_keeps_its_version_and_those_of_what_it_takes_in_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {
        "torch": (
            "2.9.0",
            ["sympy>=1.13.3", 'triton==3.5.0; platform_system == "Linux"', "cuda_toolkit[nvrtc]==13.0.3"],
        ),
        "triton": ("3.5.0", []),
        "sympy": ("1.14.0", []),
    }
    for name, (found, wants) in needs.items():
        folder = tmp_path / f"{name}-{found}.dist-info"
        folder.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {found}\n"
        (folder / "METADATA").write_text(head + "".join(f"Requires-Dist: {want}\n" for want in wants))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert script.installed_torch() == {
        "torch": "2.9.0",
        "triton": "3.5.0",
    }  # this torch was installed without its CUDA
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").unlink()
    (tmp_path / "torch-2.9.0.dist-info").rmdir()
    assert script.installed_torch() == {}


def test_a_part_is_what_its_package_and_the_contract_state_with_our_own_names_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert any(need.startswith("pytest>") for need in script.wanted("dev"))
    assert any(need.startswith("obstore>") for need in script.wanted("trainer"))
    assert script.wanted("build") == ["hatchling>=1.27"]
    for part in (*script.PARTS, "dev"):
        assert any(need.startswith("pydantic>") for need in script.wanted(part))
        assert not [need for need in script.wanted(part) if need.startswith("trainium")]
    for image, foreign in (("operator", "torch"), ("operator", "peft"), ("trainer", "kopf"), ("client", "aiohttp")):
        assert not [need for need in script.wanted(image) if need.startswith(foreign)]
    assert not [need for need in script.wanted("trainer") if need.startswith(("tensorboard", "matplotlib"))]


def test_an_own_extra_is_followed_and_a_package_that_is_not_there_is_never_asked_for_elsewhere() -> None:
    distributions = {
        "trainium-one": {"project": {"dependencies": ["a>=1", "trainium-two[x,y]==1"]}},
        "trainium-two": {
            "project": {"dependencies": ["b"], "optional-dependencies": {"x": ["c"], "y": ["d<2"], "z": ["e"]}}
        },
    }
    assert script.needs("trainium-one==1", distributions) == {"a>=1", "b", "c", "d<2"}
    del distributions["trainium-two"]
    with pytest.raises(SystemExit, match=r"is of trainium-two, which trainium-two\[x,y\]==1 requires; add it"):
        script.needs("trainium-one==1", distributions)
