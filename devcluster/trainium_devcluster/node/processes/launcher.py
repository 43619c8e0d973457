"""Run the launcher: a small single-threaded process, forked early from the node, that starts all containers.

Reasons for a separate process: a fork of it costs a millisecond, a new interpreter twenty; the kernel requires a single
thread for namespaces; and as the parent (and subreaper) of all container processes it gets each exit at once.

Two forks start a container: the first process creates the namespaces and ends, the second becomes process 1 of the
container. It waits until the launcher has adopted it, asks the kernel to die with the launcher, builds its file system
and becomes the pod's command. The launcher dies with the node process, so a killed node takes its containers with it.

Wire format: one JSON object per datagram on a Unix socket, file descriptors beside it. Requests carry, in this order,
the command (pickled, in a memory file), standard input, output, error, and the write end of a pipe on which the new
process reports why it could not start; end of file means that it runs. The module imports only the standard library.
"""
# ruff: noqa: PTH103, PTH118 - plain os calls: this runs in a forked child

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from trainium_devcluster.node.processes import rootfs
from trainium_devcluster.node.processes.command import ContainerCommand
from trainium_devcluster.node.processes.isolation import Isolation
from trainium_devcluster.processes import syscalls as sc

MAX_MESSAGE = 65536
_FDS = 5


def fork_launcher(isolation: Isolation) -> tuple[socket.socket, int]:
    """Fork the launcher; return the node's end of the socket and the launcher's process id."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sc.die_with_parent(signal.SIGKILL)
            ours.close()
            _Launcher(theirs, isolation).serve()
            status = 0
        except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
            traceback.print_exc()
        finally:
            os._exit(status)
    theirs.close()
    return ours, pid


class _Launcher:
    def __init__(self, sock: socket.socket, isolation: Isolation) -> None:
        self._socket = sock
        self._isolation = isolation
        self._running: dict[int, str] = {}

    def serve(self) -> None:
        """Serve requests until the node closes its end."""
        sc.become_subreaper()
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                elif not self._handle():
                    return
            self._reap()

    def _handle(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, _FDS)
        for fd in fds:
            os.set_inheritable(fd, False)  # recv_fds ignores its flags argument, including MSG_CMSG_CLOEXEC
        if not data:
            return False
        request = json.loads(data)
        try:
            if request["op"] == "signal":
                self._signal(request["id"], request["signal"])
            else:
                self._start(request["id"], fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _signal(self, name: str, number: int) -> None:
        for pid, running in self._running.items():
            if running == name:
                os.kill(pid, number)

    def _start(self, name: str, fds: list[int]) -> None:
        command_fd, stdin, stdout, stderr, error_fd = fds
        pickled = os.pread(command_fd, os.fstat(command_fd).st_size, 0)
        command: ContainerCommand = pickle.loads(pickled)  # noqa: S301 - the node, which is this program, wrote it
        try:
            pid, go = _fork_container(command, self._isolation, (stdin, stdout, stderr), error_fd)
        except OSError as error:
            _report(error_fd, error)
            self._send({"id": name, "event": "exited", "status": 127 << 8, "time": time.time()})
            return
        self._running[pid] = name
        self._send({"id": name, "event": "started", "pid": pid})
        os.write(go, b"g")
        os.close(go)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._running.pop(pid, None)
            if name is not None:
                self._send({"id": name, "event": "exited", "status": status, "time": time.time()})

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.send(json.dumps(message).encode())


def _fork_container(
    command: ContainerCommand, isolation: Isolation, stdio: tuple[int, int, int], error_fd: int
) -> tuple[int, int]:
    """Fork twice; return the inner process's id and the pipe that lets it continue."""
    join = [
        os.open(f"/proc/{command.join}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        for kind in _select_namespaces(command, isolation)
    ]
    go_read, go_write = os.pipe()
    pid_read, pid_write = os.pipe()
    outer = os.fork()
    if outer == 0:
        try:
            os.close(go_write)
            _enter_namespaces(join, isolation, command)
            inner = os.fork()
            if inner == 0:
                _become_container(command, isolation, stdio, error_fd, go_read)
            os.write(pid_write, str(inner).encode())
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
            _report(error_fd, error)
        finally:
            os._exit(1)
    for fd in (go_read, pid_write, *join):
        os.close(fd)
    os.waitpid(outer, 0)
    text = os.read(pid_read, 32)
    os.close(pid_read)
    if not text:
        os.close(go_write)
        raise OSError(0, "the container's namespaces could not be created")
    return int(text), go_write


def _select_namespaces(command: ContainerCommand, isolation: Isolation) -> tuple[str, ...]:
    if command.join is None:
        return ()
    return ("mnt", "uts", "pid") if isolation.pid_namespace else ("mnt", "uts")


def _enter_namespaces(join: list[int], isolation: Isolation, command: ContainerCommand) -> None:
    if join:
        for fd in join:
            sc.set_namespace(fd, 0)
    elif command.join is None:
        sc.unshare(sc.CLONE_NEWNS | sc.CLONE_NEWUTS | (sc.CLONE_NEWPID if isolation.pid_namespace else 0))


def _become_container(
    command: ContainerCommand, isolation: Isolation, stdio: tuple[int, int, int], error_fd: int, go_read: int
) -> NoReturn:
    stage = "start"
    try:
        if os.read(go_read, 1) != b"g":
            os._exit(1)
        sc.die_with_parent(signal.SIGKILL)
        os.setsid()
        _reset_signals()
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        if command.join is None:
            stage = "file system"
            rootfs.build(command, isolation)
            sc.set_hostname(command.hostname)
        stage = "working directory"
        os.umask(0o022)
        os.makedirs(command.cwd, exist_ok=True)
        os.chdir(command.cwd)
        stage = "security context"
        if command.capabilities is not None and os.geteuid() == 0:
            sc.limit_capabilities(frozenset(command.capabilities))
        if command.no_new_privileges:
            sc.forbid_new_privileges()
        stage = "exec"
        _execute(list(command.argv), command.env)
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
        _report(error_fd, error, stage)
    finally:
        os._exit(128)


def _execute(argv: list[str], env: Mapping[str, str]) -> None:
    """Execute the command, found in the container's PATH as by a container runtime."""
    command = argv[0]
    if "/" in command:
        os.execve(command, argv, env)  # noqa: S606 - the pod's command, as it is
    for folder in env.get("PATH", os.defpath).split(os.pathsep):
        # A folder that this user may not enter is skipped, as in container runtimes.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.execve(os.path.join(folder, command), argv, env)  # noqa: S606 - see above
    raise FileNotFoundError(2, "executable file not found in $PATH", command)


def _reset_signals() -> None:
    for number in signal.valid_signals():
        if number not in {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _report(error_fd: int, error: BaseException, stage: str = "namespaces") -> None:
    text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
    message = {"stage": stage, "message": text or type(error).__name__}
    with contextlib.suppress(OSError):
        os.write(error_fd, json.dumps(message).encode())
    if not isinstance(error, OSError):
        traceback.print_exc(file=sys.stderr)
