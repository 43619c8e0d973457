"""Starts the agent: reads its settings, checks the pod, forks the standby and runs the supervisor.

Guarantees:
- A wrong environment ends the process within milliseconds with one sentence and code 64.
- The standby is forked before any thread exists.
- Every process that it started has ended when it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from trainium_agent import log_lines
from trainium_agent.checks.preflight import preflight, results
from trainium_agent.linux import kernel
from trainium_agent.linux.open_files import raise_limit
from trainium_agent.settings import AgentSettings, SettingsError, settings_from
from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.log_line import LogSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def start() -> int:
    """Run the agent with the settings of the environment; return the pod's exit code."""
    try:
        settings = settings_from(os.environ)
    except SettingsError as error:
        log_lines.report_end(f"trainium-agent: {error}", source=LogSource.AGENT)
        sys.exit(ExitCode.USER_ERROR)
    # Read by torch when it is imported; the ranks share the agent's import.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run(settings)


def run(settings: AgentSettings) -> int:
    """Check the pod, fork the standby and run the supervisor; return the pod's exit code."""
    kernel.adopt_orphans()
    raise_limit()  # the ranks inherit it
    log_lines.write_as_agent()
    began = time.monotonic()
    findings = preflight(settings)
    checked = results(settings, findings, time.monotonic() - began)
    for finding in findings:
        logging.getLogger(__name__).log(
            logging.WARNING if finding.code is None else logging.ERROR, "%s", finding.sentence
        )
    # Read by torch when it is imported: its C++ warns of the look-up that is made to fail, past the log's format.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    importlib.import_module("torch.distributed")
    from trainium_agent.generation.store import serve_store  # noqa: PLC0415 - imports torch
    from trainium_agent.ranks.standby_keeper import Standby  # noqa: PLC0415 - as late as what it forks

    stop_reverse_lookups(serve_store)  # the standby and all ranks inherit it
    standby = Standby.fork(settings)
    return asyncio.run(_supervise(settings, standby, findings, checked))


async def _supervise(settings: AgentSettings, standby: Any, findings: Any, checked: Any) -> int:
    from trainium_agent.generation.store import serve_store  # noqa: PLC0415 - imports torch
    from trainium_agent.supervisor import AgentSupervisor  # noqa: PLC0415 - imports torch

    try:
        store = serve_store(settings.pod_ip)
    except OSError as error:
        sentence = f"trainium-agent: cannot listen on POD_IP {settings.pod_ip} ({error.strerror})."
        log_lines.report_end(sentence, source=LogSource.AGENT)
        standby.kill()
        return int(ExitCode.USER_ERROR)
    supervisor = AgentSupervisor(settings, standby, store, _progress_reader())
    place = log_lines.place()
    log_lines.write_as_agent(lambda: {**place, **supervisor.log_context()})
    return await supervisor.run(findings, checked)


def _progress_reader() -> Any:
    from trainium_agent.ranks.progress import read_progress  # noqa: PLC0415 - after the fork

    def read(path: Path) -> Any:
        return read_progress(path)

    return read


_NSCOUNT_OFFSET = 16
"""Of `struct __res_state` (resolv.h): two ints and an unsigned long are before it, on every 64-bit Linux."""
NAMELESS = "127.83.82.81"
"""An address of this host that no hosts file names."""


def stop_reverse_lookups(serve: Callable[[str], object]) -> None:
    """`serve(address)` opens one of torch's stores there, which asks for the address's name in this thread."""
    with contextlib.suppress(OSError, AttributeError, RuntimeError), _no_name_server():
        serve(NAMELESS)


@contextlib.contextmanager
def _no_name_server() -> Iterator[None]:
    """For this thread. Raises AttributeError where the C library does not have glibc's resolver."""
    libc = ctypes.CDLL(None)
    state, read_configuration = libc["__res_state"], libc["__res_init"]
    state.restype = ctypes.c_void_p
    read_configuration()
    count = ctypes.c_int.from_address(state() + _NSCOUNT_OFFSET)
    count.value = 0
    try:
        yield
    finally:
        read_configuration()
