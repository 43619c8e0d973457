"""Find the Python program that a command starts, and run it in a process that has imported its modules.

Recognized are `python x.py`, `python -m x`, a script whose first line names Python (`torchrun`, `accelerate`), and a
shell that ends with one of them: `sh -c '...; exec python x.py'`. The module also runs in the interpreter of a
program's image, so it imports only the standard library, and needs Python 3.10.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

USER_ERROR = 64
"""A value of `ExitCode`."""
SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
_EXEC_PYTHON = re.compile(r"(?<![\w-])exec\s+(?P<python>[\w./-]*?python[0-9.]*)(?=\s)")
_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
_SHEBANG = re.compile(rb"#!\s*(?:\S*/env\s+(?:-S\s+)?)?(?P<python>\S*python[0-9.]*)\s")
_SHEBANG_BYTES = 512
_AGENT_FILES = (__file__, runpy.__file__, "<frozen runpy>")
"""Files of the frames that stand before those of the program."""
_LAUNCHERS = frozenset(
    (
        "accelerate",
        "accelerate.commands.accelerate_cli",
        "accelerate.commands.launch",
        "deepspeed",
        "torch.distributed.launch",
        "torch.distributed.run",
        "torchrun",
    )
)
_VALUED_OPTIONS = ("-X", "-W")
_ENV_SHELL = "TRAINIUM_SHELL_PID"
_REPORT_START = """\
import json, os, sys
if os.environ.pop({variable!r}, "") != str(os.getpid()):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
start = [sys.prefix, sys.executable, sys.argv[1:], os.getcwd(), dict(os.environ)]
with open({path!r}, "w", encoding="utf-8", errors="surrogateescape") as file:
    json.dump(start, file)
"""


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command that starts Python."""

    interpreter: str
    """Path, or name in PATH."""
    arguments: tuple[str, ...]
    """Arguments of the interpreter; for a shell as written, without expansions, and possibly incomplete."""
    shell_text: int | None = None
    """Index in the command of the text that a shell runs first; None without a shell."""


def find_python(command: Sequence[str]) -> PythonCommand | None:
    """Return the Python program that a command starts, or None if it is another program or cannot be found."""
    first, *rest = command
    if _PYTHON.fullmatch(first):
        return PythonCommand(shutil.which(first) or first, (*rest,))
    if Path(first).name in SHELLS:
        return _find_in_shell(command)
    script = shutil.which(first)
    with contextlib.suppress(OSError):
        if script is not None:
            with Path(script).open("rb") as file:
                shebang = _SHEBANG.match(file.read(_SHEBANG_BYTES))
            if shebang:
                name = os.fsdecode(shebang["python"])
                return PythonCommand(shutil.which(name) or name, (script, *rest))
    return None


def is_launcher(python: PythonCommand) -> bool:
    """Return whether a command starts ranks itself, which meet at a port that it serves."""
    first, *rest = [*split_options(python.arguments), ""]
    return (rest[0] if first == "-m" else Path(first).name) in _LAUNCHERS


def _find_in_shell(command: Sequence[str]) -> PythonCommand | None:
    options = [number for number, word in enumerate(command) if re.fullmatch(r"-[A-Za-z]*c", word)]
    if not options or len(command) <= options[0] + 1:
        return None
    text = command[options[0] + 1]
    matches = [*_EXEC_PYTHON.finditer(text)]
    if not matches:
        return None
    name = matches[-1]["python"]
    try:
        words = shlex.split(text[matches[-1].end() :])
    except ValueError:
        words = []
    return PythonCommand(shutil.which(name) or name, (*words,), options[0] + 1)


def run_command(command: Sequence[str]) -> None:
    """Run a command that `find_python` recognizes in this process, or execute it if another interpreter is needed."""
    python = find_python(command)
    if python is None:
        os.execvp(command[0], [*command])  # noqa: S606 - the job's command, without a shell
    arguments = [*python.arguments]
    if python.shell_text is not None:
        arguments = _run_shell(command, python.shell_text)
    run_python(arguments)


def _run_shell(command: Sequence[str], index: int) -> list[str]:
    """Run a shell up to its `exec python`; adopt that start's environment and folder and return its arguments.

    Exits as the shell does if it does not come to that line.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, start = Path(folder, "report.py"), Path(folder, "start")
        report.write_text(_REPORT_START.format(variable=_ENV_SHELL, path=str(start)), encoding="utf-8")
        words = [*command]
        words[index] = _EXEC_PYTHON.sub(lambda match: f"{match[0]} -I {shlex.quote(str(report))}", words[index])
        pid = os.fork()
        if pid == 0:
            os.environ[_ENV_SHELL] = str(os.getpid())
            try:
                os.execvp(words[0], words)  # noqa: S606 - as above
            except OSError as error:
                exit_with_error(f"program.command {words[0]} cannot be executed ({error.strerror}): correct it")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            prefix, executable, arguments, directory, environment = json.loads(
                start.read_text(encoding="utf-8", errors="surrogateescape")
            )
        except OSError:
            sys.stdout.flush()
            os._exit(status if status >= 0 else 128 - status)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if prefix != sys.prefix:  # the shell has chosen another environment
        os.execv(executable, [executable, *arguments])  # noqa: S606 - as above
    return [*arguments]


def split_options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of an interpreter without its own options."""
    rest = [*arguments]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        del rest[: 2 if rest[0] in _VALUED_OPTIONS else 1]
    return rest


def run_python(arguments: Sequence[str]) -> None:
    """Run `python ARGUMENTS` in this process; options of the interpreter have no effect.

    An error of the program is printed as a new interpreter prints it, without the frames of the agent.
    """
    try:
        _run_program(arguments)
    except Exception as error:  # noqa: BLE001 - whatever the program raises
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _AGENT_FILES:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)


def _run_program(arguments: Sequence[str]) -> None:
    rest = split_options(arguments)
    if not rest:
        exit_with_error("program.command starts python without a script: add a script, or -m and a module")
    first, *others = rest
    if first == "-m" and others:
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c" and others:
        sys.path.insert(0, "")
        sys.argv = ["-c", *others[1:]]
        exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the user's command
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = rest
        runpy.run_path(first, run_name="__main__")


def exit_with_error(sentence: str) -> NoReturn:
    """End this process with a sentence and the code of a user's error."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(USER_ERROR)
