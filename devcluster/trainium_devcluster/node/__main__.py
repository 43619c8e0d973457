"""Run a node: `python -m trainium_devcluster.node OPTIONS_FILE`.

Guarantees:
- The process enters its namespaces and forks the launcher before large imports and before the first thread, so that the
  launcher is small and the kernel permits the namespaces.
"""

import contextlib
import logging
import os
import sys
from pathlib import Path

from trainium_devcluster.errors import ClusterError
from trainium_devcluster.node.options import NodeOptions
from trainium_devcluster.node.processes import isolation
from trainium_devcluster.node.processes.launcher import fork_launcher


def main() -> int:
    """Run the node until it is stopped; return the exit code."""
    options = NodeOptions.read(Path(sys.argv[1]))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.suppress(PermissionError):
        os.setsid()  # fails if the process is already a session leader
    try:
        isolation_mode = isolation.detect()
    except ClusterError as error:
        return _report(error)
    isolation.enter(isolation_mode)
    launcher_socket, _ = fork_launcher(isolation_mode)

    import asyncio  # noqa: PLC0415 - after the fork, see above

    from trainium_contract.api_server.errors import ClientError  # noqa: PLC0415
    from trainium_devcluster.node import runtime  # noqa: PLC0415

    try:
        asyncio.run(runtime.run(options, launcher_socket))
    except (ClientError, ClusterError, ValueError, OSError) as error:
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    logging.getLogger(__name__).error("the node cannot run: %s", error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
