"""The standby: one process per pod that has imported what ranks need, and forks a rank whenever one is needed.

A rank is started by forking twice: the intermediate process ends at once, so the agent (a child subreaper) becomes the
rank's parent, waits for it and owns its exit code; the standby can end without harming a rank. A rank calls a function,
or executes a command; a command that starts Python may run in the fork, with the modules that the standby has imported.

The module runs in the interpreter of a program's image too, so it imports the standard library and `linux` alone, and
needs Python 3.10.

Invariants: the standby has one thread when it forks (the imports run in a helper thread at a low priority, which
has ended by then), it never touches an accelerator, and it ends with the agent. Wire to the agent: one JSON object per
packet of a SOCK_SEQPACKET pair; a request carries the write end of the rank's output pipe.
See docs/decisions/0010-forked-standby.md for the measurements behind the fork.
"""

from __future__ import annotations

import array
import errno
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainium_agent.linux import kernel, stacks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKET_BYTES = 1 << 18
ENV_PROGRESS_FILE = "TRAINIUM_PROGRESS_FILE"
ENV_PROGRAM = "TRAINIUM_PROGRAM"
"""Names of `worker_env`."""
_USER_ERROR = 64
"""Value of `ExitCode`."""
_VALUED_OPTIONS = ("-X", "-W")
_REPARENT_POLL_SECONDS = 0.0002
_THREAD_END_SECONDS = 1.0
# jemalloc stops this thread around a fork by itself.
_HARMLESS_THREADS = frozenset({"jemalloc_bg_thd"})


@dataclass(frozen=True, slots=True)
class StartRequest:
    """The start of one rank: its part of the environment, its arguments, and a name for ps."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    title: str
    entry: str = ""
    """`module:function` to call instead of the ranks' entry point."""
    directory: str = ""
    """Working directory; empty for the present one."""
    image: str = ""
    """Image in which a command is searched for; used in messages."""

    def encode(self) -> bytes:
        """Return the packet."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(packet: bytes) -> StartRequest:
        """Return the request of a packet."""
        return StartRequest(**json.loads(packet))


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """The preparation of a standby, and what its ranks do."""

    modules: tuple[str, ...] = ()
    """Imported first."""
    entry: str = ""
    """`module:function` that ranks call with their arguments; empty when these are a command."""
    warm: str = ""
    """Module whose `warm(config_path)` is called next; empty for none."""
    config_path: str = ""
    python: str = ""
    """Interpreter whose commands run in the fork of a standby in it; empty for one in the agent's interpreter."""

    def encode(self) -> str:
        """Return the plan as an argument."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> StandbyPlan:
        """Return the plan of an argument."""
        body = json.loads(text)
        return StandbyPlan(**{**body, "modules": tuple(body["modules"])})


def fork(plan: StandbyPlan) -> tuple[int, socket.socket]:
    """Fork a standby from this process, which must have a single thread; returns its pid and channel, in the agent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        sys.exit(serve(theirs, agent_pid, plan))
    theirs.close()
    return pid, ours


def serve(channel: socket.socket, agent_pid: int, plan: StandbyPlan) -> Any:
    """Warm up, then fork ranks on request until the agent closes the channel.

    Returns only in a rank, with what its entry point returned; the caller hands that to `sys.exit`.
    """
    kernel.die_with_parent()
    if os.getppid() != agent_pid:
        os._exit(0)
    os.setsid()
    kernel.set_process_title("trainium-standby")
    _default_signals()
    gc.disable()  # a tenth of what imports cost is a search for garbage that they do not make; a rank enables it
    _warm_up(channel, plan)
    foreign = _foreign_threads()
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and thereby copying, the pages that ranks share
    _send(channel, {"ready": True, "threads": foreign})
    while True:
        packet, descriptors = receive(channel)
        if not packet:
            os._exit(0)
        request = StartRequest.decode(packet)
        pid = _fork_rank()
        if pid == 0:
            channel.close()
            return _be_rank(request, descriptors[0], agent_pid, plan)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(channel, {"pid": pid})


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its file descriptors; empty when the other side is gone."""
    size = array.array("i").itemsize
    packet, ancillary, _, _ = channel.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(4 * size))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % size])
    return packet, list(descriptors)


def is_readable(channel: socket.socket, seconds: float) -> bool:
    """Return whether a packet, or the end, is there within so many seconds; of a descriptor beyond 1,024 too."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _send(channel: socket.socket, body: Mapping[str, Any]) -> None:
    try:
        channel.send(json.dumps(body).encode())
    except OSError:
        os._exit(0)


def _foreign_threads() -> list[str]:
    """Threads that would be missing in a fork; one that has been joined takes a moment to be gone for the kernel."""
    deadline = time.monotonic() + _THREAD_END_SECONDS
    while True:
        found = [name for name in kernel.thread_names() if name not in _HARMLESS_THREADS]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(_REPARENT_POLL_SECONDS)


