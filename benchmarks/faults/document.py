"""Write the results of all rows as a page.

Guarantees:
- The page depends only on the results and, for rows without one, on the previous page, so it can be written again at
  any time.
- A row without a result keeps its line of the previous page, marked as older, or is listed as not run.
- A row that fails is listed with its deviations.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from benchmarks.faults.record import ClusterKind, RowResult, Spread
from benchmarks.faults.row import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.faults.row import Row

_PAGE = Path(__file__).with_name("page.md")
_KUBELETS_HEADING = "\n## On genuine kubelets\n"
_OLDER_MARK = " (older)"
_COLUMNS = 10


def write_document(results: Path, path: Path) -> None:
    """Write the page from page.md and the results in a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    previous = path.read_text() if path.exists() else ""
    path.write_text(Template(_PAGE.read_text()).substitute(_render_parts(results, previous)))


def _render_parts(folder: Path, previous: str) -> dict[str, str]:
    """Return the parts of the page that depend on results and rows."""
    results = {path.stem: RowResult.load(path) for path in sorted(folder.glob("*.json"))}
    local = [(row, results.get(f"{row.file_stem}-local")) for row in ROWS]
    kubelet = [(row, results.get(f"{row.file_stem}-kubelet")) for row in ROWS if row.kubelet]
    measured = [(row, result) for row, result in (*local, *kubelet) if result is not None]
    failed = [(row, result) for row, result in measured if result.all_deviations]
    previous_local, _, previous_kubelet = previous.partition(_KUBELETS_HEADING)
    kubelet_lines: list[str] = []
    if previous_kubelet or any(result is not None for _, result in kubelet):
        kubelet_lines = [_KUBELETS_HEADING, *_format_table(kubelet, previous_kubelet, ClusterKind.KUBELETS)]
    deviations = [line for row, result in failed for line in _format_deviations(row, result)]
    descriptions = [f"| {row.row} | {row.injected} | {row.expected} | {row.checked} |" for row in ROWS]
    parts = {
        "summary": [_summarize([result for _, result in measured])],
        "local": [*_format_table(local, previous_local, ClusterKind.DEVCLUSTER)],
        "kubelets": kubelet_lines,
        "deviations": ["\n## Deviations\n", *deviations] if failed else [],
        "rows": ["| # | injected | expected | checked by |", "|---|---|---|---|", *descriptions],
    }
    return {name: "\n".join(lines) for name, lines in parts.items()}


def _format_table(rows: Iterable[tuple[Row, RowResult | None]], previous: str, cluster: ClusterKind) -> Iterator[str]:
    figures = "detect p50 / p95 / max | first new step p50 / p95 / max"
    yield f"| # | fault | where | runs | {figures} | lost | blame | seed | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row, result in rows:
        yield format_table_line(row, result) if result is not None else _find_older_line(row, previous, cluster)


def _find_older_line(row: Row, previous: str, cluster: ClusterKind) -> str:
    """Return the line of the previous page, with its figures or the reason why the row did not run."""
    for line in previous.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] != row.row or len(cells) != _COLUMNS or cells[-1] == "not run yet":
            continue
        has_new_figures = cells[-2].isdigit() and not cells[-1].endswith(_OLDER_MARK)
        return f"{line[:-2]}{_OLDER_MARK} |" if has_new_figures else line
    return format_table_line(row, None, cluster)


def format_table_line(row: Row, result: RowResult | None, cluster: ClusterKind = ClusterKind.DEVCLUSTER) -> str:
    """Return the line of a row."""
    if result is None or result.skipped:
        reason = "not run yet" if result is None else f"not run: {result.skipped}"
        return f"| {row.row} | {row.fault} | {cluster.value} | 0 | | | | | | {reason} |"
    correct, checked = result.blame_counts
    lost = [run.steps_lost for run in result.runs if run.steps_lost is not None]
    failures = f" {result.failed_runs} of {len(result.runs)}" if result.failed_runs else ""
    cells = (
        row.row,
        row.fault,
        result.cluster.value,
        str(len(result.runs)),
        _format_spread(run.detection_seconds for run in result.runs),
        _format_spread(run.recovery_seconds for run in result.runs),
        str(max(lost)) if lost else "",
        f"{correct}/{checked}" if checked else "",
        str(result.seed),
        "pass" if result.passed else f"**FAILS**{failures}",
    )
    return f"| {' | '.join(cells)} |"


def _format_spread(values: Iterable[float | None]) -> str:
    spread = Spread.summarize(values)
    return "" if spread is None else f"{spread.p50:.2f} / {spread.p95:.2f} / {spread.maximum:.2f}"


def _format_deviations(row: Row, result: RowResult) -> Iterator[str]:
    cluster = f" ({result.cluster.value})" if result.cluster is ClusterKind.KUBELETS else ""
    yield f"**{row.row}, {row.fault}**{cluster}:\n"
    for sentence, count in Counter(map(_shorten, result.all_deviations)).most_common(6):
        yield f"- {sentence}{f' ({count} times)' if count > 1 else ''}"
    yield ""


def _shorten(sentence: str) -> str:
    """Return the sentence as one line of limited length."""
    text = " ".join(sentence.split()).replace("|", "/")
    return text if len(text) <= 400 else f"{text[:400]} …"


def _summarize(results: list[RowResult]) -> str:
    if not results:
        return "without any result yet"
    seeds = sorted({result.seed for result in results})
    commits = sorted({commit for result in results for commit in result.commits} - {""})
    minutes = sum(result.duration_seconds for result in results) / 60
    passed = sum(result.passed for result in results)
    return (
        f"with seed {', '.join(map(str, seeds))} at {', '.join(commits) or 'an unknown state'}: {len(results)} rows in "
        f"{minutes:.0f} minutes, {passed} pass"
    )
