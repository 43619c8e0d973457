"""Programs of a process node: their folders, volumes mounted over them, and the agent's image."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainium_contract.wire.worker_env import AGENT_INTERPRETER, AGENT_MOUNT
from trainium_devcluster.node.processes.command import Mount
from trainium_devcluster.node.processes.programs import (
    build_agent_mounts,
    create_agent_image,
    find_program_folders,
    remount_hidden,
)
from trainium_operator.plan.manifests import worker_pod


def test_program_folders_are_the_environment_its_interpreter_and_editable_sources(tmp_path: Path) -> None:
    bin_folder, base, source = tmp_path / "venv/bin", tmp_path / "base/bin", tmp_path / "checkout/contract"
    for folder in (bin_folder, base, source, tmp_path / "venv/lib/site-packages"):
        folder.mkdir(parents=True)
    (base / "python3").touch()
    (bin_folder / "python").symlink_to(base / "python3")

    folders = find_program_folders(
        bin_folder, [str(source), str(tmp_path / "venv/lib/site-packages"), "", "/no/such.zip"]
    )

    assert folders == tuple(sorted(str(folder) for folder in (tmp_path / "venv", tmp_path / "base", source)))


def test_a_program_folder_below_a_volume_of_the_node_is_mounted_again() -> None:
    volumes = [
        Mount("/state/pods/1/volumes/tmp", "/tmp"),
        Mount("/data", "/srv"),
        Mount("/state/pods/1/volumes/x", "/opt/venv/x"),
    ]

    mounts = remount_hidden(volumes, ["/tmp/checkout/.venv", "/srv/venv", "/opt/venv"], "/state")

    assert mounts == (Mount("/tmp/checkout/.venv", "/tmp/checkout/.venv", read_only=True),)


def test_a_copy_of_the_agent_folder_starts_its_interpreter(tmp_path: Path) -> None:
    folder, copy = tmp_path / "agent", tmp_path / "pod" / "trainium"
    create_agent_image(folder, Path(sys.executable).parent)
    create_agent_image(folder, Path(sys.executable).parent)  # a node starts again
    prefix = [argument.replace(AGENT_MOUNT, str(folder)) for argument in AGENT_INTERPRETER]
    command = [*prefix, "-c", worker_pod.COPY_AGENT, str(folder), str(copy)]
    for _ in range(2):  # a kubelet may start an init container again
        subprocess.run(command, check=True, env={}, timeout=60)
    script = (
        "import json, sys, trainium_agent, trainium_contract; print(json.dumps([sys.prefix, trainium_agent.__file__]))"
    )
    interpreter = [argument.replace(AGENT_MOUNT, str(copy)) for argument in AGENT_INTERPRETER]
    done = subprocess.run([*interpreter, "-c", script], check=True, env={}, capture_output=True, text=True, timeout=60)
    reported_prefix, module = json.loads(done.stdout)
    assert reported_prefix == str(copy)
    assert Path(module).name == "__init__.py"


@pytest.mark.parametrize(
    ("image", "is_mounted"),
    [
        ("trainium-agent:0.1.0", True),
        ("registry:5000/team/trainium-agent@sha256:abc", True),
        ("trainium-agent", True),
        ("team/torchtitan:5", False),
        ("trainium-agents:1", False),
        ("", False),
    ],
)
def test_only_containers_of_the_agent_image_mount_its_folder(image: str, is_mounted: bool) -> None:
    assert [mount.target for mount in build_agent_mounts(image, Path("/node/agent"))] == [AGENT_MOUNT] * is_mounted
