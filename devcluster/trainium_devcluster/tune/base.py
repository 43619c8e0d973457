"""Train the base model on documentation once, and keep it in the user's cache.

Guarantees:
- A folder of the cache is named by a digest of its configuration and text, appears by one rename when complete, and
  never changes.
- The next run continues an interrupted training.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainium_devcluster.binaries.cache import find_cache_root
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.jobs.metrics import StepLog
from trainium_devcluster.progress import hold_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CONFIGURATION: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("base.yaml").read_text())
_RANKS = 2
_REPORT_INTERVAL_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class BaseFolder:
    """A base model."""

    folder: Path
    """Folder in Hugging Face's format, with the tokenizer."""
    cached: bool
    seconds: float


def open_base_model(texts: Iterable[str], report: Callable[[str], None], *, root: Path | None = None) -> BaseFolder:
    """Return the base model of these texts; train it if it is not cached. Raises ClusterError if that fails."""
    started_at = time.monotonic()
    corpus = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    cache = (find_cache_root() if root is None else root) / "tune"
    folder = cache / f"base-{compute_digest(corpus, CONFIGURATION)}"
    if folder.is_dir():
        return BaseFolder(folder, cached=True, seconds=time.monotonic() - started_at)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_suffix(".lock"), "trains the base model", report):
            if not folder.is_dir():
                _train(folder, corpus, report)
    except OSError as error:
        raise ClusterError(
            f"The base model cannot be kept in {cache} ({error}): free space there, or set TRAINIUM_CACHE to another "
            "folder."
        ) from error
    return BaseFolder(folder, cached=False, seconds=time.monotonic() - started_at)


def compute_digest(corpus: str, configuration: dict[str, Any]) -> str:
    """Return the digest of all inputs of the base model."""
    content = json.dumps(configuration, sort_keys=True) + "\0" + corpus
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _train(folder: Path, corpus: str, report: Callable[[str], None]) -> None:
    work = folder.with_suffix(".partial")
    work.mkdir(exist_ok=True)
    (work / "documentation.jsonl").write_text(corpus)
    config = {
        **CONFIGURATION,
        "data": {
            **CONFIGURATION["data"],
            "source": str(work / "documentation.jsonl"),
            "cacheDirectory": str(work / "cache"),
        },
        "checkpoint": {"path": str(work / "run"), "durable": {"everySteps": 100, "keepLast": 1}},
    }
    (work / "base.yaml").write_text(yaml.safe_dump(config))
    ranks = str(min(_RANKS, len(os.sched_getaffinity(0))))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "-m", "trainium_trainer", "train"]
    report(f"the base model is trained on {len(corpus) / 1e6:.1f} MB of Python's documentation, once")
    _run([*launcher, "--config", str(work / "base.yaml")], work, report)
    shutil.rmtree(work / "model", ignore_errors=True)
    (tokenizer,) = (work / "cache").glob("tokenizer-*")
    export = ["-m", "trainium_trainer", "export", str(work / "run"), str(work / "model")]
    _run([*export, "--tokenizer", str(tokenizer), "--dtype", "float32"], work, report)
    (work / "model").rename(folder)
    shutil.rmtree(work)


def _run(command: list[str], work: Path, report: Callable[[str], None]) -> None:
    """Run a command of the trainer, and report its steps."""
    log, steps = work / "log.txt", StepLog(work / "run" / "metrics.jsonl")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        log.open("w") as output,
        subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, env=environment) as process,
    ):
        try:
            while process.poll() is None:
                try:
                    process.wait(_REPORT_INTERVAL_SECONDS)
                except subprocess.TimeoutExpired:
                    steps.refresh()
                    if steps.newest:
                        loss = steps.list_losses()[steps.newest]
                        report(f"base model: step {steps.newest}/{CONFIGURATION['steps']}, loss {loss:.3f}")
        finally:
            process.terminate()  # without effect after its end
    if process.returncode:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        raise ClusterError(f"The base model could not be trained, see {log}:\n{last}")
