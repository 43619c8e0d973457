"""Signals of a forked rank, whatever its agent did."""

from __future__ import annotations

import os
import signal
import socket

from trainium_agent.ranks import standby


def test_a_rank_whose_peer_has_ended_gets_an_error_and_does_not_die_of_it() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as some other program may have left it
        standby._default_signals()
        try:
            os.write(ours.fileno(), b"x")
        except BrokenPipeError:
            os._exit(7)
        os._exit(0)
    ours.close()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
