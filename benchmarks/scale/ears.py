# ruff: noqa: SLF001 - the gathers are counted from outside, so that the trainer has nothing for it
"""What a rank of a real world sends and receives in its gathers: counted where they happen, written to a file.

Installed in a forked rank before the trainer's command; changes nothing of what is sent.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainium_trainer.checkpoint.interfaces import Position
    from trainium_trainer.checkpoint.manager import CheckpointManager


def listen(path: Path) -> None:
    """Append a line for each gather of this rank: what it is about, bytes received and sent, messages received.

    What goes down to it and on counts apart; and how many descriptors the process has opened by then, so that what it
    inherited from who started it all does not count.
    """
    from trainium_trainer.checkpoint import collectives  # noqa: PLC0415 - in the rank

    heard = threading.local()
    inherited = _held()
    climb, send, receive = collectives._climb, collectives._send, collectives._receive
    broadcast, descend = collectives._broadcast, collectives._descend

    def write() -> None:
        heard.now["files"] = _held() - inherited
        with path.open("a") as file:
            file.write(json.dumps(heard.now) + "\n")

    def counted_climb(value: Any, group: Any, shorter: Any = None) -> list[bytes]:
        about = value[0] if isinstance(value, tuple) and value else type(value).__name__
        heard.now = {"about": str(about), "received": 0, "sent": 0, "messages": 0, "down": 0}
        heard.descends = False
        return climb(value, group, shorter)

    def counted_send(data: bytes, target: int, group: Any) -> None:
        heard.now["down" if heard.descends else "sent"] += len(data)
        send(data, target, group)

    def counted_receive(source: int, group: Any) -> bytes:
        data = receive(source, group)
        heard.now["down" if heard.descends else "received"] += len(data)
        heard.now["messages"] += not heard.descends
        return data

    def counted_broadcast(data: bytes, group: Any) -> bytes:
        whole = broadcast(data, group)
        heard.now["down"] = len(whole)
        write()
        return whole

    def counted_descend(told: Any, group: Any) -> Any:
        heard.descends = True
        mine = descend(told, group)
        write()
        return mine

    collectives._climb, collectives._send = counted_climb, counted_send
    collectives._receive, collectives._broadcast = counted_receive, counted_broadcast
    collectives._descend = counted_descend


def _held() -> int:
    """Open descriptors, and the one that looks at them."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def die_at(step: int) -> None:
    """Kill this process, as nobody asked for, when it has completed a step and before it says so to anybody."""
    from trainium_trainer.checkpoint.manager import CheckpointManager  # noqa: PLC0415 - in the rank

    after_step = CheckpointManager.after_step

    def last_step(self: CheckpointManager, position: Position, votes: int) -> None:
        if position.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        after_step(self, position, votes)

    CheckpointManager.after_step = last_step  # type: ignore[method-assign]
