"""Inject faults that end with a verdict, meet limits and rules of the job, or interrupt a start."""

from __future__ import annotations

import contextlib
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.faults.injections.processes import signal_rank
from tests.testing.suite.timeouts import Deadline
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.faults.environment import FaultEnvironment
    from benchmarks.faults.recovery import Run
    from benchmarks.faults.target import Json, TargetJob

_START_KILLS = 6


def _are_both_workers_running(target: TargetJob) -> bool:
    pods = target.list_pods()
    return len(pods) == 2 and all(pod["status"].get("phase") == "Running" for pod in pods)


def _wait_for_verdict(run: Run, injected_at: float, reason: str, text: str, *, max_restarts: int = 1) -> None:
    """Wait for a verdict with this reason and text, which must blame no node."""
    target, result = run.target, run.result
    status = target.wait_for_phase("Failed", 90)
    result.detection_seconds, result.steps_lost = round(time.time() - injected_at, 3), result.steps_lost or 0
    verdict, actual = status.get("verdict", ""), target.find_condition("Failed").get("reason")
    avoided, total = status.get("avoidedNodes"), status.get("restarts", {}).get("total", 0)
    previous_deviations = len(result.deviations)
    run.expect(actual == reason, f"the verdict is {actual}, expected {reason}")
    run.expect(text in verdict, f"the verdict does not contain {text!r}: {verdict[:200]!r}")
    run.expect(not avoided, f"nodes are suspected: {avoided}")
    result.blame_correct = len(result.deviations) == previous_deviations and result.blame_correct is not False
    run.expect(total <= max_restarts, f"{total} restarts, expected at most {max_restarts}")
    result.note = verdict[:80]


def inject_until_verdict(run: Run, fault: str, reason: str, text: str) -> None:
    """Inject a fault into each step of a random rank, and wait for the verdict."""
    pod = run.rng.choice(run.target.list_members())["podName"]
    _wait_for_verdict(run, run.target.inject(fault, pod, sticky=fault == "nan"), reason, text)


def wait_for_import_error(run: Run) -> None:
    """Wait for the verdict on an entry point whose module does not exist."""
    run.target.wait_for("running workers", lambda: _are_both_workers_running(run.target), 120)
    _wait_for_verdict(run, time.time(), "UserError", "no_such_module", max_restarts=2)


def exhaust_budget(run: Run) -> None:
    """Kill a rank as often as the budget allows, then once more."""
    target = run.target
    allowed = target.manifest["spec"]["recovery"]["budgets"]["process"]["maxFailures"]
    for _ in range(allowed):
        signal_rank(run)
        target.wait_until_stable(3)
    killed_at = target.signal_rank(run.choose_member()["podName"])
    _wait_for_verdict(run, killed_at, "BudgetExhausted", "budgets.process", max_restarts=allowed + 1)
    run.result.recovery_seconds = None


def apply_rules(run: Run) -> None:
    """Exit with a code whose rule avoids the node, then with one whose rule stops the job."""
    target = run.target
    avoid_code, stop_code = (rule["exitCodes"][0] for rule in target.manifest["spec"]["recovery"]["rules"])
    victim = run.choose_member()
    run.measure(partial(target.inject, "exit", victim["podName"], code=avoid_code), victim)
    detection_seconds = run.result.detection_seconds
    nodes = [member["nodeName"] for member in target.list_members()]
    run.expect(victim["nodeName"] not in nodes, f"a rank is on {victim['nodeName']}, which the rule avoids")
    target.wait_until_stable(3)
    target.clear_failures()
    target.inject("exit", run.choose_member()["podName"], code=stop_code)
    _wait_for_verdict(run, time.time(), "UserError", str(stop_code))
    run.result.detection_seconds = detection_seconds


def correct_missing_image(run: Run) -> None:
    """Start with an image that cannot be pulled: expect a condition, no verdict; a corrected image starts the pods."""
    target, image = run.target, run.target.manifest["spec"]["image"]
    applied_at = time.time()

    def find_reason() -> Json:
        condition = target.find_condition("PodsReady")
        return condition if condition.get("reason") == "WorkerNotStarting" else {}

    message = target.wait_for("reason", find_reason, 120).get("message", "")
    run.result.detection_seconds, run.result.steps_lost = round(time.time() - applied_at, 3), 0
    run.result.note = message[:80]
    named = image.rpartition(":")[0] in message
    run.result.blame_correct = run.expect(named, f"the image is not named: {message!r}")
    run.expect(target.read_status().get("phase") != "Failed", "the job was stopped")
    corrected_at = time.time()
    target.patch({"spec": {"image": run.env.cluster.settings["chartValues"]["trainerImage"]}})
    target.wait_for_step(1, 180)
    run.result.recovery_seconds = round(target.read_records()[1]["time"] - corrected_at, 3)


@contextlib.contextmanager
def create_empty_cache(env: FaultEnvironment) -> Iterator[None]:
    """Create an empty folder for tokenized text."""
    folder = env.cluster.shared / "cache" / "empty"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def interrupt_start(run: Run) -> None:
    """Kill ranks while they fill the cache of tokenized text, the only cache of a start on a CPU."""
    env, target = run.env, run.target
    target.wait_for("running workers", lambda: _are_both_workers_running(target), 120)
    kills, deadline = 0, Deadline(60)
    while kills < _START_KILLS and not deadline.is_over():
        time.sleep(run.rng.uniform(0.2, 1.0))
        for pod in target.list_pods():
            # While the pod warms up, the standby process tokenizes.
            for title in ("trainium-rank", "trainium-standby"):
                with contextlib.suppress(ClusterError):
                    env.faults.kill_container(target.namespace, pod["metadata"]["name"], match=title)
                    kills += 1
    last_kill_at = time.time()
    target.wait_for_step(5, 120)
    run.expect(kills > 0, "no process was killed")
    run.expect(not env.check_curve(target, 2), "the curve or the samples differ: the cache is damaged")
    run.result.recovery_seconds = round(target.read_records()[1]["time"] - last_kill_at, 3)
    run.result.steps_lost, run.result.note = 0, f"{kills} kills"
