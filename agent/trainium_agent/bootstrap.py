"""Start the agent: read its settings, check the pod, fork the standby and run the supervisor.

Guarantees:
- An invalid environment ends the process within milliseconds with one sentence and code 64.
- The standby is forked before any thread exists.
- Every process that the agent started has ended when `start` returns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainium_agent.checks.preflight import check_results, run_preflight
from trainium_agent.linux import kernel
from trainium_agent.ranks.standby import StandbyPlan, fork
from trainium_agent.ranks.standby_manager import Standby
from trainium_agent.settings import SettingsError, parse_settings
from trainium_agent.workload.workload import Workload
from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.log_line import LogSource
from trainium_contract.worker_process import log_lines

if TYPE_CHECKING:
    from trainium_agent.settings import AgentSettings


def start() -> int:
    """Run the agent with the settings of the environment; return the pod's exit code."""
    try:
        settings = parse_settings(os.environ)
    except SettingsError as error:
        log_lines.report_exit(f"trainium-agent: {error}", source=LogSource.AGENT)
        sys.exit(ExitCode.USER_ERROR)
    workload = Workload(settings)
    checks, files = settings.checks & workload.ranks.checks, workload.ranks.required_files
    settings = replace(settings, checks=checks, required_files=files)
    kernel.adopt_orphans()
    log_lines.configure_agent_logging()
    started_at = time.monotonic()
    findings = run_preflight(settings)
    checked = check_results(settings, findings, time.monotonic() - started_at)
    for finding in findings:
        logging.getLogger(__name__).log(
            logging.WARNING if finding.code is None else logging.ERROR, "%s", finding.sentence
        )
    return asyncio.run(_supervise(settings, workload, _start_standby(workload), findings, checked))


def _start_standby(workload: Workload) -> Standby:
    """Start a standby in the interpreter of the program, if it has one that can be started; else fork it."""
    ranks = workload.ranks
    try:
        if ranks.plan.python:
            return Standby.spawn(ranks.plan)
    except OSError as error:
        logging.getLogger(__name__).warning(
            "%s cannot be started (%s), so nothing is imported ahead", ranks.plan.python, error.strerror
        )
        workload.ranks = replace(ranks, plan=StandbyPlan())
    os.environ.update(workload.ranks.plan.environment)
    return Standby(*fork(workload.ranks.plan))


async def _supervise(settings: AgentSettings, workload: Workload, standby: Standby, findings: Any, checked: Any) -> int:
    from trainium_agent.shared_state.server import StoreServer  # noqa: PLC0415 - while the standby imports
    from trainium_agent.supervisor import AgentSupervisor  # noqa: PLC0415 - as above

    try:
        store = StoreServer(settings.pod_ip)
    except OSError as error:
        standby.kill()
        return _report_refusal(f"cannot listen on POD_IP {settings.pod_ip} ({error.strerror})")
    supervisor = AgentSupervisor(settings, workload, standby, store)
    context = log_lines.log_context()
    log_lines.configure_agent_logging(lambda: {**context, **supervisor.log_context()})
    return await supervisor.run(findings, checked)


def _report_refusal(sentence: str) -> int:
    log_lines.report_exit(f"trainium-agent: {sentence}.", source=LogSource.AGENT)
    return int(ExitCode.USER_ERROR)
