"""Write the results of all rows as a page.

Guarantees:
- The page depends only on the results and, for rows without one, on the previous page, so it can be written again at
  any time.
- A row without a result keeps its line of the previous page, marked as older, or is listed as not run.
- A row that fails is listed with its deviations.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from benchmarks.faults.record import ClusterKind, RowResult, Spread
from benchmarks.faults.row import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from benchmarks.faults.row import Row

INTRODUCTION = """# The fault table

Every fault that needs no accelerator is injected, timed and checked. These commands write this file:

```sh
make faults                       # all rows; ARGS="--rows 1,5 --runs 3" for some, ARGS=--resume for missing runs
make faults CLUSTER=existing      # the rows in which a kubelet decides, on the cluster of KUBECONFIG
```

- *Detect* and *first new step*: seconds from the fault until it is detected, and until the end of the first step that
  was not done before. Median, 95th percentile and maximum of the runs.
- Steps take 0.15 s (a tiny model, three workers and a spare that share a machine). The figures are those of the
  machinery, not of the start of a model.
- If a row ends the job, *detect* is the time until its verdict.
- *Lost*: the largest number of steps that were computed again.
- *Blame*: runs in which the history has the expected cause, rung, pod and node, and no other node is suspected.
- A row passes if every run is as expected, the loss curve of the job equals that of an undisturbed run (bit for bit
  at one size, within 1e-5 across sizes), and every sample was seen once. Deviations are listed below the table.
- *Older*: measured at an earlier state of the code.
"""

CLUSTERS = """
*Real processes*: etcd, API server, scheduler, controller manager, the operator and training processes of the
development cluster. *Genuine kubelet*: real processes on a Kubernetes with genuine kubelets and containerd. Seeds
choose what is hit and when.
"""

VIRTUAL_TIME_TESTS = """
Faults that last minutes or hours run with each change, in virtual time, as tests in `tests/wire/operator`:

| fault | test |
|---|---|
| operator killed at each of its writes | `test_operator_killed.py` |
| no operator for 30 minutes | `test_operator_replicas.py` |
| no API server for 10 minutes; errors, conflicts, broken watches | `test_operator_outage.py` |
| operator cut off from all nodes, from a zone; stale leases | `test_operator_partition.py` |
| wrong clocks, loaded hosts, idle capacity, uneven sizes, repeat offenders | `test_operator_misleading_signs.py` |

Rows 7, 9, 10 and 11 need devices, or links that can be degraded; they are not run."""

ENDED_PODS = """
## Pods that are asked to end, on genuine kubelets

SIGTERM reaches the main process of a worker, and nobody deletes the pod. Each way was tried on four busy nodes, with
two workers, a spare, the built-in trainer, and a program that saves every five steps. A program without a handler for
SIGTERM and one that exits with 0 were asked in every way; one that exits with 75 and one that ignores it by `kill 1`,
by a liveness probe, by an eviction, and all processes at once. The images had the files of ours without our
Dockerfile, the trainer's files came from the node, and each injection into the trainer came twice. The rows marked with
a dagger (†) were tried later, on an overloaded machine, with images of operator, agent and trainer (`trainer-cpu` with
CUDA, 5.7 GB) that our Dockerfile built; the program's image was a plain Python. The runtime's stop is the call that
`crictl stop --timeout 10` makes.

- Every pod whose end was read failed with code 75 or as `Evicted`. None ended in phase Succeeded, and none completed
  its job. The codes of the trainer's two probed pods were not read.
- Every job trained on: a spare or a new pod took the rank. The cause is `PodLost`, or `LocalStorage` for an eviction.
- The programs completed after their last step, by the termination messages of their pods.

| asked to end by | workers | steps lost, program | trainer |
|---|---|---|---|
| `kill 1` by `kubectl exec` | one | 0 to 3 | 0 |
| `kill 1` by `kubectl exec` | both at once | 1 to 14 | not tried |
| `kill 1` by `kubectl exec` | both, 1.6 s apart | 1 to 7 | 0 |
| failed liveness probe | one | 1 to 3 | not tried |
| failed liveness probe | both at once | 0 to 6 | 0 |
| eviction for ephemeral storage | one, both | 0 to 3 | 0 (one) |
| stop by the container runtime | one, both | 0 to 4, once 48 | 0 (both, 1.6 s apart) |
| SIGTERM to all processes of the container | one, both | 1 to 6 | 0 (one) |
| `kill 1` by `kubectl exec` | the spare | no interruption | not tried |
| `kill 1` while the program imports, while it saves | both | 0; 5 | not tried |
| stop by the container runtime † | one | 3 | 0 (a job of one worker) |
| stop by the container runtime † | both at once, exits 0 | 4 | not tried |
| stop by the container runtime † | both, 1.6 s apart, ignores it | 3 | not tried |
| stop by the container runtime † | the spare | no interruption | not tried |
| loss and restart of its node, exits 0 † | one | trains on as `NodeLost` after 48 s | not tried |
| stop by the container runtime while the agent imports | one | 0, before the start | not tried |

