"""Fork processes of tests from a server that has imported torch and Arrow, once in each test lane."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_IMPORTED = (
    "torch._dynamo",  # imported by the first DTensor
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "pyarrow",
    "tokenizers",
    "tests.testing.trainer.forked_workers",
    "trainium_trainer.artifacts.export",
    "trainium_trainer.artifacts.stage",
    "trainium_trainer.checkpoint.format.writer",
    "trainium_trainer.cli",
    "trainium_trainer.data.examples.store",
    "trainium_trainer.data.online.streams",
    "trainium_trainer.data.prepared.build",
    "trainium_worker.dcp",
)


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Return the context that forks from the server with all imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    return context


def run_python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -c TEXT …`, `python -m MODULE …` or `python FILE …` in a forked process."""
    with tempfile.TemporaryDirectory() as folder:
        process_arguments = (arguments, dict(os.environ if env is None else env), cwd or Path.cwd(), Path(folder))
        process = fork_context().Process(target=_run, args=process_arguments)
        process.start()
        process.join()
        assert process.exitcode is not None
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _run(arguments: tuple[str, ...], env: dict[str, str], cwd: Path, folder: Path) -> None:
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        runpy.run_path(kind, run_name="__main__")
