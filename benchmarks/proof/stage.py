"""Plays trials with real ranks and judges them against an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml
from benchmarks.proof.families import FAMILIES, GLOBAL_BATCH, SAVE_EVERY, STEPS, Layout, Life
from benchmarks.proof.strike import VARIABLE

from trainium_trainer.checkpoint.posix import PosixStorage
from trainium_trainer.checkpoint.storage import Retry
from trainium_trainer.checkpoint.survey import survey, verify
from trainium_trainer.monitor.progress import read_progress

if TYPE_CHECKING:
    from benchmarks.proof.families import Family, Trial

_LIFE_SECONDS = 1200.0
_CLOSE = 1e-5
"""Relative difference of losses at different sizes; sums are taken in another order."""
_KILLED = -9
_NODES_BORNE = 2
"""Nodes that have to be lost before their copies are made anew for a shard to be lost with its copy."""
_WORDS = ("gradient", "loss", "step", "batch", "token", "shard", "rank", "node", "mesh", "state", "tensor", "warm")


@dataclass(slots=True)
class Played:
    """What became of one life."""

    layout: str
    struck: bool
    completed: int
    """Newest step that any rank had completed."""
    resumed: int
    """Step that it went on from."""
    committed: int
    """Newest step committed when it ended; -1 for none."""


@dataclass(slots=True)
class Verdict:
    """The outcome of one trial."""

    seed: int
    family: str
    point: str
    struck: int
    """Ranks that died where they should."""
    lost: list[int] = field(default_factory=list)
    """Steps that each kill cost."""
    lives: list[Played] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Stage:
    """A folder and a forking process; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._text = folder / "text.txt"
        dice = random.Random(0)
        self._text.write_text("".join(" ".join(dice.choices(_WORDS, k=12)) + ".\n" for _ in range(60)))
        self._references: dict[Layout, dict[int, float]] = {}
        self._samples: dict[int, list[int]] = {}

    def __enter__(self) -> Self:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._forge = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.proof.forge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._forge.communicate()
        if not list(self._folder.glob("trial-*")):  # those that failed stay
            shutil.rmtree(self._folder, ignore_errors=True)

    def play(self, trial: Trial) -> Verdict:
        """Play a trial and judge it."""
        folder = self._folder / f"trial-{trial.seed}"
        folder.mkdir()
        verdict = Verdict(trial.seed, trial.family.name, trial.point.value, 0)
        nodes = [folder / f"node-{number}" for number in range(max(life.layout.ranks for life in trial.lives))]
        before: Played | None = None
        lost_nodes = 0
        for number, life in enumerate(trial.lives):
            codes = self._live(folder, trial.family, life, nodes, number)
            played = self._look(folder, life, number, struck=life.victim is not None and codes[life.victim] == _KILLED)
            verdict.lives.append(played)
            verdict.struck += played.struck
            if before is not None:
                in_memory = trial.family.memory and (lost_nodes < _NODES_BORNE or trial.lives[0].layout.is_whole)
                self._judge_loss(before, played, verdict, in_memory=in_memory)
            if played.resumed >= 0:
                lost_nodes = 0
            if life.victim is None:
                if codes != [0] * life.layout.ranks:
                    verdict.wrong.append(f"life {number} ended with {codes}: {self._tail(folder, number)}")
            elif not played.struck:
                if codes != [0] * life.layout.ranks:
                    verdict.wrong.append(f"life {number} was not struck and ended with {codes}")
            elif trial.family.node_is_lost and life.victim is not None:
                shutil.rmtree(nodes[life.victim], ignore_errors=True)
                nodes[life.victim] = folder / f"node-{life.victim}-after-{number}"
                lost_nodes += 1
            elif trial.family.through_nxd and played.committed >= 0:
                self._convert(folder, number, verdict)
            # Where a rank died while it loaded, what counts is the step from before.
            before = played if played.completed >= 0 or before is None else before
        self._judge_end(folder, trial, verdict)
        if not verdict.wrong:
            shutil.rmtree(folder)
        return verdict

    def _live(self, folder: Path, family: Family, life: Life, nodes: list[Path], number: int) -> list[int | None]:
        layout = life.layout
        config = {
            "steps": STEPS,
            "dataParallel": layout.mode.value,
            "parallelism": {"tensor": layout.tp},
            "batch": {"globalSize": GLOBAL_BATCH, "microSize": 1},
            "data": {
                "source": str(self._text),
                "sequenceLength": 32,
                "cacheDirectory": str(self._folder / "cache"),
                "tokenizer": {"vocabSize": 320},
            },
            "model": {"numLayers": 2, "hiddenSize": 32, "intermediateSize": 64},
            "optimizer": {"learningRate": 3e-3},
            "schedule": {"warmupSteps": 2},
            "checkpoint": {
                "path": str(folder / "run"),
                "memory": {"everySteps": 1 if family.memory else 0},
                "durable": {"everySeconds": None, "everySteps": SAVE_EVERY, "keepLast": 2},
            },
            "monitor": {"tensorboard": False, "recordSamples": True},
        }
        file = folder / f"trainer-{number}.yaml"
        file.write_text(yaml.safe_dump(config))
        ranks = []
        for rank in range(layout.ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(layout.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(_free_port()) if rank == 0 else "",
                "TRAINIUM_GENERATION": str(number + 1),
                "TRAINIUM_PROGRESS_FILE": str(folder / f"progress-{number}-{rank}"),
                "TRAINIUM_MEMORY_DIR": str(nodes[rank]),
                VARIABLE: life.strike.to_text() if life.strike is not None and rank == life.victim else "",
            }
            ranks.append({"environment": environment, "log": str(folder / f"log-{number}-{rank}")})
        for entry in ranks[1:]:
            entry["environment"]["MASTER_PORT"] = ranks[0]["environment"]["MASTER_PORT"]
        pids = self._ask(ranks=ranks, argv=["train", "--config", str(file)])["pids"]
        codes: list[int | None] = self._ask(wait=pids, seconds=_LIFE_SECONDS)["codes"]
        return codes

    def _look(self, folder: Path, life: Life, number: int, *, struck: bool) -> Played:
        records = [read_progress(folder / f"progress-{number}-{rank}") for rank in range(life.layout.ranks)]
        known = [record for record in records if record is not None]
        found = survey(PosixStorage(folder / "run"))
        return Played(
            layout=life.layout.name,
            struck=struck,
            completed=max((record.step for record in known), default=-1),
            resumed=max((record.resume_step for record in known), default=-1),
            committed=found.committed[0].step if found.committed else -1,
        )

    def _convert(self, folder: Path, number: int, verdict: Verdict) -> None:
        """The newest checkpoint to NxD's layout and back, into a new root; metrics and records move with it."""
        root, old, tag = folder / "run", folder / f"run-{number}", folder / f"tag-{number}"
        root.rename(old)
        config = ["--config", str(folder / f"trainer-{number}.yaml")]
        for argv in (
            ["convert", "to-nxd", str(old), str(tag), "--tensor", "2", "--zero1", "3", *config],
            ["convert", "from-nxd", str(tag), str(root), *config],
        ):
            pids = self._ask(ranks=[{"environment": {}, "log": str(folder / f"log-{number}-convert")}], argv=argv)
            codes = self._ask(wait=pids["pids"], seconds=_LIFE_SECONDS)["codes"]
            if codes != [0]:
                verdict.wrong.append(f"{' '.join(argv[:2])} ended with {codes}: {self._tail(folder, number)}")
        root.mkdir(exist_ok=True)
        for path in (old / "metrics.jsonl", *old.glob("samples-*.jsonl")):
            shutil.copy(path, root)

    def _judge_loss(self, before: Played, after: Played, verdict: Verdict, *, in_memory: bool) -> None:
        """What the kill that ended `before` cost; `after` may have been killed before it knew its step."""
        if after.resumed < 0 or not before.struck:
            return
        lost = before.completed - after.resumed
        verdict.lost.append(lost)
        allowed = 1 if in_memory else before.completed - max(before.committed, 0)
        if lost > allowed:
            verdict.wrong.append(
                f"{lost} steps lost, {allowed} allowed: {before.completed} completed, {before.committed} committed, "
                f"resumed from {after.resumed}"
            )

    def _judge_end(self, folder: Path, trial: Trial, verdict: Verdict) -> None:
        """The curve, the samples and the checkpoints."""
        root = folder / "run"
        losses = _losses(root)
        sizes = {life.layout for life in trial.lives}
        exact = len(sizes) == 1
        reference = self.reference(next(iter(sizes)) if exact else Layout(1))
        if sorted(losses) != list(range(1, STEPS + 1)):
            verdict.wrong.append(f"metrics.jsonl has the steps {sorted(losses)}")
        for step, loss in losses.items():
            known = reference[step]
            if abs(loss - known) > (0.0 if exact else _CLOSE * abs(known)):
                verdict.wrong.append(f"loss of step {step} is {loss}, in an undisturbed run {known}")
                break
        if _samples(root) != self._samples:
            verdict.wrong.append("not every sample was seen exactly once, in its step")
        storage = PosixStorage(root)
        found = survey(storage)
        broken = [*found.damaged, *(item.folder for item in found.committed if verify(storage, item, Retry()))]
        if broken:
            verdict.wrong.append(f"committed checkpoints are not whole: {broken}")

    def reference(self, layout: Layout) -> dict[int, float]:
        """Losses of an undisturbed run, by step."""
        if layout not in self._references:
            folder = self._folder / f"reference-{len(self._references)}"
            folder.mkdir()
            nodes = [folder / f"node-{number}" for number in range(layout.ranks)]
            codes = self._live(folder, FAMILIES[0], Life(layout, None, None), nodes, 0)
            if codes != [0] * layout.ranks:
                raise RuntimeError(f"the undisturbed run at {layout.name} ended with {codes}: {self._tail(folder, 0)}")
            self._references[layout] = _losses(folder / "run")
            self._samples = self._samples or _samples(folder / "run")
        return self._references[layout]

    def _ask(self, **order: Any) -> dict[str, Any]:
        assert self._forge.stdin is not None
        assert self._forge.stdout is not None
        self._forge.stdin.write(json.dumps(order) + "\n")
        self._forge.stdin.flush()
        answer: dict[str, Any] = json.loads(self._forge.stdout.readline())
        return answer

    @staticmethod
    def _tail(folder: Path, number: int) -> str:
        lines = [path.read_text().splitlines()[-1:] for path in sorted(folder.glob(f"log-{number}-*"))]
        return " | ".join(line for tail in lines for line in tail)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _losses(root: Path) -> dict[int, float]:
    lines = (root / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def _samples(root: Path) -> dict[int, list[int]]:
    """All samples of each step, sorted: a sample that was seen twice is there twice."""
    found: dict[int, list[int]] = {}
    for path in root.glob("samples-*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            found.setdefault(record["step"], []).extend(record["samples"])
    return {step: sorted(samples) for step, samples in sorted(found.items())}
