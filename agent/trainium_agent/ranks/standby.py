"""Run the standby: one process per pod that has imported the ranks' modules, and forks each rank.

The standby forks twice to start a rank. The intermediate process ends at once, so the agent (a child subreaper) becomes
the rank's parent and collects its exit code; the standby can end without harming a rank. A rank waits until the agent
has received its pid, then calls a function or executes a command. A command that starts Python runs in the fork, with
the modules that the standby has imported. The module also runs in the interpreter of a program's image, so it imports
only the standard library, `linux` and its neighbours, and needs Python 3.10.

Guarantees:
- The standby has one thread when it forks; the thread that imports at a low priority has ended by then. If an import
  has left another thread, it reports that and its ranks start elsewhere.
- It never uses an accelerator, and it ends with the agent.
- A rank whose pid the agent has not received runs nothing, so a start that the agent repeats runs once.

Protocol: one JSON object per packet of a SOCK_SEQPACKET pair; a request includes the write end of the rank's output
pipe, and the read end of a pipe to which the agent writes a byte when the rank may run; other descriptors are passed
to the entry point by their numbers. The answer is the pid, or null if the entry needs a module that is not imported.
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
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainium_agent.linux import kernel, stacks
from trainium_agent.ranks import python_imports, rank_exit, torch_store
from trainium_agent.ranks.python_command import exit_with_error, find_python, run_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKET_BYTES = 1 << 18
ENV_PROGRESS_FILE = "TRAINIUM_PROGRESS_FILE"
"""A name of `worker_env`."""
_RECORD_SECONDS = 5.0
"""Time between two looks for modules that ranks have imported and the standby has not."""
_THREAD_POLL_SECONDS = 0.0002
_THREAD_END_SECONDS = 1.0
# jemalloc stops this thread itself around a fork.
_HARMLESS_THREADS = frozenset({"jemalloc_bg_thd"})


@dataclass(frozen=True, slots=True)
class StartRequest:
    """The request to start one rank: its environment, its arguments, and a name for ps."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    title: str
    entry: str = ""
    """`module:function` to call instead of the entry point of the plan."""
    directory: str = ""
    """Working directory; empty for the current one."""
    image: str = ""
    """Image that should contain the command; used in messages."""

    def encode(self) -> bytes:
        """Return the packet."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(packet: bytes) -> StartRequest:
        """Return the request of a packet."""
        return StartRequest(**json.loads(packet))


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """The modules that a standby imports, and the entry point of its ranks."""

    modules: tuple[str, ...] = ()
    """Modules that are imported first."""
    entry: str = ""
    """`module:function` that ranks call with their arguments; empty if the arguments are a command."""
    warm: str = ""
    """Module whose `warm(config_path)` is called after the imports; empty for none."""
    config_path: str = ""
    python: str = ""
    """Interpreter that runs the standby, whose forks run its commands; empty for the agent's interpreter."""
    command: tuple[str, ...] = ()
    """Command whose Python program is imported for, beside `modules`; empty for none."""
    directory: str = ""
    """Working directory of the command; empty for the current one."""
    record: str = ""
    """File of the modules that the ranks import; empty for none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all ranks, which libraries read while they are imported."""

    def encode(self) -> str:
        """Return the plan as an argument."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> StandbyPlan:
        """Return the plan of an argument."""
        body = json.loads(text)
        return StandbyPlan(**{**body, "modules": tuple(body["modules"]), "command": tuple(body["command"])})


def fork(plan: StandbyPlan) -> tuple[int, socket.socket]:
    """Fork a standby from this process, which must have a single thread; return its pid and channel to the agent."""
    agent_end, standby_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        agent_end.close()
        sys.exit(serve(standby_end, agent_pid, plan))
    standby_end.close()
    return pid, agent_end


def serve(channel: socket.socket, agent_pid: int, plan: StandbyPlan) -> Any:
    """Warm up, then fork ranks on request until the agent closes the channel.

    Returns only in a rank, with the result of its entry point, which the caller passes to `sys.exit`.
    """
    kernel.die_with_parent()
    if os.getppid() != agent_pid:
        os._exit(0)
    os.setsid()
    kernel.set_process_title("trainium-standby")
    rank_exit.register()
    _reset_signals()
    python = find_python(plan.command) if plan.command else None
    program = python_imports.ProgramImports(python.arguments, plan.directory, plan.record) if python else None
    _warm_up(channel, plan, program)
    _send(channel, {"ready": True, "threads": _list_foreign_threads(), "module": program.suspect if program else ""})
    while True:
        while program and not is_readable(channel, _RECORD_SECONDS):
            if program.has_new:
                _warm_up(channel, StandbyPlan(), program)
            if program.suspect and _list_foreign_threads():
                os._exit(0)  # the next standby reports them
        packet, descriptors = receive(channel)
        if not packet:
            os._exit(0)
        request = StartRequest.decode(packet)
        is_impossible = request.entry == torch_store.ENTRY and not torch_store.can_serve()
        pid = None if is_impossible else _fork_rank()
        if pid == 0:
            channel.close()
            output, permission, *inherited = descriptors
            return _run_rank(request, output, permission, inherited, agent_pid, plan)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(channel, {"pid": pid})


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its file descriptors; empty when the other side has closed."""
    size = array.array("i").itemsize
    packet, ancillary, _, _ = channel.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(4 * size))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % size])
    return packet, list(descriptors)


