"""Define the rows in which others change objects of a job, or a worker exceeds its own limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.faults.recovery import SPARE_OR_REPLACE, ExpectedRecovery, Run
from benchmarks.faults.row import Row
from benchmarks.faults.rows.pods import expect_deleted
from tests.testing.cluster.installed import second_release

if TYPE_CHECKING:
    from benchmarks.faults.record import RunResult

EVICTION = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". '


def _delete_pod_beside_second_release(run: Run) -> RunResult:
    pod = run.random_member()["podName"]
    with second_release(run.env.cluster):
        return run.measure_recovery(
            lambda: run.target.delete_pod(pod, force=True), expect_deleted(pod, pods_joined=1), note=pod, pause=30.0
        )


def _delete_pod_while_annotations_are_removed(run: Run) -> RunResult:
    pod = run.random_member()["podName"]
    with run.target.job.removed_annotations():
        return run.measure_recovery(
            lambda: run.target.delete_pod(pod, force=True), expect_deleted(pod, pods_joined=1), note=pod
        )


def _evict_for_own_limit(run: Run) -> RunResult:
    pod = run.random_member()["podName"]
    expected = ExpectedRecovery(
        causes=frozenset({"LocalStorage"}), rungs=SPARE_OR_REPLACE, pod=pod, suspect="", pods_joined=1
    )
    return run.measure_recovery(lambda: run.target.job.write_eviction(pod, EVICTION), expected, note=pod)


ROWS = (
    Row(
        number=50,
        fault="a second release of the operator, with a fault",
        injected="the chart installed again for the same namespaces; a member deleted by force",
        expected="the first release alone serves: one spare takes the rank; at most 1 step lost",
        checked="as row 4, and no second interruption in 30 s",
        run_once=_delete_pod_beside_second_release,
        max_runs=3,
    ),
    Row(
        number=51,
        fault="a policy removes annotations, with a fault",
        injected="a MutatingAdmissionPolicy on ConfigMaps and budgets; a member deleted by force",
        expected="as row 4",
        checked="as row 4",
        run_once=_delete_pod_while_annotations_are_removed,
        max_runs=5,
    ),
    Row(
        number=52,
        fault="a worker exceeds its own limit of local storage",
        injected="the status that a kubelet writes for an exceeded `sizeLimit`",
        expected="the spare takes the rank; counted as the user's, no node blamed; at most 1 step lost",
        checked="history: LocalStorage, Spare or Replace, that pod, no node suspected; curve",
        run_once=_evict_for_own_limit,
        kubelet=False,
    ),
)
