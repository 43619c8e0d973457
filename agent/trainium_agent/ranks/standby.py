"""The standby: one process per pod that has imported torch and the trainer, and forks a rank whenever one is needed.

A rank is started by forking twice: the intermediate process ends at once, so the agent (a child subreaper) becomes the
rank's parent, waits for it and owns its exit code; the standby can end without harming a rank.

Invariants: the standby has one thread when it forks (the imports run in a helper thread at a low priority, which
has ended by then), it never touches an accelerator, and it ends with the agent. Wire to the agent: one JSON object per
packet of a SOCK_SEQPACKET pair; a request carries the write end of the rank's output pipe.
See docs/decisions/0010-forked-standby.md for the measurements behind the fork.
"""

from __future__ import annotations

import array
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_agent import log_lines
from trainium_agent.linux import kernel, stacks
from trainium_agent.settings import DEFAULT_RANK_ENTRY, DEFAULT_WARM_MODULE
from trainium_contract.wire import worker_env
from trainium_contract.wire.log_line import LogLevel, LogSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKET_BYTES = 1 << 18
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

    def encode(self) -> bytes:
        """Return the packet."""
        return json.dumps(
            {"argv": [*self.argv], "env": {**self.environment}, "title": self.title, "entry": self.entry}
        ).encode()

    @staticmethod
    def decode(packet: bytes) -> StartRequest:
        """Return the request of a packet."""
        body = json.loads(packet)
        return StartRequest(body["argv"], body["env"], body["title"], body["entry"])


def serve(channel: socket.socket, agent_pid: int, entry: str, config_path: str) -> Any:
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
    _warm_up(channel, entry, config_path)
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
            return _be_rank(request, descriptors[0], agent_pid, request.entry or entry)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(channel, {"pid": pid})


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """One packet with the file descriptors that came along; empty when the other side is gone."""
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


def _warm_up(channel: socket.socket, entry: str, config_path: str) -> None:
    thread = threading.Thread(target=_import_everything, args=(entry, config_path), name="warm-up")
    thread.start()
    while thread.is_alive():
        if is_readable(channel, 0.02):  # a rank is wanted now: this is no longer background work
            if thread.native_id is not None:
                kernel.raise_thread_priority(thread.native_id)
            thread.join()
    thread.join()


def _import_everything(entry: str, config_path: str) -> None:
    kernel.lower_thread_priority()
    try:
        importlib.import_module("torch")
        if entry == DEFAULT_RANK_ENTRY:
            importlib.import_module(DEFAULT_WARM_MODULE).warm(config_path)
        importlib.import_module(entry.partition(":")[0])
    except Exception:  # noqa: BLE001 - the rank meets the same error and reports it with the right exit code
        _log("trainium-standby: warming up failed; ranks will start cold", traceback.format_exc())
    except SystemExit as leave:
        _log(f"trainium-standby: an import left with {leave.code!r}; ranks will start cold")


def _log(sentence: str, error: str = "") -> None:
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


def _be_rank(request: StartRequest, output: int, agent_pid: int, entry: str) -> Any:
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
    progress = request.environment.get(worker_env.ENV_PROGRESS_FILE)
    if progress:
        stacks.answer_on_signal(Path(progress))
    sys.argv = ["trainium-trainer", *request.argv]
    gc.enable()
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)([*request.argv])


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # As in any Python process: a rank whose peer is gone gets an error from its collective, and does not die of it.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Entry of `python -m trainium_agent.ranks.standby FD AGENT_PID ENTRY CONFIG`: a cold start."""
    descriptor, agent_pid, entry, config_path = sys.argv[1:5]
    channel = socket.socket(fileno=int(descriptor))
    sys.exit(serve(channel, int(agent_pid), entry, config_path))


if __name__ == "__main__":
    main()
