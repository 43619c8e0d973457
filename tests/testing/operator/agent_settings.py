"""Settings of an agent that connects to a coordinator under test."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from trainium_agent.settings import AgentSettings


def agent_settings(folder: Path, **changes: Any) -> AgentSettings:
    """Return the settings of the agent of pod w-0, whose files are in the folder, with these changes."""
    settings = AgentSettings(
        coordinator=(),
        namespace="team",
        job="llama",
        pod_name="w-0",
        pod_uid="uid-w-0",
        pod_ip="127.0.0.2",
        node_name="n",
        processes_per_node=1,
        max_in_place_restarts=3,
        grace_seconds=5,
        config_path=folder / "trainer.yaml",
        memory_directory=folder,
        token_path=folder / "token",
        ca_path=folder / "ca.crt",
    )
    return replace(settings, **changes)
