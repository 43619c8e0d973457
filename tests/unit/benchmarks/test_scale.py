"""The scale benchmark: its fit of growth, its simulation held against ranks that really gather, a small real world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scale.book import Book, Figure
from benchmarks.scale.document import page
from benchmarks.scale.talk import climb

ROOT = Path(__file__).parents[3]

SIZES = (8, 64, 512, 4096)


@pytest.mark.parametrize(
    ("cost", "law"),
    [
        (lambda n: 3.0, "constant or logarithmic"),
        (lambda n: n.bit_length(), "constant or logarithmic"),
        (lambda n: 2.0 * n, "N^1.00"),
        (lambda n: 0.5 * n * n, "**N^2.00**"),
    ],
)
def test_growth_is_told_from_the_measured_sizes(cost: object, law: str) -> None:
    figure = Figure("s", "n", "rank 0", "count", {size: cost(size) for size in SIZES})  # type: ignore[operator]
    assert figure.law == law


def test_a_budget_is_judged_at_its_size_and_a_miss_is_on_the_page() -> None:
    book = Book()
    for ranks, mib in zip(SIZES, (0.1, 0.5, 0.9, 1.5), strict=True):
        section, name = "Save and resume (hlat-7b)", "commit: gathered"
        book.add(section, name, "rank 0", "MiB", ranks, mib, budget=1.0)
    (figure,) = book.figures
    assert figure.met is False
    figure.values[4096] = 1.0
    assert figure.met
    figure.values[4096] = 1.5
    raw = {"date": "d", "machine": {"cores": 2, "load": 0.0, "torch": "2.13.0"}, "figures": [figure.to_json()]}
    assert "| hlat-7b: gathers | each save | 1.50 MiB | 1.00 MiB, **missed** |" in page(raw, [])


def test_figures_of_another_torch_stand_beside_those_that_both_have() -> None:
    raws = []
    for torch, seconds in (("2.13.0", 0.25), ("2.9.0", 0.5)):
        book = Book()
        book.add("Save and resume (hlat-7b)", "plan: decide", "rank 0", "s", 4096, seconds)
        book.add("Save and resume (hlat-7b)", f"only on {torch}", "rank 0", "s", 4096, 1.0)
        machine = {"cores": 2, "load": 0.0, "torch": torch}
        raws.append({"date": "d", "machine": machine, "figures": [each.to_json() for each in book.figures]})
    table = page(raws[0], [], raws[1]).partition("## torch 2.9.0")[2]
    assert "| hlat-7b: plan: decide | rank 0 | 250.0 ms | 500.0 ms |" in table
    assert "only on" not in table
    assert "## torch" not in page(raws[0], [])


def test_of_several_values_at_one_size_the_least_counts() -> None:
    book = Book()
    for seconds in (3.0, 1.0, 2.0):
        book.add("s", "n", "rank 0", "s", 8, seconds)
    assert book.value("s", "n", "rank 0", "s", 8) == 1.0


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_a_gather_brings_rank_0_a_message_a_level_and_everything_arrives_once(size: int) -> None:
    said = [os.urandom(1000) for _ in range(size)]  # random: nothing of it can be compressed away
    cost = climb(said)
    assert cost.messages == (size - 1).bit_length()
    assert cost.first == pytest.approx(1000 * (size - 1), abs=100 * size)
    assert cost.down == pytest.approx(1000 * size, abs=100 * size)
    assert cost.total >= 1000 * (size - 1)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_real_world_of_8_ranks_is_what_was_simulated_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    path = [str(ROOT), *(str(ROOT / part) for part in ("contract", "operator", "trainer_image", "devcluster"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(tmp_path)}
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.scale.world", "8", "--sharded", "--json", str(found)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    finding = json.loads(found.read_text())
    assert finding["same_curve"]
    assert finding["resumed"] == "step 2 from memory"
    assert finding["resize_kept"]
    assert len(finding["rows"]) >= 18
    assert not [row for row in finding["rows"] if not row["met"]]
