"""Run the ranks of a job as its `RankSpec` describes them.

Guarantees:
- No variable that the image or the job sets is replaced; the agent's interpreter does not affect a program.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_agent.ranks.python_command import SHELLS
from trainium_agent.ranks.standby import StartRequest
from trainium_agent.roles import RoleDirectory
from trainium_agent.workload.attempt import build_rank_environment
from trainium_agent.workload.program_progress import ProgramMonitor
from trainium_agent.workload.rank_spec import describe_ranks
from trainium_agent.workload.ultra_server import build_ultra_server_environment
from trainium_contract.exit_codes import ExitCode
from trainium_contract.program_output import find_error, strip_margin
from trainium_contract.redaction import redact_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.attempt import AttemptLayout

_SHORT_SECONDS = 3.0
"""A program that trains runs longer or reports a step."""
_END_LINES = 4
_END_CHARACTERS = 4096


class Workload(ProgramMonitor):
    """The ranks of a job on this pod."""

    def __init__(self, settings: AgentSettings, environment: Mapping[str, str] = os.environ) -> None:
        """`environment` is that of the container."""
        super().__init__(settings, describe_ranks(settings, environment))
        self._container = environment
        self.roles = RoleDirectory(settings.memory_directory)
        self._started_at = 0.0

    def request(self, layout: AttemptLayout, local_rank: int) -> StartRequest:
        """Return the request that starts a rank."""
        self._started_at, self.end_problem = time.monotonic(), ""
        unit_variables = build_ultra_server_environment(self._settings.unit_nodes, layout.node_rank, layout.master_ip)
        environment = {
            **{name: value for name, value in unit_variables.items() if name not in self._container},
            **self.ranks.environment,
            **build_rank_environment(self._settings, layout, local_rank),
            **self.roles.build_environment(),
        }
        if layout.compute_rank(local_rank) == 0 and self.ranks.receives_posts:
            environment |= self.accept_posts(layout, local_rank)
        return StartRequest(
            self.ranks.command,
            environment,
            f"trainium-rank {layout.compute_rank(local_rank)} of {layout.world_size}",
            directory=self.ranks.directory,
            image=self.ranks.image,
        )

    def exit_code_after_request(self, code: int) -> int:
        """Return the exit code to record for a rank that ended with `code` after its agent had asked it to stop.

        Success means "saved and stopped" there, unless the ranks have reported the last step or explain their exits: a
        complete program ends at once when it starts again; an incomplete one counted as finished would lose training.
        """
        is_complete = self.ranks.explains_exits or self.has_all_steps
        return ExitCode.YIELDING if code == ExitCode.FINISHED and not is_complete else code

    def record_success(self, process: RankProcess) -> None:
        """Record that a rank has ended with code 0, in the event loop, before the agent reports it.

        The error at the end of a shell's output is recorded: the code of a pipe or script is that of its last command.
        """
        lines = process.output.read_text(_END_CHARACTERS).split("\n")
        position = find_error(lines)
        error = "" if position is None or position < len(lines) - _END_LINES else strip_margin(lines[position])
        if error and Path(self.ranks.command[0]).name in SHELLS:
            self.end_problem = (
                f"a shell ended with code 0 although its output ends with {redact_secrets(error)!r}: start the program "
                "with exec, or set -e and -o pipefail, so that its own code counts"
            )

    def on_finish(self, processes: Sequence[RankProcess]) -> str:
        """Check the ranks after all ended with code 0, in the worker thread; return why training is not complete.

        A program that ended at once and left processes running went to the background.
        """
        super().on_finish(processes)
        seconds = time.monotonic() - self._started_at
        leftovers = sorted({name for process in processes for name in process.leftover_processes})
        if seconds > _SHORT_SECONDS or not leftovers or self.has_steps or self.ranks.explains_exits:
            return ""
        return (
            f"the program ended with code 0 after {seconds:.1f} s and left {', '.join(leftovers)} running: "
            "have it stay in the foreground, because its end is taken for the end of training"
        )
