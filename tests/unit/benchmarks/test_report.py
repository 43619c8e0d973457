"""The page of figures: what was not measured again stays, with when it was."""

from __future__ import annotations

from benchmarks.report import page

FIGURE = {"name": "created", "unit": "s", "values": [1.5], "goal": None, "met": None, "median": 1.5}


def _fleet(date: str, *sizes: int) -> dict[str, object]:
    return {
        "benchmark": "fleet",
        "quick": False,
        "date": date,
        "machine": {"cores": 2, "processor": "x", "load": 1.0},
        "figures": [{**FIGURE, "nodes": size} for size in sizes],
    }


def test_a_size_that_was_not_measured_again_keeps_its_figures_and_their_date() -> None:
    first = page({"fleet": _fleet("2026-01-01", 128, 5000)})
    second = page({"fleet": _fleet("2026-02-02", 128)}, first)
    head, small, large = second.partition("## A fleet")[2].split("### ")
    assert "2026-02-02" in head
    assert "2026-01-01" not in head
    assert small.startswith("128 nodes")
    assert large.startswith("5,000 nodes")
    assert "2026-01-01" in large
    assert "| created | 1.50 s |" in large


def test_a_kept_size_keeps_its_date_however_often_others_are_measured() -> None:
    text = page({"fleet": _fleet("2026-01-01", 128, 5000)})
    for day in ("2026-02-02", "2026-03-03"):
        text = page({"fleet": _fleet(day, 128)}, text)
    large = text.partition("### 5,000 nodes")[2]
    assert large.count("Command:") == 1
    assert "2026-01-01" in large


def test_a_size_that_was_measured_again_is_there_once() -> None:
    text = page({"fleet": _fleet("2026-02-02", 5000)}, page({"fleet": _fleet("2026-01-01", 128, 5000)}))
    assert text.count("### 5,000 nodes") == 1
    assert "2026-01-01" not in text.partition("### 5,000 nodes")[2].partition("###")[0]


def test_a_part_that_was_not_measured_again_keeps_its_text_and_place() -> None:
    former = "# Benchmarks\n\nold head\n\n## A fleet\n\nold\n\n## Data\n\nolder\n"
    text = page({"fleet": _fleet("2026-02-02", 128)}, former)
    assert "old head" not in text
    assert text.endswith("## Data\n\nolder\n")
    assert text.index("### 128 nodes") < text.index("## Data")
