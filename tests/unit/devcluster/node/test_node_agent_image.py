"""The agent's image on a process node: a folder that a copy of it can be started from, whatever the image holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainium_contract.wire.worker_env import AGENT_INTERPRETER, AGENT_MOUNT
from trainium_devcluster.node.processes.programs import agent_mounts, link_agent
from trainium_operator.plan.manifests import worker_pod


def test_a_copy_of_the_folder_starts_the_agent_s_interpreter_without_a_path(tmp_path: Path) -> None:
    folder, copy = tmp_path / "agent", tmp_path / "pod" / "trainium"
    link_agent(folder, Path(sys.executable).parent)
    link_agent(folder, Path(sys.executable).parent)  # as at the second start of a node
    prefix = [each.replace(AGENT_MOUNT, str(folder)) for each in AGENT_INTERPRETER]
    command = [*prefix, "-c", worker_pod.COPY_AGENT, str(folder), str(copy)]
    for _ in range(2):  # a kubelet may start an init container again
        subprocess.run(command, check=True, env={}, timeout=60)
    script = (
        "import json, sys, trainium_agent, trainium_contract; print(json.dumps([sys.prefix, trainium_agent.__file__]))"
    )
    started = [each.replace(AGENT_MOUNT, str(copy)) for each in AGENT_INTERPRETER]
    done = subprocess.run([*started, "-c", script], check=True, env={}, capture_output=True, text=True, timeout=60)
    prefix_seen, module = json.loads(done.stdout)
    assert prefix_seen == str(copy)
    assert Path(module).name == "__init__.py"


@pytest.mark.parametrize(
    ("image", "mounted"),
    [
        ("trainium-agent:0.1.0", True),
        ("registry:5000/team/trainium-agent@sha256:abc", True),
        ("trainium-agent", True),
        ("team/torchtitan:5", False),
        ("trainium-agents:1", False),
        ("", False),
    ],
)
def test_only_containers_of_the_agent_s_image_have_its_folder(image: str, mounted: bool) -> None:
    assert [mount.target for mount in agent_mounts(image, Path("/node/agent"))] == [AGENT_MOUNT] * mounted
