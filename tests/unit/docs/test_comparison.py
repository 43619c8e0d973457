"""The measured figures of docs/comparison.md are those of docs/benchmarks.md, which a program writes."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "comparison.md").read_text(encoding="utf-8")


def rows(part: str) -> dict[str, list[str]]:
    """The first table of a part of the benchmarks: figure -> its cells."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8").partition(f"### {part}\n")[2].partition("\n#")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {found[0]: found[1:] for found in cells}


def ours(part: str, figure: str) -> float:
    return float(rows(part)[figure][0].split()[0])


@pytest.mark.parametrize(
    ("part", "figure", "written"),
    [
        ("128 nodes", "created over the floor", "| all pods created | {:.2f} x |"),
        ("128 nodes", "Running over the floor", "| all Running | {:.2f} x |"),
        ("128 nodes", "operator CPU for the start", "processor for it, peak memory | {:.2f} s,"),
        ("128 nodes", "operator memory, peak until all run", " s, {:.0f} MiB |"),
        ("128 nodes", "all pods fail: all Running again", "all Running again | {:.2f} s |"),
        ("128 nodes", "one pod fails: until all workers and spares are back", "| 1, {:.1f} s |"),
        ("128 nodes", "node deleted: until all workers and spares are back", "all there again | {:.1f} s |"),
        ("128 nodes", "node silent: until all workers and spares are back", "| a node is silent | {:.1f} s |"),
        ("1,000 nodes", "Running over the floor", "all Running {:.2f} x here"),
        ("1,000 nodes", "gang restart over the floor", "a restart of everything {:.2f} x here"),
    ],
)
def test_a_figure_is_the_measured_one(part: str, figure: str, written: str) -> None:
    wanted = written.format(ours(part, figure))
    assert wanted in PAGE, f"docs/comparison.md lacks `{wanted}`, which docs/benchmarks.md has as {figure}, {part}"


def test_figures_of_others_are_those_that_were_measured() -> None:
    cells = rows("128 nodes")
    assert cells["created over the floor"][3:] == ["3.0 x", "", "18.5 x"]
    assert cells["Running over the floor"][3:] == ["1.9 x", "", "8.2 x"]
    assert cells["all pods fail: all Running again"][3:] == ["3.5 s", "", "18.4 s (17 x)"]
    assert cells["one pod fails: pods recreated"][3:] == ["128", "1", "1"]
