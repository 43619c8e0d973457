"""Define the rows that end with a verdict, apply limits and rules of the job, or interrupt a start."""

from __future__ import annotations

import contextlib
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.faults.environment import FaultEnvironment, RowSkippedError
from benchmarks.faults.record import Findings, RunResult
from benchmarks.faults.recovery import Run, expect_node_lost
from benchmarks.faults.row import Row
from benchmarks.faults.rows.processes import kill_rank
from tests.testing.suite.timeouts import Deadline
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.faults.target import Json, TargetJob

TWO_WORKERS = "workers: {replicas: 2}"
MISSING_IMAGE = "registry.invalid/no-such-image:1"
START_KILLS = 6
EMPTY_CACHE_NAME = "empty"
ALLOWED_CRASHES = 2
AVOID_CODE, STOP_CODE = 42, 43


def _both_workers_run(target: TargetJob) -> bool:
    pods = target.pods()
    return len(pods) == 2 and all(pod["status"].get("phase") == "Running" for pod in pods)


def _wait_for_verdict(run: Run, injected_at: float, reason: str, text: str, *, max_restarts: int = 1) -> RunResult:
    """Wait for a verdict with this reason and text, which must blame no node."""
    target, findings = run.target, Findings()
    target.wait_until(lambda: target.status().get("phase") == "Failed", "verdict", 90)
    detection_seconds = round(time.time() - injected_at, 3)
    status, failed = target.status(), target.condition("Failed")
    verdict = status.get("verdict", "")
    blame_correct = findings.expect(
        failed.get("reason") == reason, f"the verdict is {failed.get('reason')}, expected {reason}"
    )
    blame_correct &= findings.expect(text in verdict, f"the verdict does not contain {text!r}: {verdict[:200]!r}")
    blame_correct &= findings.expect(
        not status.get("avoidedNodes"), f"nodes are suspected: {status.get('avoidedNodes')}"
    )
    total = status.get("restarts", {}).get("total", 0)
    findings.expect(total <= max_restarts, f"{total} restarts, expected at most {max_restarts}")
    return run.result(
        findings, detection_seconds=detection_seconds, steps_lost=0, blame_correct=blame_correct, note=verdict[:80]
    )


def _inject_in_random_rank(run: Run, fault: str) -> float:
    run.target.wait_until_stable(3, seconds=120)
    pod = run.rng.choice(run.target.members())["podName"]
    return run.target.inject(fault, pod, sticky=fault == "nan")


def _not_a_number(run: Run) -> RunResult:
    return _wait_for_verdict(run, _inject_in_random_rank(run, "nan"), "NumericalError", "nan")


def _out_of_memory(run: Run) -> RunResult:
    return _wait_for_verdict(run, _inject_in_random_rank(run, "oom"), "OutOfMemory", "memory")


def _import_error(run: Run) -> RunResult:
    run.target.wait_until(lambda: _both_workers_run(run.target), "running workers", 120)
    return _wait_for_verdict(run, time.time(), "UserError", "no_such_module", max_restarts=2)


def _exhaust_budget(run: Run) -> RunResult:
    """Kill a rank as often as the budget allows, then once more."""
    target, deviations = run.target, list[str]()
    for _ in range(ALLOWED_CRASHES):
        target.wait_until_stable(3, seconds=120)
        deviations += kill_rank(run).deviations
    target.wait_until_stable(3)
    killed_at = target.signal(run.random_member()["podName"], "KILL")
    result = _wait_for_verdict(run, killed_at, "BudgetExhausted", "budgets.process", max_restarts=ALLOWED_CRASHES + 1)
    return run.result(
        Findings([*deviations, *result.deviations]),
        detection_seconds=result.detection_seconds,
        blame_correct=result.blame_correct,
        note=result.note,
    )


def _apply_rules(run: Run) -> RunResult:
    """Exit with a code whose rule avoids the node, then with one whose rule stops the job."""
    target = run.target
    target.wait_until_stable(3, seconds=120)
    member = run.random_member()
    pod, node = member["podName"], member["nodeName"]
    expected = expect_node_lost(node, causes=frozenset({"Host"}), pod=pod)
    avoided = run.measure_recovery(partial(target.inject, "exit", pod, code=AVOID_CODE), expected, note=pod)
    findings = Findings(list(avoided.deviations))
    members = [member["nodeName"] for member in target.members()]
    findings.expect(node not in members, f"a rank is on {node}, which the rule avoids")
    target.wait_until_stable(3)
    target.clear_failures()
    target.inject("exit", run.random_member()["podName"], code=STOP_CODE)
    stopped = _wait_for_verdict(run, time.time(), "UserError", str(STOP_CODE))
    return run.result(
        Findings([*findings.deviations, *stopped.deviations]),
        detection_seconds=avoided.detection_seconds,
        recovery_seconds=avoided.recovery_seconds,
        steps_lost=avoided.steps_lost,
        blame_correct=avoided.blame_correct and stopped.blame_correct,
        note=stopped.note,
    )


def _missing_image(run: Run) -> RunResult:
    """Start with an image that cannot be pulled: expect a condition, no verdict; a corrected image starts the pods."""
    target, findings = run.target, Findings()
    applied_at = time.time()

    def not_starting() -> Json:
        condition = target.condition("PodsReady")
        return condition if condition.get("reason") == "WorkerNotStarting" else {}

    message = target.wait_until(not_starting, "reason", 120).get("message", "")
    detection_seconds = round(time.time() - applied_at, 3)
    blame_correct = findings.expect(MISSING_IMAGE.partition(":")[0] in message, f"the image is not named: {message!r}")
    findings.expect(target.status().get("phase") != "Failed", "the job was stopped")
    corrected_at = time.time()
    target.patch({"spec": {"image": run.env.cluster.settings["chartValues"]["trainerImage"]}})
    target.wait_for_step(1, 180)
    recovery_seconds = round(target.records()[1]["time"] - corrected_at, 3)
    return run.result(
        findings,
        detection_seconds=detection_seconds,
        recovery_seconds=recovery_seconds,
        steps_lost=0,
        blame_correct=blame_correct,
        note=message[:80],
    )


