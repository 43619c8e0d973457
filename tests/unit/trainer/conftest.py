"""Text, configurations and forked ranks for the tests of the trainer."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from tests.testing.suite.timeouts import until

TIMEOUT = 120.0
"""Seconds for real processes; the first ones also wait for the imports."""
BASE_FIELDS: dict[str, Any] = {
    "vocab_size": 320,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""Fields of a base with the shape of `base_config`, beside those of `save_base`."""
RANK_SERVER = Path(__file__).with_name("rank_server.py")
_WORDS = ("gradient", "loss", "step", "batch", "token", "shard", "rank", "node", "mesh", "state", "tensor", "warm")


class RankServer:
    """The process of `rank_server.py`, which forks ranks."""

    def __init__(self, scratch: Path, script: Path = RANK_SERVER) -> None:
        """Start the process; `scratch` is the folder for temporary files of its ranks."""
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(scratch)},
        )
        self._requests = 0

    def request(self, **message: Any) -> dict[str, Any]:
        self._requests += 1
        self._process.stdin.write(json.dumps({"number": self._requests, **message}) + "\n")
        self._process.stdin.flush()
        while True:
            answer = json.loads(self._process.stdout.readline())
            if answer["number"] == self._requests:  # other answers are for tests that timed out
                return answer

    def close(self) -> None:
        self._process.communicate()


