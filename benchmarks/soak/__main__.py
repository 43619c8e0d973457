"""`python -m benchmarks.soak`: play a schedule for hours, look for what is left over, compare with the simulator."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.faults import ROOT
from benchmarks.faults.stage import Stage
from benchmarks.soak.book import Book
from benchmarks.soak.census import Census, take_census
from benchmarks.soak.course import PASS_SECONDS, PLACES, SPEC, Course, course
from benchmarks.soak.curve import losses_of, samples_of, worst_difference, wrong_curve, wrong_samples
from benchmarks.soak.document import print_comparison, write_document
from benchmarks.soak.leaks import growths, wrong_growth, wrong_job_files, wrong_leftovers
from benchmarks.soak.places import KERNEL_LOG, Places
from benchmarks.soak.play import Played, Player
from benchmarks.soak.result import SoakResult
from tests.testing.cluster import sites
from trainium_simulator.virtual.failures import OF_THE_CLUSTER

if TYPE_CHECKING:
    from benchmarks.faults.patient import Patient

HERE = Path(__file__).parent
RESULT = HERE / "results" / "soak.json"
SETTLED_SECONDS = 20.0
"""Since the job's creation, in the schedule, at which all ranks train and a spare is warm: how long that takes in fact
depends on the machine, and is not what is compared."""
BEGIN_SECONDS = 50.0
"""When the first ledger is read: before the first fault."""
CENSUS_SECONDS = 20.0
TIDY_SECONDS = 90.0
"""Until what the job had must be gone."""
_STARTED = time.monotonic()


def say(sentence: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - _STARTED:7.1f} s] {sentence}", flush=True)


def main() -> int:
    """Soak, judge, write; 1 when something is wrong."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster ends with us
    if not options.document_only:
        played = course(options.seed, options.minutes, options.faults_per_hour)
        say(f"{len(played.faults)} faults in {options.minutes:g} minutes, seed {options.seed}")
        sites.NODES = PLACES
        with sites.open_site("local") as site, Stage(site, options.out, say) as stage:
            result = _soak(stage, played)
        result.save(options.result)
    result = SoakResult.load(options.result)
    print_comparison(result)
    if options.document is not None:
        write_document(result, options.document)
        say(f"wrote {options.document}")
    for sentence in result.wrong:
        say(f"WRONG: {sentence}")
    say("nothing is wrong" if not result.wrong else f"{len(result.wrong)} things are wrong")
    return 1 if result.wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=240.0, help="how long the job is hurt (default 240)")
    parser.add_argument("--seed", type=int, default=1, help="chooses faults, places and times")
    parser.add_argument("--faults-per-hour", type=float, default=40.0, help="of nodes and processes (default 40)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "soak", help="folder of what the soak leaves")
    parser.add_argument("--result", type=Path, default=RESULT, help="figures, kept with the code")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "goodput.md", help="where the table goes")
    parser.add_argument("--no-document", dest="document", action="store_const", const=None, help="write no table")
    parser.add_argument("--document-only", action="store_true", help="simulate and write again from --result")
    return parser.parse_args()


