"""What an image installs is cut out of constraints.txt without losing a line of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

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