def is_readable(channel: socket.socket, seconds: float) -> bool:
    """Return whether a packet or the end arrives within `seconds`; works for descriptors beyond 1,024."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _send(channel: socket.socket, body: Mapping[str, Any]) -> None:
    try:
        channel.send(json.dumps(body).encode())
    except OSError:
        os._exit(0)


def _list_foreign_threads() -> list[str]:
    """Return the threads that a fork would lose; the kernel still lists a joined thread for a moment."""
    deadline = time.monotonic() + _THREAD_END_SECONDS
    forked = False
    while True:
        threads = [name for name in kernel.list_thread_names() if name not in _HARMLESS_THREADS]
        if threads and not forked:  # libraries such as OpenBLAS end their threads before a fork
            forked = True
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        elif not threads or time.monotonic() > deadline:
            return threads
        else:
            time.sleep(_THREAD_POLL_SECONDS)


def _warm_up(channel: socket.socket, plan: StandbyPlan, program: python_imports.ProgramImports | None) -> None:
    gc.disable()  # a tenth of the import time is garbage collection without effect; a rank enables it again
    thread = threading.Thread(target=_import_modules, args=(plan, program), name="warm-up")
    thread.start()
    while thread.is_alive():
        if is_readable(channel, 0.02):  # a rank is needed now: this is no longer background work
            if thread.native_id is not None:
                kernel.raise_thread_priority(thread.native_id)
            thread.join()
    thread.join()
    gc.collect()
    gc.freeze()  # keeps the collector from writing to, and thus copying, the pages that ranks share


def _import_modules(plan: StandbyPlan, program: python_imports.ProgramImports | None) -> None:
    kernel.lower_thread_priority()
    try:
        for name in plan.modules:
            importlib.import_module(name)
        if plan.warm:
            importlib.import_module(plan.warm).warm(plan.config_path)
        if plan.entry:
            importlib.import_module(plan.entry.partition(":")[0])
        if program:
            program.import_new()
            if program.has_new:  # the modules of another pod's ranks have arrived meanwhile
                program.import_new()
    except Exception:  # noqa: BLE001 - the rank meets the same error and reports it with the right exit code
        _log("trainium-standby: warming up failed; ranks will start cold", traceback.format_exc())
    except SystemExit as leave:
        _log(f"trainium-standby: an import left with {leave.code!r}; ranks will start cold")


def _log(sentence: str, error: str = "") -> None:
    try:
        from trainium_contract.wire.log_line import LogLevel, LogSource  # noqa: PLC0415 - as above
        from trainium_contract.worker_process import log_lines  # noqa: PLC0415 - not there in the interpreter of an image
    except ImportError:
        sys.stderr.write(f"{error}{sentence}\n")
        return
    line = log_lines.format_sentence(
        sentence, error=error, level=LogLevel.WARNING, logger=__name__, source=LogSource.AGENT
    )
    sys.stderr.write(f"{line}\n")


def _fork_rank() -> int:
    """Fork a process whose parent is the agent; return 0 in that process, its pid in the standby."""
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


def _run_rank(
    request: StartRequest, output: int, permission: int, inherited: Sequence[int], agent_pid: int, plan: StandbyPlan
) -> Any:
    if not os.read(permission, 1):  # the agent gave up this start, or ended
        os._exit(0)
    os.close(permission)
    kernel.die_with_parent()
    if os.getppid() != agent_pid:
        os._exit(1)
    os.setsid()
    kernel.set_process_title(request.title)
    _reset_signals()
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
        _change_directory(request.directory)
    if not entry and not plan.python:
        _execute(request)
    progress = request.environment.get(ENV_PROGRESS_FILE)
    if progress:
        stacks.dump_on_signal(Path(progress))
    gc.enable()
    if not entry:
        python_imports.prepare_fork()
        if plan.record and request.environment.get("LOCAL_RANK") == "0":
            sys.meta_path.insert(0, python_imports.ImportRecorder(plan.record))
        with rank_exit.record_exit():
            run_command(request.argv)
        return 0
    sys.argv = ["trainium-trainer", *request.argv]
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)([*request.argv, *map(str, inherited)])


def _change_directory(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        exit_with_error(f"program.workingDirectory {directory} cannot be entered ({error.strerror}): correct it")


def _execute(request: StartRequest) -> NoReturn:
    """Replace this process by a command; exit with a sentence and code 64 if that is not possible."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores SIGPIPE, and a command would inherit that
    command = request.argv[0]
    where = f"of image {request.image}" if request.image else "here"
    try:
        os.execvp(command, [*request.argv])  # noqa: S606 - the job's command, without a shell
    except FileNotFoundError:
        if "/" in command:
            exit_with_error(f"program.command {command} does not exist in the file system {where}: correct it")
        exit_with_error(f"program.command {command} is not in PATH={os.environ.get('PATH', '')} {where}: correct it")
    except OSError as error:
        hint = "it has no #! line and is no executable" if error.errno == errno.ENOEXEC else str(error.strerror)
        exit_with_error(f"program.command {command} {where} cannot be executed ({hint}): correct it")


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # As in any Python process: a rank whose peer has died gets an error from its collective, not a signal.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Run `python -m trainium_agent.ranks.standby FD AGENT_PID PLAN`: a cold start."""
    descriptor, agent_pid, plan = sys.argv[1:4]
    channel = socket.socket(fileno=int(descriptor))
    sys.exit(serve(channel, int(agent_pid), StandbyPlan.decode(plan)))


if __name__ == "__main__":
    main()