def _warm_up(channel: socket.socket, plan: StandbyPlan) -> None:
    thread = threading.Thread(target=_import_everything, args=(plan,), name="warm-up")
    thread.start()
    while thread.is_alive():
        if is_readable(channel, 0.02):  # a rank is wanted now: this is no longer background work
            if thread.native_id is not None:
                kernel.raise_thread_priority(thread.native_id)
            thread.join()
    thread.join()


def _import_everything(plan: StandbyPlan) -> None:
    kernel.lower_thread_priority()
    try:
        for name in plan.modules:
            importlib.import_module(name)
        if plan.warm:
            importlib.import_module(plan.warm).warm(plan.config_path)
        if plan.entry:
            importlib.import_module(plan.entry.partition(":")[0])
    except Exception:  # noqa: BLE001 - the rank meets the same error and reports it with the right exit code
        _log("trainium-standby: warming up failed; ranks will start cold", traceback.format_exc())
    except SystemExit as leave:
        _log(f"trainium-standby: an import left with {leave.code!r}; ranks will start cold")


def _log(sentence: str, error: str = "") -> None:
    try:
        from trainium_agent import log_lines  # noqa: PLC0415 - not there in the interpreter of an image
        from trainium_contract.wire.log_line import LogLevel, LogSource  # noqa: PLC0415 - as above
    except ImportError:
        sys.stderr.write(f"{error}{sentence}\n")
        return
    line = log_lines.format_sentence(
        sentence, error=error, level=LogLevel.WARNING, logger=__name__, source=LogSource.AGENT
    )
    sys.stderr.write(f"{line}\n")


def _fork_rank() -> int:
    """Fork a process whose parent is the agent; 0 in that process, its pid in the standby."""
    read_end, write_end = os.pipe()
    intermediate = os.fork()
    if intermediate == 0:
        os.close(read_end)
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            return 0
        os.write(write_end, str(pid).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read()
    os.waitpid(intermediate, 0)
    return int(text)


def _be_rank(request: StartRequest, output: int, agent_pid: int, plan: StandbyPlan) -> Any:
    while os.getppid() != agent_pid:  # the intermediate process is about to end
        time.sleep(_REPARENT_POLL_SECONDS)
    kernel.die_with_parent()
    if os.getppid() != agent_pid:
        os._exit(1)
    os.setsid()
    kernel.set_process_title(request.title)
    _default_signals()
    logging.getLogger().handlers.clear()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    for descriptor in {nothing, output} - {0, 1, 2}:
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    os.environ.update(request.environment)
    entry = request.entry or plan.entry
    if request.directory:
        _enter(request.directory)
    if not entry and not plan.python:
        _execute(request)
    progress = request.environment.get(ENV_PROGRESS_FILE)
    if progress:
        stacks.answer_on_signal(Path(progress))
    gc.enable()
    if not entry:
        _run_python([*request.argv[1:]])
        return 0
    sys.argv = ["trainium-trainer", *request.argv]
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)([*request.argv])


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        _leave(f"program.workingDirectory {directory} cannot be entered ({error.strerror}): correct it")


def _execute(request: StartRequest) -> NoReturn:
    """Replace this process by a command; a sentence and code 64 where that is not possible."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a command would inherit that
    command = request.argv[0]
    where = f"of image {request.image}" if request.image else "here"
    try:
        os.execvp(command, [*request.argv])  # noqa: S606 - the job's command, without a shell
    except FileNotFoundError:
        if "/" in command:
            _leave(f"program.command {command} does not exist in the file system {where}: correct it")
        _leave(f"program.command {command} is not in PATH={os.environ.get('PATH', '')} {where}: correct it")
    except OSError as error:
        hint = "it has no #! line and is no executable" if error.errno == errno.ENOEXEC else str(error.strerror)
        _leave(f"program.command {command} {where} cannot be executed ({hint}): correct it")


def _leave(sentence: str) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(_USER_ERROR)


def _run_python(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS` does, in this process; options of the interpreter itself have no effect."""
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c", "-"):
        del arguments[: 2 if arguments[0] in _VALUED_OPTIONS else 1]
    if not arguments:
        _leave("program.command starts python without a script: add a script, or -m and a module")
    first, *rest = arguments
    if first == "-m" and rest:
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c" and rest:
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the user's command
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # As in any Python process: a rank whose peer is gone gets an error from its collective, and does not die of it.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Entry of `python -m trainium_agent.ranks.standby FD AGENT_PID PLAN`: a cold start."""
    descriptor, agent_pid, plan = sys.argv[1:4]
    channel = socket.socket(fileno=int(descriptor))
    sys.exit(serve(channel, int(agent_pid), StandbyPlan.decode(plan)))


if __name__ == "__main__":
    main()
