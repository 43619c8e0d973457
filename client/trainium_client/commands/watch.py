"""`watch`: show the screen of `status` live, or a line for each change if the output is not a terminal."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING

from trainium_client.commands.options import Format, JobName, Session, inspect_terminal
from trainium_client.read import read_job_snapshot
from trainium_contract.api_server.errors import ConnectionFailedError
from trainium_contract.wire.worker_env import GROUP, PLURAL, VERSION

if TYPE_CHECKING:
    from trainium_client.api import Api

_MAX_INTERVAL_SECONDS = 5.0
"""Interval at which workers and ages are read again without changes."""
_MIN_INTERVAL_SECONDS = 0.5
_CLEAR = "\x1b[H\x1b[J"


def watch(
    session: Session,
    name: JobName,
) -> None:
    """Show the screen of `status`, live, until the job has ended."""
    api = session.open()
    last_line, changed = "", threading.Event()
    version = str(api.read_job(name)["metadata"].get("resourceVersion") or "")
    threading.Thread(target=_watch_changes, args=(api, name, version, changed), daemon=True).start()
    output = inspect_terminal()
    while True:
        changed.clear()
        now = time.time()
        view = read_job_snapshot(api, name, now).view
        if session.output is Format.JSON:
            from trainium_client.render.json_output import to_wire  # noqa: PLC0415

            line = json.dumps(to_wire(view), ensure_ascii=False)
            sys.stdout.write(f"{line}\n")
        elif output.interactive:
            from trainium_client.render.page import render_text  # noqa: PLC0415
            from trainium_client.render.status import render_status  # noqa: PLC0415

            output = inspect_terminal()
            page = render_text(
                render_status(view, now=now, width=output.width), width=output.width, colour=output.colour
            )
            sys.stdout.write(f"{_CLEAR}{page}")
        else:
            from trainium_client.render.status import format_status_line  # noqa: PLC0415
            from trainium_contract.pages.formatting import format_utc  # noqa: PLC0415

            line = format_status_line(view)
            if line != last_line:
                sys.stdout.write(f"{format_utc(now)}  {line}\n")
            last_line = line
        sys.stdout.flush()
        if view.ended:
            if view.phase == "Failed" and session.output is Format.TEXT and not output.interactive:
                sys.stdout.write("".join(f"- {item}\n" for item in view.advice))
            return
        time.sleep(_MIN_INTERVAL_SECONDS)
        changed.wait(_MAX_INTERVAL_SECONDS - _MIN_INTERVAL_SECONDS)


def _watch_changes(api: Api, name: str, version: str, changed: threading.Event) -> None:
    """Set `changed` at each event of the job; without the right to watch, only the interval applies."""
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{api.namespace}/{PLURAL}"
    while True:
        query = {"watch": "true", "fieldSelector": f"metadata.name={name}", "resourceVersion": version}
        try:
            with api.connection.stream(path, query=query) as stream:
                if stream.status >= 400:
                    return
                for _ in stream.read_lines():
                    changed.set()
        except ConnectionFailedError:
            pass
        version = ""  # start at the current version
        time.sleep(_MAX_INTERVAL_SECONDS)
