"""Environment that the operator gives a worker's pod, for tests of the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def environment(tmp_path: Path, **changes: str) -> dict[str, str]:
    """Complete and valid, but for the changes; the configuration is below the folder."""
    (tmp_path / "trainer.yaml").write_text("model: {}\n")
    return {
        "TRAINIUM_COORDINATOR": "127.0.0.1:8443",
        "TRAINIUM_NAMESPACE": "team",
        "TRAINIUM_JOB": "job",
        "TRAINIUM_POD_NAME": "job-w-0",
        "TRAINIUM_POD_UID": "uid",
        "POD_IP": "127.0.0.1",
        "TRAINIUM_NODE_NAME": "node",
        "TRAINIUM_PROCESSES_PER_NODE": "2",
        "TRAINIUM_MAX_IN_PLACE_RESTARTS": "3",
        "TRAINIUM_GRACE_SECONDS": "30",
        "TRAINIUM_CONFIG": str(tmp_path / "trainer.yaml"),
        "TRAINIUM_MEMORY_DIR": str(tmp_path / "memory"),
        **changes,
    }
