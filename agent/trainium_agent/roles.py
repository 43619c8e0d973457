"""Keep the addresses of the job's roles for the ranks: a file that is replaced at each change, and variables.

Guarantees:
- A rank that reads the file sees one whole set of addresses, never a part.
- While the operator is away, the last addresses stay.
"""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING

from trainium_contract.wire import worker_env

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_contract.wire.messages import RoleEndpoints

_log = logging.getLogger(__name__)
_NAME = "roles.json"


class RoleDirectory:
    """The addresses of the roles of one pod's job; written in the event loop, read from any thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _NAME
        self._endpoints: RoleEndpoints | None = None

    def update(self, endpoints: RoleEndpoints) -> None:
        """Replace the addresses."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(endpoints.addresses), encoding="utf-8")
        new.replace(self._path)
        self._endpoints = endpoints
        counts = ", ".join(f"{len(addresses)} of {role}" for role, addresses in endpoints.addresses.items())
        _log.info("ready pods of roles: %s%s", counts, "; training waits for more" if endpoints.is_waiting else "")

    @property
    def is_waiting(self) -> bool:
        """Whether fewer pods of a role are ready than training waits for."""
        return self._endpoints is not None and self._endpoints.is_waiting

    def build_environment(self) -> dict[str, str]:
        """Return the variables of a rank that starts now; empty for a job without roles."""
        if self._endpoints is None:
            return {}
        environment = {worker_env.ENV_ROLES_FILE: os.fspath(self._path)}
        for role, addresses in self._endpoints.addresses.items():
            text, name = ",".join(addresses), worker_env.format_role_variable(role)
            if len(text) <= worker_env.MAX_ROLE_VARIABLE:
                environment[name] = text
            else:
                _log.warning(
                    "%s is not set, because the %d addresses of role %s have more than %d characters: read them from "
                    "%s, or with trainium_worker.endpoints",
                    name,
                    len(addresses),
                    role,
                    worker_env.MAX_ROLE_VARIABLE,
                    self._path,
                )
        return environment
