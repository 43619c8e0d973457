"""Handle the arguments of `trainium-trainer`, and turn any exception into an exit code.

Guarantees:
- Importing this module reads no environment variable and does not import torch.
- `run` may be called in a process that `warm` prepared before its rank was known.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, NoReturn

import typer

from trainium_contract.command_line import describe_usage_error
from trainium_contract.exit_codes import ExitCode
from trainium_contract.temporary_folder import set_temporary_folder
from trainium_contract.wire.log_format import choose_log_format
from trainium_contract.worker_process import log_lines
from trainium_contract.worker_process.open_files import raise_limit
from trainium_trainer import exits, neuron_environment
from trainium_trainer.backends.choose import refuse_unsupported
from trainium_trainer.commands import artifacts, check, convert, evaluate
from trainium_trainer.commands.generate import generate
from trainium_trainer.commands.inspect import inspect
from trainium_trainer.commands.options import DEFAULT_CONFIG, ConfigFile, Overrides
from trainium_trainer.commands.precompile import precompile
from trainium_trainer.commands.prepare_data import prepare_data
from trainium_trainer.commands.profile import profile
from trainium_trainer.commands.show_data import show_data
from trainium_trainer.compile import graphs
from trainium_trainer.configuration.config import load, read_launch, resolve_settings
from trainium_trainer.loop.profile import capture_folder
from trainium_trainer.loop.stop import StopRequest
from trainium_trainer.monitor.plot import plot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NAME = "trainium-trainer"
_LOWEST_PRIORITY = 19

app = typer.Typer(
    name=_NAME,
    help="Train language models; started by the agent of a worker pod, by torchrun, or by hand.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _commands() -> None:
    """Train language models."""


@app.command()
def train(
    config: ConfigFile = DEFAULT_CONFIG,
    overrides: Overrides = None,
) -> None:
    """Train from a configuration file; run it under torchrun for more than one process."""
    graphs.refuse_extraction()
    raise_limit()
    stop = StopRequest()
    stop.listen()
    try:
        choose_log_format(os.environ)
    except ValueError as error:
        raise exits.UserError(str(error)) from error
    launch = read_launch()
    with exits.retry_files_on_restart(restarted=launch.is_restart):
        settings = resolve_settings(load(config, overrides or ()), launch)
        refuse_unsupported(settings)
        log_lines.configure_rank_logging(launch.rank)
        check.refuse_few_files(launch)
        if launch.rank == 0:
            for warning in check.find_absent_ranks(settings):
                logging.getLogger("trainium.config").warning("%s", warning)
        # Before a device library is imported.
        neuron_environment.apply(settings.config, capture=capture_folder(settings))
        graphs.fill_local_cache(settings)
        from trainium_trainer.loop.train import train as train_now  # noqa: PLC0415 - torch, for a valid configuration

        code = train_now(settings, stop)
    raise typer.Exit(code)


_convert = typer.Typer(name="convert", help="Convert checkpoints from and to NxD's own layout.", no_args_is_help=True)
_convert.command("from-nxd")(convert.from_nxd)
_convert.command("to-nxd")(convert.to_nxd)
app.command()(inspect)
app.add_typer(_convert)
for _command in (
    artifacts.export,
    artifacts.merge,
    artifacts.fetch_model,
    generate,
    evaluate.evaluate,
    check.check,
    prepare_data,
    show_data,
    plot,
    profile,
    precompile,
):
    app.command()(_command)


@functools.cache
def build_parser() -> Callable[..., object]:
    """Build the parser of all commands, once: it takes a fifth of the start of a rank that `warm` prepared."""
    return typer.main.get_command(app)


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; every error is reported, none is raised."""
    try:
        result = build_parser()(list(argv) if argv is not None else None, prog_name=_NAME, standalone_mode=False)
    except BaseException as error:  # noqa: BLE001 - this is the place that turns every error into a code
        sentence = describe_usage_error(error, _NAME)
        if sentence == "":
            return ExitCode.FINISHED
        return exits.report(error if sentence is None else exits.UserError(sentence))
    return result if isinstance(result, int) else ExitCode.FINISHED


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and end the process with its exit code."""
    set_temporary_folder(os.environ)
    exits.leave(run(argv))


def precompile_in_background(argv: Sequence[str]) -> NoReturn:
    """Run `precompile` at the lowest priority, for the agent of an idle spare."""
    os.nice(_LOWEST_PRIORITY)
    main(["precompile", *argv])