The ranks of the program do not wait for each other, so its checkpoint is as old as the step of the slower one.

Limits of the pod itself, which one program exceeds in each attempt (for the second the agent was built again):

- `sizeLimit: 10Mi` of an emptyDir: the kubelet evicted three pods. Each is `LocalStorage` in the `process` budget, 0
  steps lost. With 2 failures allowed, the verdict names the volume and the limit.
- A memory limit of 300 MiB, cgroup v1, Linux 6.18: the kernel killed the rank 11 times. Each is `OutOfMemory`, 2 to 4
  steps lost. With 10 failures allowed, the verdict names the memory limit of the container."""

_KUBELETS_HEADING = "\n## On genuine kubelets\n"
_OLDER_MARK = " (older)"
_COLUMNS = 10


def write_document(results: Path, path: Path) -> None:
    """Write the page from the results in a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    previous = path.read_text() if path.exists() else ""
    path.write_text("\n".join(_lines(results, previous)) + "\n")


def _lines(folder: Path, previous: str) -> Iterator[str]:
    yield INTRODUCTION + CLUSTERS
    results = {path.stem: RowResult.load(path) for path in sorted(folder.glob("*.json"))}
    local = [(row, results.get(f"{row.file_stem}-local")) for row in ROWS]
    kubelet = [(row, results.get(f"{row.file_stem}-kubelet")) for row in ROWS if row.kubelet]
    measured = [(row, result) for row, result in (*local, *kubelet) if result is not None]
    yield f"Run {_summarize([result for _, result in measured])}.\n"
    previous_local, _, previous_kubelet = previous.partition(_KUBELETS_HEADING)
    yield from _table(local, previous_local, ClusterKind.DEVCLUSTER)
    if previous_kubelet or any(result is not None for _, result in kubelet):
        yield _KUBELETS_HEADING
        yield from _table(kubelet, previous_kubelet, ClusterKind.KUBELETS)
    yield ENDED_PODS
    failed = [(row, result) for row, result in measured if result.all_deviations]
    if failed:
        yield "\n## Deviations\n"
        for row, result in failed:
            yield from _deviation_list(row, result)
    yield "\n## What is injected and how it is checked\n"
    yield "| # | injected | expected | checked by |"
    yield "|---|---|---|---|"
    for row in ROWS:
        yield f"| {row.row} | {row.injected} | {row.expected} | {row.checked} |"
    yield VIRTUAL_TIME_TESTS


def _table(rows: Iterable[tuple[Row, RowResult | None]], previous: str, cluster: ClusterKind) -> Iterator[str]:
    figures = "detect p50 / p95 / max | first new step p50 / p95 / max"
    yield f"| # | fault | where | runs | {figures} | lost | blame | seed | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row, result in rows:
        yield table_line(row, result) if result is not None else _older_line(row, previous, cluster)


def _older_line(row: Row, previous: str, cluster: ClusterKind) -> str:
    """Return the line of the previous page, with its figures or the reason why the row did not run."""
    for line in previous.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] != row.row or len(cells) != _COLUMNS or cells[-1] == "not run yet":
            continue
        has_new_figures = cells[-2].isdigit() and not cells[-1].endswith(_OLDER_MARK)
        return f"{line[:-2]}{_OLDER_MARK} |" if has_new_figures else line
    return table_line(row, None, cluster)


def table_line(row: Row, result: RowResult | None, cluster: ClusterKind = ClusterKind.DEVCLUSTER) -> str:
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
    spread = Spread.of(values)
    return "" if spread is None else f"{spread.p50:.2f} / {spread.p95:.2f} / {spread.maximum:.2f}"


def _deviation_list(row: Row, result: RowResult) -> Iterator[str]:
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