@dataclass
class Job:
    """Ranks of one started command line."""

    server: RankServer
    pids: list[int]
    folder: Path
    logs: Path

    def wait(self, seconds: float = TIMEOUT) -> list[int | None]:
        return self.server.request(wait=self.pids, seconds=seconds)["codes"]

    def finish(self, seconds: float = TIMEOUT) -> Self:
        """Wait until all ranks have trained to the end."""
        assert self.wait(seconds) == [0] * len(self.pids), "\n".join(self.log(rank) for rank in range(len(self.pids)))
        return self

    def request_exit(self, rank: int = 0, *, step: int = 1) -> Self:
        """Send SIGTERM to one rank after a step, and wait until all ranks have exited."""
        self.wait_for_step(step)
        os.kill(self.pids[rank], signal.SIGTERM)
        return self.wait_for_exit()

    def wait_for_exit(self) -> Self:
        """Wait until all ranks have exited with 75 before the last step."""
        assert self.wait() == [75] * len(self.pids), self.log()
        return self

    def wait_for_rank(self, rank: int, seconds: float = TIMEOUT) -> int | None:
        """Return the exit code of one rank; the others may continue."""
        (code,) = self.server.request(wait=[self.pids.pop(rank)], seconds=seconds)["codes"]
        return code

    def log(self, rank: int = 0) -> str:
        return (self.logs / f"rank-{rank}.log").read_text()

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics()]

    def samples(self) -> dict[int, list[int]]:
        """Return the samples that all ranks recorded, by step."""
        samples_by_step: dict[int, list[int]] = {}
        for path in self.folder.glob("samples-*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                samples_by_step.setdefault(record["step"], []).extend(record["samples"])
        return {step: sorted(samples) for step, samples in samples_by_step.items()}

    def weights(self) -> dict[str, Any]:
        """Return the tensors of the weights in the newest checkpoint."""
        from trainium_trainer.checkpoint.format.reader import CheckpointReader
        from trainium_trainer.checkpoint.root.selection import choose_checkpoint
        from trainium_trainer.storage import open_storage
        from trainium_trainer.storage.protocol import Retry

        storage = open_storage(str(self.folder))
        checkpoint = choose_checkpoint(storage, str(self.folder), None, milestones=False)
        reader = CheckpointReader(storage, checkpoint, Retry())
        return {name: reader.read(name) for name in reader.tensors if name.startswith("model.")}

    def assert_same_curve(self, other: Self) -> None:
        """Compare with the curve of a run of another layout, which is equal except for the order of sums."""
        metrics, expected = self.metrics(), other.metrics()
        assert [line["tokens"] for line in metrics] == [line["tokens"] for line in expected]
        for key, rel in {"loss": 1e-5, "gradNorm": 1e-3, "validationLoss": 1e-5, "parameterNorm": 1e-5}.items():
            expected_values = {line["step"]: line[key] for line in expected if key in line}
            values = {line["step"]: line[key] for line in metrics if key in line}
            assert values == pytest.approx(expected_values, rel=rel), key

    def wait_for_step(self, step: int, seconds: float = TIMEOUT) -> None:
        until(lambda: any(line["step"] >= step for line in self.metrics()[-1:]), self.log, seconds, pause=0.02)


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    server = RankServer(tmp_path_factory.mktemp("scratch"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    lines = [" ".join(rng.choices(_WORDS, k=12)) + ".\n" for _ in range(38)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="session")
def documents(text_file: Path) -> Path:
    """Return a file with the lines of the text, each a separate document."""
    path = text_file.with_name("documents.jsonl")
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in text_file.read_text().splitlines()))
    return path


@pytest.fixture(scope="session")
def base_config(text_file: Path) -> dict[str, Any]:
    return {
        "steps": 6,
        "batch": {"globalSize": 8, "microSize": 2},
        "data": {
            "source": str(text_file),
            "sequenceLength": 32,
            "cacheDirectory": str(text_file.parent / "cache"),
            "tokenizer": {"vocabSize": 320},
        },
        "model": {"numLayers": 2, "hiddenSize": 32, "intermediateSize": 64},
        "optimizer": {"learningRate": 3e-3},
        "schedule": {"warmupSteps": 2},
        "checkpoint": {"durable": {"everySeconds": None}},
        "monitor": {"tensorboard": False, "parameterNormSteps": 2},
    }


class Launcher:
    """Start ranks whose files are below a folder."""

    def __init__(self, rank_server: RankServer, config: dict[str, Any], folder: Path) -> None:
        self._server = rank_server
        self._folder = folder
        self._file = folder / "trainer.yaml"
        self._file.write_text(yaml.safe_dump(config))

    def __call__(
        self,
        ranks: int,
        name: str,
        overrides: Sequence[str] = (),
        *,
        last_rank: Sequence[str] = (),
        memory: bool = False,
        exit_step: int | None = None,
        **env: str,
    ) -> Job:
        """`launch(2, "dp2", ["steps=3"], memory=True)`; the same name again resumes.

        `last_rank`: overrides of the last rank only. `exit_step`: rank 0 gets SIGTERM during this step, so all
        ranks exit after the next one on any machine.
        """
        folder = self._folder / name
        logs = self._folder / f"{name}-logs"
        logs.mkdir(exist_ok=True)
        file = self._file
        if any(override.startswith("epochs=") for override in overrides):  # `steps` has no effect beside it
            config = yaml.safe_load(self._file.read_text())
            config.pop("steps", None)
            file = self._folder / "epochs.yaml"
            file.write_text(yaml.safe_dump(config))
        argv = ["train", "--config", str(file), "--set", f"checkpoint.path={folder}"]
        argv += [part for override in overrides for part in ("--set", override)]
        last = [part for override in last_rank for part in ("--set", override)]
        if exit_step is not None:
            env["TEST_EXIT_STEP"] = str(exit_step)
        if memory:
            env = {"TRAINIUM_MEMORY_DIR": str(self._folder / f"{name}-memory")} | env
        pids = self._server.request(ranks=ranks, argv=argv, last=last, environment=env, logs=str(logs))["pids"]
        return Job(self._server, pids, folder, logs)


@pytest.fixture
def launch(rank_server: RankServer, base_config: dict[str, Any], tmp_path: Path) -> Launcher:
    """Start ranks for one test."""
    return Launcher(rank_server, base_config, tmp_path)


class ReferenceRuns:
    """Uninterrupted runs to compare with; each runs once for all tests, which must not change its files."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._finished: dict[tuple[int, tuple[str, ...]], Job] = {}

    def __call__(self, ranks: int, overrides: Sequence[str] = ()) -> Job:
        """Return the finished run with this number of ranks and these overrides."""
        key = (ranks, tuple(overrides))
        if key not in self._finished:
            self._finished[key] = self._launch(ranks, f"run-{len(self._finished)}", overrides).finish()
        return self._finished[key]


@pytest.fixture(scope="session")
def reference_run(
    rank_server: RankServer, base_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> ReferenceRuns:
    """Return an uninterrupted run to compare with: `reference_run(1, ["steps=4"])`."""
    return ReferenceRuns(Launcher(rank_server, base_config, tmp_path_factory.mktemp("reference")))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """Save a Hugging Face folder of the model that `base_config` describes, with a tokenizer of its text."""
    from tests.testing.trainer.base_models import save_base
    from trainium_trainer.data.tokens.encoding import train_tokenizer

    folder = tmp_path_factory.mktemp("base")
    save_base(folder, **BASE_FIELDS)
    train_tokenizer([iter([text_file.read_text()])], 320).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def single_rank_group() -> Iterator[Any]:
    """Create a process group of this process only."""
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
