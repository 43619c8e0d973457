"""Figures of docs/comparison.md equal those of docs/benchmarks.md, which a program writes."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "comparison.md").read_text(encoding="utf-8")


def rows(part: str, heading: str = "A fleet") -> dict[str, list[str]]:
    """Return the table of a part of docs/benchmarks.md: the cells by figure."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    text = text.partition(f"### {part}\n")[2].partition("\n#")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {found[0]: found[1:] for found in cells}


def common_run_median(size: int, figure: str) -> str:
    """Return a median of the run that measures all systems, rounded as the page has it."""
    value, unit = rows(f"{size:,} nodes", "Beside JobSet, in one run")[figure][0].split()
    return {"s": f"{float(value):.2f} s" if size == 128 else f"{float(value):.1f} s", "x": value}[unit]


@pytest.mark.parametrize(
    ("figure", "row"),
    [
        ("created", "all pods created"),
        ("Running", "all Running"),
        ("all restarted", "all pods fail: all Running again"),
    ],
)
def test_a_row_of_the_common_run_has_the_measured_medians(figure: str, row: str) -> None:
    cells = [common_run_median(size, f"{who}: {figure}") for size in (128, 1000) for who in ("ours", "JobSet", "floor")]
    assert f"| {row} | {' | '.join(cells)} |" in PAGE


def test_ratios_to_jobset_are_the_measured_values() -> None:
    shown = [
        [common_run_median(size, f"ours over JobSet: {figure}") for figure in ("created", "Running", "all restarted")]
        for size in (128, 1000)
    ]
    (small, large) = (
        "{}, {} and {} at {}".format(*each, size) for each, size in zip(shown, ("128", "1,000"), strict=True)
    )
    assert f"it is {small}, and {large}" in PAGE


@pytest.mark.parametrize(
    ("figure", "written"),
    [
        ("created over the floor", "| all pods created, over a bare client | {:.2f} x |"),
        ("one pod fails: until all workers and spares are back", "| 1, {:.1f} s |"),
        ("node deleted: until all workers and spares are back", "all there again | {:.1f} s |"),
        ("node silent: until all workers and spares are back", "| a node is silent | {:.1f} s |"),
    ],
)
def test_a_figure_has_the_measured_value(figure: str, written: str) -> None:
    expected = written.format(float(rows("128 nodes")[figure][0].split()[0]))
    assert expected in PAGE, f"docs/comparison.md lacks `{expected}`, which docs/benchmarks.md has as {figure}"


def test_figures_of_other_operators_are_the_measured_values() -> None:
    cells = rows("128 nodes")
    assert cells["created over the floor"][3:] == ["3.0 x", "", "18.5 x"]
    assert cells["one pod fails: pods recreated"][3:] == ["128", "1", "1"]
