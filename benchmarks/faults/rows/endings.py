"""Rows that end the job with a verdict, and the one in which start-up is cut short again and again."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from typing import TYPE_CHECKING

from benchmarks.faults.record import FaultRun, Findings
from benchmarks.faults.row import EXPECTED_ERRORS, Row, Session
from benchmarks.faults.stage import SkipRowError
from tests.testing.suite.patience import Deadline
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from benchmarks.faults.patient import Json, Patient
    from benchmarks.faults.stage import Stage
    from trainium_devcluster.faults import Faults

SMALL = "workers: {replicas: 2}"
NO_IMAGE = "registry.invalid/no-such-image:1"
STARTS_CUT_SHORT = 6
IMPORT_ERROR = {"TRAINIUM_RANK_ENTRY": "no_such_module:main"}


def _verdicts(
    stage: Stage,
    session: Session,
    name: str,
    inject: Callable[[Patient, random.Random], float] | None,
    reason: str,
    says: str,
    environment: dict[str, str] | None = None,
    *,
    tries: int = 1,
) -> Iterator[FaultRun]:
    """A fresh job for each run: it must end with this verdict, once, and blame no node."""
    for run in session.runs:
        try:
            with stage.job(name, SMALL, environment=environment) as patient:
                if inject is None:
                    # The fault is there from the beginning: its moment is when both workers run.
                    patient.until("running workers", lambda: _all_run(patient), 120)
                    moment = time.time()
                else:
                    patient.settle(3, seconds=120)
                    moment = inject(patient, session.random(run))
                patient.until("a verdict", lambda: patient.status().get("phase") == "Failed", 90)
                yield _judged(patient, run, moment, reason, says, tries)
        except EXPECTED_ERRORS as error:
            yield FaultRun(run=run, wrong=(str(error),))


def _all_run(patient: Patient) -> bool:
    pods = patient.pods()
    return len(pods) == 2 and all(pod["status"].get("phase") == "Running" for pod in pods)


def _judged(patient: Patient, run: int, moment: float, reason: str, says: str, tries: int) -> FaultRun:
    ended = time.time()
    status = patient.status()
    found = Findings()
    failed = patient.condition("Failed")
    blame = found.expect(failed.get("reason") == reason, f"the verdict is {failed.get('reason')}, expected {reason}")
    verdict = status.get("verdict", "")
    blame &= found.expect(says in verdict, f"the verdict does not report {says!r}: {verdict[:200]!r}")
    blame &= found.expect(not status.get("avoidedNodes"), f"nodes are suspected: {status.get('avoidedNodes')}")
    total = status.get("restarts", {}).get("total", 0)
    found.expect(total <= tries, f"it was tried again {total} times, expected at most {tries}")
    return FaultRun(
        run=run,
        detect=round(ended - moment, 3),
        steps_lost=0,
        blame=blame,
        wrong=tuple(found.wrong),
        note=verdict[:80],
    )


def _nan(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def inject(patient: Patient, dice: random.Random) -> float:
        pod = dice.choice(patient.members())["podName"]
        patient.order("nan", pod, sticky=True)
        return patient.obeyed(pod)

    yield from _verdicts(stage, session, "nan", inject, "NumericalError", "nan")


def _import_error(stage: Stage, session: Session) -> Iterator[FaultRun]:
    yield from _verdicts(stage, session, "import", None, "UserError", "no_such_module", IMPORT_ERROR, tries=2)


def _out_of_memory(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def inject(patient: Patient, dice: random.Random) -> float:
        pod = dice.choice(patient.members())["podName"]
        patient.order("oom", pod)
        return patient.obeyed(pod)

    yield from _verdicts(stage, session, "oom", inject, "OutOfMemory", "memory")


def _no_image(stage: Stage, session: Session) -> Iterator[FaultRun]:
    """An image that cannot be pulled is no verdict: it is said, and the corrected one reaches the waiting pods."""
    if stage.local:
        raise SkipRowError("the development cluster pulls no images")
    right = stage.site.settings["chartValues"]["trainerImage"]
    for run in session.runs:
        try:
            with stage.job("image", f"image: {NO_IMAGE}") as patient:
                applied = time.time()
                condition = patient.until("a reason", functools.partial(_not_starting, patient), 120)
                found = Findings()
                told = time.time() - applied
                message = condition.get("message", "")
                blame = found.expect(NO_IMAGE.partition(":")[0] in message, f"the image is not named: {message!r}")
                found.expect(patient.status().get("phase") != "Failed", "the job was stopped")
                moment = time.time()
                patient.patch({"spec": {"image": right}})
                patient.until_step(1, 180)
                first = patient.records()[1]["time"]
                yield FaultRun(
                    run, round(told, 3), round(first - moment, 3), 0, blame, tuple(found.wrong), message[:80]
                )
        except EXPECTED_ERRORS as error:
            yield FaultRun(run=run, wrong=(str(error),))


def _not_starting(patient: Patient) -> Json:
    condition = patient.condition("PodsReady")
    return condition if condition.get("reason") == "WorkerNotStarting" else {}


def _interrupted_starts(stage: Stage, session: Session) -> Iterator[FaultRun]:
    """The only cache that start-up fills on CPU is the tokenised text: kill the ranks while they fill it."""
    faults = stage.faults
    for run in session.runs:
        folder = stage.site.shared / "cache" / f"interrupted-{session.seed}-{time.time_ns() // 1_000_000}"
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        change = f"{SMALL}\ntrainer: {{data: {{cacheDirectory: /cache/{folder.name}}}}}"
        try:
            with stage.job("interrupted", change) as patient:
                yield _interrupt(stage, faults, patient, run, session.random(run))
        except EXPECTED_ERRORS as error:
            yield FaultRun(run=run, wrong=(str(error),))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _interrupt(stage: Stage, faults: Faults, patient: Patient, run: int, dice: random.Random) -> FaultRun:
    patient.until("running workers", lambda: _all_run(patient), 120)
    hits = 0
    deadline = Deadline(60)
    while hits < STARTS_CUT_SHORT and not deadline.is_over():
        time.sleep(dice.uniform(0.2, 1.0))
        for pod in patient.pods():
            # While it warms up, the standby is what tokenises.
            for title in ("trainium-rank", "trainium-standby"):
                with contextlib.suppress(ClusterError):
                    faults.kill_container(patient.job.namespace, pod["metadata"]["name"], match=title)
                    hits += 1
    moment = time.time()
    patient.until_step(5, 120)
    ended = patient.records()[1]["time"]
    found = Findings()
    found.expect(hits > 0, "no process was hit")
    found.expect(not stage.check_curve(patient, 2), "the curve or the samples differ: a cache was poisoned")
    return FaultRun(run, recover=round(ended - moment, 3), steps_lost=0, wrong=tuple(found.wrong), note=f"{hits} kills")


ROWS = (
    Row(
        number=12,
        fault="NaN loss",
        injected="the loss of one rank made NaN, and of every later step",
        expected="stopped with verdict NumericalError; no restart loop, no node blamed",
        judged="condition Failed, its reason and sentence; no suspected node; at most 1 restart",
        play=_nan,
        most=5,
        kubelet=True,
    ),
    Row(
        number=13,
        fault="import error at step 0",
        injected="an entry point whose module does not exist",
        expected="two tries at most, verdict UserError that names the module; no node blamed",
        judged="as row 12; at most 2 restarts. Time counts from when the workers run",
        play=_import_error,
        most=5,
        kubelet=True,
    ),
    Row(
        number=13,
        part="b",
        fault="image that cannot be pulled",
        injected="a job whose image does not exist; corrected once the status reports it",
        expected="status names the image, nothing is stopped; the corrected image reaches the pods that wait",
        judged="PodsReady False, WorkerNotStarting (as detection, from the start); first step after the correction",
        play=_no_image,
        most=3,
        kubelet=True,
    ),
    Row(
        number=14,
        fault="out of memory",
        injected="a tensor of a petabyte in one rank's step",
        expected="stopped with verdict OutOfMemory; no node blamed",
        judged="as row 12",
        play=_out_of_memory,
        most=5,
        kubelet=True,
    ),
    Row(
        number=33,
        fault="restart storm while caches are filled",
        injected="ranks and standbys killed six times while they start, the token cache empty (CPU compiles nothing)",
        expected="the cache is never half-written: training begins and sees the right samples",
        judged="curve and samples of the first steps",
        play=_interrupted_starts,
        most=3,
    ),
)
