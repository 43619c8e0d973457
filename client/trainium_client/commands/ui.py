"""`ui`: show jobs in the browser, by a small local server with the user's own rights."""

from __future__ import annotations

import secrets
import threading
from typing import Annotated

import typer

from trainium_client.commands.options import Session, complete_jobs


def ui(
    session: Session,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The TrainingJob; default: a list.", autocompletion=complete_jobs),
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List jobs of all namespaces.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on this machine; 0: any.")] = 0,
    show: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the browser.")] = True,
) -> None:
    """Show jobs in the browser, live and read-only, with your own rights, until Ctrl-C."""
    # Imported here, so that other commands start faster.
    import webbrowser  # noqa: PLC0415

    from trainium_client.commands.pages import LocalPages  # noqa: PLC0415
    from trainium_client.commands.ui_server import UiServer  # noqa: PLC0415

    api = session.open()
    if name is not None:
        api.read_job(name)  # a failure is shown here, not in the browser
    secret = secrets.token_urlsafe(24)
    start = "" if all_namespaces and name is None else f"/{api.namespace}" + (f"/{name}" if name else "")
    pages = LocalPages(session.open, f"/{secret}")
    server = UiServer(pages, secret, start, port)
    session.print_message(f"{server.url}\nserved to this machine until Ctrl-C", url=server.url)
    if show:
        threading.Thread(target=webbrowser.open, args=(server.one_time_url,), daemon=True).start()
    try:
        server.serve_forever()
    finally:
        server.server_close()