def _soak(stage: Stage, played: Course) -> SoakResult:
    time.sleep(5)
    before, commit = take_census(stage, None), _commit()
    looks: list[Census] = []
    environment = {"TRAINIUM_KERNEL_LOG": KERNEL_LOG, "TRAINIUM_FAULTS_PASS_PACE": f"{PASS_SECONDS:g}"}
    with stage.job("soak", json.dumps(SPEC), environment=environment, pace=0.0) as patient:
        book = Book(patient)
        patient.settle(10, 300)
        zero = time.time() - SETTLED_SECONDS
        say("all ranks train and a spare is warm")
        moments, ledgers, player = _play(stage, patient, book, played, zero, looks)
        _wait_for_calm(patient)
        steps = patient.step() - 2
        losses, samples = losses_of(patient.job.folder), samples_of(patient.job.folder)
        hurt = {step: loss for step, loss in losses.items() if step <= steps}
        with suppress(Exception):
            stage.keep_evidence(patient, "soak-end")
        book.close()
        (stage.out / "history.json").write_text(json.dumps(book.history(), indent=1))
    after = _after(stage, before)
    (stage.out / "census.json").write_text(json.dumps([look.document() for look in (before, *looks, after)]))
    say(f"an undisturbed run of {steps} steps, to compare with")
    calm, calm_samples = _undisturbed(stage, steps)
    wrong = [
        *wrong_curve(hurt, calm),
        *wrong_samples(samples, calm_samples, steps),
        *wrong_leftovers(before, after),
        *wrong_growth(looks),
        *wrong_job_files(looks),
        *(
            f"{each.kind} at second {each.planned:.0f} could not be played: {each.error}"
            for each in player.played
            if each.error
        ),
        *player.errors,
        *(f"the job was {phase}" for phase in sorted(book.phases & {"Failed", "Completed"})),
    ]
    return SoakResult(
        seed=played.seed,
        minutes=played.minutes,
        faults_per_hour=played.faults_per_hour,
        commit=commit,
        zero=zero,
        moments=moments,
        ledgers=ledgers,
        history=book.history(),
        played=[asdict(each) for each in player.played],
        silences=_silences(player.played, book, zero),
        pods=[[round(began - zero, 2), ready - began] for began, ready in book.pods.values()],
        returns=[[round(began - zero, 2), round(seconds, 2)] for began, seconds in player.places.returns],
        steps=steps,
        worst_difference=worst_difference(hurt, calm)[0],
        wrong=wrong,
        growth=[asdict(each) for each in growths(looks)],
        before=before.roles(),
        after=after.roles(),
    )


def _play(
    stage: Stage, patient: Patient, book: Book, played: Course, zero: float, looks: list[Census]
) -> tuple[dict[str, float], dict[str, dict[str, object]], Player]:
    places = Places(stage, patient)
    metrics = patient.job.folder / "metrics.jsonl"
    player = Player(played, places, zero=zero, steps_since=lambda: time.time() - metrics.stat().st_mtime, say=say)
    ended = threading.Event()

    def count() -> None:
        while not ended.wait(CENSUS_SECONDS):
            with suppress(OSError):
                looks.append(take_census(stage, patient.job.folder))

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    moments: dict[str, float] = {}
    ledgers: dict[str, dict[str, object]] = {}

    def read(name: str, at: float) -> None:
        time.sleep(max(0.0, zero + at - time.time()))
        ledgers[name] = book.ledger()
        moments[name] = round(time.time() - zero, 2)

    readers = [
        threading.Thread(target=read, args=(name, at), daemon=True)
        for name, at in (("begin", BEGIN_SECONDS), ("half", played.half), ("end", played.seconds))
    ]
    for reader in readers:
        reader.start()
    player.play(played.seconds)
    for reader in readers:
        reader.join(60)
    ended.set()
    counting.join(60)
    player.finish()
    return moments, ledgers, player


def _silences(played: list[Played], book: Book, zero: float) -> dict[str, list[list[float]]]:
    """How long nobody was told of a step after an API server was back, and after an operator was lost."""
    found: dict[str, list[list[float]]] = {}
    for each in played:
        if each.kind in OF_THE_CLUSTER:
            since = zero + each.over
            silence = book.silence_after(since)
            if silence is not None:
                found.setdefault(each.kind, []).append([round(each.over, 2), round(silence, 2)])
    return found


def _wait_for_calm(patient: Patient) -> None:
    """Until the job trains at its full size once more, as a person would see it recover from all that."""

    def calm() -> bool:
        status = patient.status()
        return status.get("phase") == "Running" and status["membership"]["size"] == status.get("desired")

    patient.until("the full size, after all faults", calm, 180)
    begun = patient.step()
    patient.until_step(begun + 5, 60)


def _after(stage: Stage, before: Census) -> Census:
    """A census once everything of the job is gone, or should be."""
    deadline = time.monotonic() + TIDY_SECONDS
    while True:
        after = take_census(stage, None)
        if not list(wrong_leftovers(before, after)) or time.monotonic() > deadline:
            return after
        time.sleep(3)


def _undisturbed(stage: Stage, steps: int) -> tuple[dict[int, float], dict[int, list[int]]]:
    """Losses and samples of the same job, left alone, as fast as it can."""
    with stage.job("calm", json.dumps(SPEC), pace=0.0) as patient:
        patient.until_step(steps + 3, 120 + steps)
        return losses_of(patient.job.folder), samples_of(patient.job.folder)


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
