"""`kubectl trn`: the command line.

Invariants: results go to standard output, words to the person to standard error; an error is one sentence; exit codes
are kubectl's: 0, or 1 for whatever went wrong.
"""

from __future__ import annotations

import os
import sys

import typer

from trainium_client.commands import act, bundle, inspect, logs, look, report, simulate, ui, watch
from trainium_client.commands.options import close_connections
from trainium_client.errors import ClientError

app = typer.Typer(
    name="kubectl trn",
    help="Look at TrainingJobs and act on them. Needs a kubeconfig and nothing else.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    look.status, watch.watch, look.why, logs.logs, inspect.ranks, inspect.stacks, inspect.checkpoints, look.goodput,
    look.history, look.sizes, inspect.nodes, inspect.release, act.suspend, act.resume, act.scale, act.retry,
):  # fmt: skip
    app.command()(_command)
app.command()(report.report)
app.command()(ui.ui)
app.command(context_settings={"ignore_unknown_options": True})(simulate.simulate)
app.command("support-bundle")(bundle.support_bundle)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    code = 0
    try:
        found = app(arguments, prog_name="kubectl trn", standalone_mode=False)
        sys.stdout.flush()
        code = found if isinstance(found, int) else 0
    except ClientError as error:
        code = _fail(str(error))
    except BrokenPipeError:
        # The reader of our output left; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        # Wrong usage is the parser's own class, which differs between its versions.
        if not hasattr(error, "format_message"):
            raise
        code = _fail(f"{str(error.format_message()).rstrip(chr(46))}; see kubectl trn --help")
    finally:
        close_connections()
    sys.exit(code)


def _fail(sentence: str) -> int:
    sys.stderr.write(f"error: {sentence}\n")
    return 1


if __name__ == "__main__":
    main()
