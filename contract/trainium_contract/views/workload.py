"""Describe what a job runs to programs that show it, from the job as the API server has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.views.raw import read_mapping, read_text, strip_control_characters
from trainium_contract.wire.worker_env import AGENT_INTERPRETER, CHECKPOINT_MOUNT

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_COMMAND_LENGTH = 60
_PERSISTENT_KINDS = ("hostPath", "persistentVolumeClaim", "uri")
"""Storage that outlives a pod."""


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """The program of the workers, and where its checkpoints are."""

    name: str
    """The model, or the start of the command."""
    checkpoint_root: str
    """Folder or bucket of its checkpoints, as the workers see it; empty if it is not known."""
    stored_path: str
    """Path of its checkpoints below the root of the job's storage."""
    interpreter: tuple[str, ...]
    """Command in a worker that runs the agent's modules."""
    has_tools: bool
    """Whether a worker can verify checkpoints and record steps."""


def read_workload(job: Mapping[str, Any]) -> WorkloadView:
    """Return what a job runs."""
    metadata, spec = read_mapping(job, "metadata"), read_mapping(job, "spec")
    program, storage = read_mapping(spec, "program"), read_mapping(read_mapping(spec, "checkpoint"), "storage")
    sub_path = read_text(storage, "subPath")
    if program:
        root = read_text(read_mapping(program, "checkpoints"), "path")
        stored_path = "/".join(filter(None, (sub_path, root.removeprefix(CHECKPOINT_MOUNT).strip("/"))))
        return WorkloadView(_format_command(program), root, stored_path, tuple(AGENT_INTERPRETER), has_tools=False)
    model = read_mapping(read_mapping(spec, "trainer"), "model")
    name = read_text(model, "preset") or strip_control_characters(str(read_mapping(model, "weights").get("path") or ""))
    stored_path = sub_path or f"{read_text(metadata, 'namespace')}/{read_text(metadata, 'name')}"
    root = f"{read_text(storage, 'uri') or CHECKPOINT_MOUNT}/{stored_path}"
    if not any(storage.get(kind) for kind in _PERSISTENT_KINDS):
        root = CHECKPOINT_MOUNT
    return WorkloadView(name or "model of its own shape", root, stored_path, ("python",), has_tools=True)


def _format_command(program: Mapping[str, Any]) -> str:
    command_parts = (program.get("command"), program.get("args"))
    # A script has line breaks, which the page does not.
    words = " ".join(str(word) for part in command_parts if isinstance(part, list) for word in part).split()
    command = strip_control_characters(" ".join(words))
    return command if len(command) <= _MAX_COMMAND_LENGTH else f"{command[:_MAX_COMMAND_LENGTH]}..."
