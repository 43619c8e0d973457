"""`kubectl trn`: the command line.

Guarantees:
- Results go to standard output, messages to the person to standard error.
- An error is one sentence.
- Exit codes are kubectl's: 0, or 1 for any error.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING

import typer

from trainium_client.commands import (
    bundle,
    change,
    import_job,
    inspect,
    logs,
    profile,
    report,
    show,
    simulate,
    ui,
    watch,
)
from trainium_client.commands.options import add_session_options, close_connections
from trainium_contract.api_server.errors import ClientError
from trainium_contract.command_line import describe_usage_error

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "kubectl trn"

app = typer.Typer(
    name=_NAME,
    help="Show TrainingJobs and change them. Needs a kubeconfig and nothing else.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SHOW, _EXPLAIN, _CHANGE, _PLAN = "Show jobs", "Find out why", "Change a job", "Sizes, cost and plans"
_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    _SHOW: (show.list_, show.status, watch.watch, inspect.checkpoints, show.goodput),
    _EXPLAIN: (show.why, show.history, logs.logs, inspect.ranks, inspect.stacks, profile.profile, inspect.nodes),
    _CHANGE: (change.scale, change.suspend, change.resume, change.retry, inspect.release),
    _PLAN: (show.sizes, show.scaling),
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command(_command.__name__.rstrip("_"), rich_help_panel=_panel)(add_session_options(_command))
app.command(rich_help_panel=_SHOW)(add_session_options(ui.ui))
app.command(rich_help_panel=_SHOW)(add_session_options(report.report, output=False))
app.command(context_settings={"ignore_unknown_options": True}, rich_help_panel=_PLAN)(
    add_session_options(simulate.simulate, output=False)
)
app.command("import", rich_help_panel=_PLAN)(import_job.import_)
app.command("support-bundle", rich_help_panel=_EXPLAIN)(add_session_options(bundle.support_bundle))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    code = 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows a question mark
    try:
        result = app(arguments, prog_name=_NAME, standalone_mode=False)
        sys.stdout.flush()
        code = result if isinstance(result, int) else 0
    except ClientError as error:
        code = _fail(str(error))
    except BrokenPipeError:
        code = _discard_output()
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except OSError as error:
        _discard_output()
        code = _fail(f"cannot write the output: {error.strerror or error}")
    except Exception as error:
        sentence = describe_usage_error(error, _NAME)
        if sentence is None:
            raise
        code = _fail(sentence) if sentence else 0
    finally:
        close_connections()
    sys.exit(code)


def _discard_output() -> int:
    """Discard the remaining output, because Python would fail again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _fail(sentence: str) -> int:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {sentence}\n")
        sys.stderr.flush()
    return 1


if __name__ == "__main__":
    main()