def _require_images(env: FaultEnvironment) -> None:
    if env.local:
        raise RowSkippedError("the development cluster pulls no images")


@contextlib.contextmanager
def _empty_cache(env: FaultEnvironment) -> Iterator[None]:
    folder = env.cluster.shared / "cache" / EMPTY_CACHE_NAME
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _interrupt_start(run: Run) -> RunResult:
    """Kill ranks while they fill the cache of tokenized text, the only cache of a start on a CPU."""
    env, target = run.env, run.target
    target.wait_until(lambda: _both_workers_run(target), "running workers", 120)
    kills, deadline = 0, Deadline(60)
    while kills < START_KILLS and not deadline.is_over():
        time.sleep(run.rng.uniform(0.2, 1.0))
        for pod in target.pods():
            # While the pod warms up, the standby process tokenizes.
            for title in ("trainium-rank", "trainium-standby"):
                with contextlib.suppress(ClusterError):
                    env.faults.kill_container(target.job.namespace, pod["metadata"]["name"], match=title)
                    kills += 1
    last_kill_at = time.time()
    target.wait_for_step(5, 120)
    findings = Findings()
    findings.expect(kills > 0, "no process was killed")
    findings.expect(not env.check_curve(target, 2), "the curve or the samples differ: the cache is damaged")
    recovery_seconds = round(target.records()[1]["time"] - last_kill_at, 3)
    return run.result(findings, recovery_seconds=recovery_seconds, steps_lost=0, note=f"{kills} kills")


ROWS = (
    Row(
        number=12,
        fault="NaN loss",
        injected="the loss of one rank set to NaN, and that of every later step",
        expected="stops with verdict NumericalError; no restart loop, no node blamed",
        checked="condition Failed, its reason and message; no suspected node; at most 1 restart",
        run_once=_not_a_number,
        spares=0,
        spec=TWO_WORKERS,
        job_per_run=True,
        max_runs=5,
    ),
    Row(
        number=13,
        fault="import error at step 0",
        injected="an entry point whose module does not exist",
        expected="two tries at most, verdict UserError that names the module; no node blamed",
        checked="as row 12; at most 2 restarts. Time counts from when the workers run",
        run_once=_import_error,
        spares=0,
        spec=TWO_WORKERS,
        variables={"TRAINIUM_RANK_ENTRY": "no_such_module:main"},
        job_per_run=True,
        max_runs=5,
    ),
    Row(
        number=13,
        part="b",
        fault="image that cannot be pulled",
        injected="a job whose image does not exist; corrected when the status reports it",
        expected="the status names the image, nothing is stopped; the corrected image reaches the waiting pods",
        checked="PodsReady False, WorkerNotStarting (as detection, from the start); first step after the correction",
        run_once=_missing_image,
        require=_require_images,
        spares=0,
        spec=f"image: {MISSING_IMAGE}",
        job_per_run=True,
        max_runs=3,
    ),
    Row(
        number=14,
        fault="out of memory",
        injected="a tensor of a petabyte in one rank's step",
        expected="stops with verdict OutOfMemory; no node blamed",
        checked="as row 12",
        run_once=_out_of_memory,
        spares=0,
        spec=TWO_WORKERS,
        job_per_run=True,
        max_runs=5,
    ),
    Row(
        number=33,
        fault="restart storm while caches are filled",
        injected="ranks and standbys killed six times while they start, the token cache empty (CPU compiles nothing)",
        expected="the cache is never half-written: training starts and sees the right samples",
        checked="curve and samples of the first steps",
        run_once=_interrupt_start,
        require=lambda env: env.faults,
        spares=0,
        context=_empty_cache,
        spec=f"{TWO_WORKERS}\ntrainer: {{data: {{cacheDirectory: /cache/{EMPTY_CACHE_NAME}}}}}",
        job_per_run=True,
        max_runs=3,
        kubelet=False,
    ),
    Row(
        number=43,
        fault="budget of process failures exhausted",
        injected=f"SIGKILL of a rank {ALLOWED_CRASHES + 1} times, where {ALLOWED_CRASHES} failures are allowed",
        expected=f"{ALLOWED_CRASHES} restarts in place, then verdict BudgetExhausted; no node blamed",
        checked="history as row 1; condition Failed, its reason and message; no suspected node",
        run_once=_exhaust_budget,
        spec=f"recovery: {{budgets: {{process: {{maxFailures: {ALLOWED_CRASHES}}}}}}}",
        job_per_run=True,
        max_runs=5,
    ),
    Row(
        number=44,
        fault="exit codes with rules of the job",
        injected=f"exit code {AVOID_CODE} of a rank (rule: Host, AvoidNode), then {STOP_CODE} (rule: UserError, Stop)",
        expected="the spare takes the first rank and its node is avoided; the second stops the job",
        checked="history: Host, Spare or Replace, that pod and node; then condition Failed, reason UserError",
        run_once=_apply_rules,
        spares=2,
        spec=(
            f"recovery: {{rules: [{{exitCodes: [{AVOID_CODE}], cause: Host, action: AvoidNode}}, "
            f"{{exitCodes: [{STOP_CODE}], cause: UserError, action: Stop}}]}}"
        ),
        job_per_run=True,
        max_runs=5,
    ),
)
