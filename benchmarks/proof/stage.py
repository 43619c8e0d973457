"""Plays trials with real ranks and judges them against an undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from benchmarks.proof import leavings
from benchmarks.proof.families import Layout, Life
from benchmarks.proof.judge import Played, Reference, Verdict, judge_end, judge_loss, judge_milestones, judge_told
from benchmarks.proof.material import Material
from benchmarks.proof.strike import VARIABLE
from benchmarks.proof.strike_after import ARTIFACTS
from trainium_devcluster.ports import reserved_port
from trainium_trainer.checkpoint.root.survey import survey
from trainium_trainer.checkpoint.storage.posix import PosixStorage
from trainium_trainer.monitor.progress import read_progress

if TYPE_CHECKING:
    from benchmarks.proof.families import Family, Suite, Trial

_LIFE_SECONDS = 1200.0
_KILLED = -9
_NODES_BORNE = 2
"""Nodes that have to be lost before their copies are made anew for a shard to be lost with its copy."""
_TUNING = (
    "trainium_trainer.loop.after_training",
    "trainium_trainer.evaluate.stage",
    "transformers.models.llama.modeling_llama",
)
"""Imported once, by the process that forks."""


class Stage:
    """A folder and a forking process; a context manager."""

    def __init__(self, folder: Path, suite: Suite) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._suite = suite
        self._material = Material(folder, suite)
        self._references: dict[Layout, Reference] = {}

    def __enter__(self) -> Self:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._forge = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.proof.forge", *(_TUNING if self._suite.tunes else ())],
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
        verdict = Verdict(trial.seed, trial.family.name)
        nodes = [folder / f"node-{number}" for number in range(max(life.layout.ranks for life in trial.lives))]
        before: Played | None = None
        point, lost_nodes = "", 0
        settled: dict[Path, int] = {}
        for number, life in enumerate(trial.lives):
            codes = self._live(folder, trial.family, life, nodes, number)
            played = self._look(folder, life, number, struck=life.victim is not None and codes[life.victim] == _KILLED)
            verdict.lives.append(played)
            if before is not None:
                in_memory = trial.family.memory and (lost_nodes < _NODES_BORNE or trial.lives[0].layout.is_whole)
                allowed = 1 if in_memory else before.completed - max(before.committed, 0)
                # While artifacts of a milestone are written, steps go on.
                follows = verdict.lives[-2].struck and trial.lives[number - 1].follows_training
                follows = follows and not trial.family.milestones
                judge_loss(before, played, point, verdict, allowed=0 if follows else allowed)
            if played.resumed >= 0:
                lost_nodes = 0
            self._judge_codes(folder, life, number, codes, verdict)
            if self._suite.tunes:
                self._judge_artifacts(folder, settled, verdict)
            if played.struck:
                point = played.point
                if trial.family.node_is_lost and life.victim is not None:
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

    def _judge_codes(self, folder: Path, life: Life, number: int, codes: list[int | None], verdict: Verdict) -> None:
        """A life that was not struck ends well; in others, ranks that wait for the dead one are counted."""
        if not verdict.lives[-1].struck:
            if codes != [0] * life.layout.ranks:
                verdict.wrong.append(f"life {number} ended with {codes}: {self._tail(folder, number)}")
        else:
            verdict.waited += codes.count(None)

    def _judge_artifacts(self, folder: Path, settled: dict[Path, int], verdict: Verdict) -> None:
        """Nothing half-written looks complete, what was whole is not written again; `settled` is kept up to date."""
        for step in sorted((folder / "run" / ARTIFACTS).glob("step-*")):
            if wrong := leavings.half_written(step):
                verdict.wrong += [f"{step.name}: {each}" for each in wrong]
                continue
            now = leavings.settled(step)
            again = [str(path) for path, at in settled.items() if path.is_relative_to(step) and now.get(path) != at]
            if again:
                verdict.wrong.append(f"whole and yet written again: {again}")
            settled.update(now)

    def _judge_end(self, folder: Path, trial: Trial, verdict: Verdict) -> None:
        sizes = stepped(trial, verdict)
        exact = len(sizes) == 1
        layout = next(iter(sizes)) if exact else Layout(1)
        judge_end(folder / "run", verdict, self.reference(layout), self._suite, exact=exact)
        if self._suite.tunes:
            progress = folder / f"progress-{len(trial.lives) - 1}-0"
            judge_told(folder / "run", progress, verdict, self._suite)
            judge_milestones(folder / "run", verdict)

    def _live(self, folder: Path, family: Family, life: Life, nodes: list[Path], number: int) -> list[int | None]:
        layout = life.layout
        config = self._material.config(family, layout, folder / "run")
        file = folder / f"trainer-{number}.yaml"
        file.write_text(yaml.safe_dump(config))
        first_port = str(reserved_port())
        ranks = []
        for rank in range(layout.ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(layout.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": first_port,
                "TRAINIUM_GENERATION": str(number + 1),
                "TRAINIUM_PROGRESS_FILE": str(folder / f"progress-{number}-{rank}"),
                "TRAINIUM_MEMORY_DIR": str(nodes[rank]),
                VARIABLE: life.strike.to_text() if life.strike is not None and rank == life.victim else "",
            }
            ranks.append({"environment": environment, "log": str(folder / f"log-{number}-{rank}")})
        pids = self._ask(ranks=ranks, argv=["train", "--config", str(file)])["pids"]
        codes: list[int | None] = self._ask(wait=pids, seconds=_LIFE_SECONDS)["codes"]
        return codes

    def _look(self, folder: Path, life: Life, number: int, *, struck: bool) -> Played:
        records = [read_progress(folder / f"progress-{number}-{rank}") for rank in range(life.layout.ranks)]
        known = [record for record in records if record is not None]
        found = survey(PosixStorage(folder / "run"))
        return Played(
            layout=life.layout.name,
            point=life.strike.point.value if life.strike is not None else "",
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

    def reference(self, layout: Layout) -> Reference:
        """What an undisturbed run leaves."""
        if layout not in self._references:
            folder = self._folder / f"reference-{len(self._references)}"
            folder.mkdir()
            nodes = [folder / f"node-{number}" for number in range(layout.ranks)]
            codes = self._live(folder, self._suite.families[0], Life(layout, None, None), nodes, 0)
            if codes != [0] * layout.ranks:
                raise RuntimeError(f"the undisturbed run at {layout.name} ended with {codes}: {self._tail(folder, 0)}")
            self._references[layout] = Reference.read(folder / "run", self._suite)
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


def stepped(trial: Trial, verdict: Verdict) -> set[Layout]:
    """The layouts that steps of the history may have been made in."""
    found = set()
    for number, (life, played) in enumerate(zip(trial.lives, verdict.lives, strict=True)):
        later = [each.resumed for each in verdict.lives[number + 1 :] if each.resumed >= 0]
        if played.resumed >= 0 and max([played.completed, *later[:1]]) > played.resumed:
            found.add(life.layout)
    return found
