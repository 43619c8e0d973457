"""What the job mounts: the base model, the questions that are trained on, and those that are held out."""

from __future__ import annotations

import json
import pydoc_data.topics
import shutil
from typing import TYPE_CHECKING

from trainium_devcluster.tune.base import base_model
from trainium_devcluster.tune.library import standard_library
from trainium_devcluster.tune.texts import documentation, examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


def prepare(folder: Path, say: Callable[[str], None]) -> None:
    """Fill a folder with all that the job mounts. Raises ClusterError."""
    modules = standard_library()
    base = base_model(documentation(modules, pydoc_data.topics.topics), say)
    shutil.copytree(base.folder, folder / "base")
    made = examples(modules)
    _write(folder / "train.jsonl", made.training)
    _write(folder / "held-out.jsonl", made.held_out)
    origin = "from the cache" if base.cached else f"trained in {base.seconds:.0f} s"
    say(f"base model {origin}; {len(made.training):,} questions to train on, {len(made.held_out):,} are held out")


def _write(file: Path, records: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
