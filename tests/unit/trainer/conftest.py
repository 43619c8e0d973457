"""Text, configurations and forked ranks for the trainer's tests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

TIMEOUT = 120.0
"""Seconds for what real processes do, the first of which also import torch."""
_WORDS = ("gradient", "loss", "step", "batch", "token", "shard", "rank", "node", "mesh", "state", "tensor", "warm")


@dataclass
class Job:
    """Ranks of one started command line."""

    forge: Forge
    pids: list[int]
    folder: Path
    logs: Path

    def wait(self, seconds: float = TIMEOUT) -> list[int | None]:
        return self.forge.ask(wait=self.pids, seconds=seconds)["codes"]

    def finish(self, seconds: float = TIMEOUT) -> Job:
        """Wait until all ranks have trained to the end."""
        assert self.wait(seconds) == [0] * len(self.pids), "\n".join(self.log(rank) for rank in range(len(self.pids)))
        return self

    def leave(self, rank: int = 0, *, step: int = 1) -> Job:
        """Ask one rank to leave after a step, and wait until all have left."""
        self.wait_for_step(step)
        os.kill(self.pids[rank], signal.SIGTERM)
        assert self.wait() == [75] * len(self.pids), self.log()
        return self

    def wait_for(self, rank: int, seconds: float = TIMEOUT) -> int | None:
        """The exit code of one rank; the others may go on."""
        (code,) = self.forge.ask(wait=[self.pids.pop(rank)], seconds=seconds)["codes"]
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
        """Step -> the samples that all ranks recorded for it."""
        found: dict[int, list[int]] = {}
        for path in self.folder.glob("samples-*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                found.setdefault(record["step"], []).extend(record["samples"])
        return {step: sorted(samples) for step, samples in found.items()}

    def weights(self) -> dict[str, Tensor]:
        """The weights in the newest checkpoint."""
        from trainium_trainer.checkpoint.format.contents import Contents
        from trainium_trainer.checkpoint.root.selection import choose
        from trainium_trainer.storage.opening import open_storage
        from trainium_trainer.storage.protocol import Retry

        storage = open_storage(str(self.folder))
        contents = Contents(storage, choose(storage, str(self.folder), None, milestones=False), Retry())
        return {name: contents.read(name) for name in contents.tensors if name.startswith("model.")}

    def assert_same_curve(self, other: Job) -> None:
        """Compare with the curve of a run of another layout: equal but for the order of sums."""
        metrics, expected = self.metrics(), other.metrics()
        assert [line["tokens"] for line in metrics] == [line["tokens"] for line in expected]
        for key, rel in {"loss": 1e-5, "gradNorm": 1e-3, "validationLoss": 1e-5, "parameterNorm": 1e-5}.items():
            wanted = {line["step"]: line[key] for line in expected if key in line}
            assert {line["step"]: line[key] for line in metrics if key in line} == pytest.approx(wanted, rel=rel), key

    def wait_for_step(self, step: int, seconds: float = TIMEOUT) -> None:
        deadline = time.monotonic() + seconds
        while not self.metrics() or self.metrics()[-1]["step"] < step:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)


class Forge:
    """The forking process of `forge.py`."""

    def __init__(self, scratch: Path) -> None:
        """`scratch` is what ranks take for the folder of temporary files."""
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forge.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(scratch)},
        )
        self._asked = 0

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked += 1
        self._process.stdin.write(json.dumps({"number": self._asked, **order}) + "\n")
        self._process.stdin.flush()
        while True:
            answer = json.loads(self._process.stdout.readline())
            if answer["number"] == self._asked:  # others are for tests that were cut off before they had theirs
                return answer

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    process = Forge(tmp_path_factory.mktemp("scratch"))
    yield process
    process.close()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    choose = random.Random(0)
    lines = [" ".join(choose.choices(_WORDS, k=12)) + ".\n" for _ in range(38)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="session")
def documents(text_file: Path) -> Path:
    """The lines of the text, each a separate document."""
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
    """Starts ranks whose files are below a folder."""

    def __init__(self, forge: Forge, config: dict[str, Any], folder: Path) -> None:
        self._forge = forge
        self._folder = folder
        self._file = folder / "trainer.yaml"
        self._file.write_text(yaml.safe_dump(config))

    def __call__(
        self, ranks: int, name: str, overrides: Sequence[str] | None = None, *, memory: bool = False, **env: str
    ) -> Job:
        """`launch(2, "dp2", ["steps=3"], memory=True)`; the same name again resumes."""
        folder = self._folder / name
        logs = self._folder / f"{name}-logs"
        logs.mkdir(exist_ok=True)
        argv = ["train", "--config", str(self._file), "--set", f"checkpoint.path={folder}"]
        for override in overrides or ():
            argv += ["--set", override]
        if memory:
            env = {"TRAINIUM_MEMORY_DIR": str(self._folder / f"{name}-memory")} | env
        pids = self._forge.ask(ranks=ranks, argv=argv, environment=env, logs=str(logs))["pids"]
        return Job(self._forge, pids, folder, logs)


@pytest.fixture
def launch(forge: Forge, base_config: dict[str, Any], tmp_path: Path) -> Launcher:
    """Start ranks for one test."""
    return Launcher(forge, base_config, tmp_path)


class Undisturbed:
    """Runs that nobody disturbs, to hold others to; each is made once for all tests, which leave its files alone."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._known: dict[tuple[int, tuple[str, ...]], Job] = {}

    def __call__(self, ranks: int, overrides: Sequence[str] = ()) -> Job:
        """The run of so many ranks with these settings, after its end."""
        asked = (ranks, tuple(overrides))
        if asked not in self._known:
            self._known[asked] = self._launch(ranks, f"run-{len(self._known)}", overrides).finish()
        return self._known[asked]


@pytest.fixture(scope="session")
def undisturbed(forge: Forge, base_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run that others are compared with."""
    return Undisturbed(Launcher(forge, base_config, tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A Hugging Face folder of the model that `base_config` describes, with a tokenizer of its text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainium_trainer.data.tokens.tokenizer import train_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer([iter([text_file.read_text()])], 320).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def world_of_one() -> Iterator[Any]:
    """A process group of this process alone."""
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
