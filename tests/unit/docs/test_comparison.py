"""Figures of docs/comparison.md equal those of benchmarks/results.json, which a program writes."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "benchmarks/results.json").read_text(encoding="utf-8"))


def figures(size: str, part: str = "A fleet") -> dict[str, str]:
    """Return the medians of a part of benchmarks/results.json."""
    return {name: figure["median"] for name, figure in RESULTS[part]["sizes"][size]["figures"].items()}


def common_run_median(size: int, figure: str) -> str:
    """Return a median of the run that measures all systems, rounded as the page has it."""
    value, unit = figures(f"{size:,} nodes", "Beside JobSet, in one run")[figure].split()
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
    expected = written.format(float(figures("128 nodes")[figure].split()[0]))
    assert expected in PAGE, f"docs/comparison.md lacks `{expected}`, which benchmarks/results.json has as {figure}"


def test_figures_of_other_operators_are_the_measured_values() -> None:
    peers = json.loads((ROOT / "benchmarks/peers.json").read_text(encoding="utf-8"))["figures"]
    rows = {row["name"]: row for row in peers if row["nodes"] == 128}
    created, recreated = rows["created over the floor"], rows["one pod fails: pods recreated"]
    assert f"| {created['JobSet']} | | {created['PyTorchJob']} |" in PAGE
    assert f"{recreated['JobSet']}, 4.5 s | {recreated['JobSet in-place']}, 10.0 s | {recreated['PyTorchJob']}," in PAGE
