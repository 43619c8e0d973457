"""Options that several commands of `trainium-trainer` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainium_contract.wire import worker_env

DEFAULT_CONFIG = Path(worker_env.CONFIG_PATH)
ConfigFile = Annotated[
    Path,
    typer.Option(envvar=worker_env.ENV_CONFIG, help="A TrainingJob, or the trainer's own configuration."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override one field of the trainer's configuration; repeatable."),
]
