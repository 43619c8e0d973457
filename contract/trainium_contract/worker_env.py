"""Names that operator and worker share: labels, environment variables, paths, ports.

Invariant: the operator writes these names into pods and the agent and trainer read them; nobody spells them twice.
"""

from __future__ import annotations

GROUP = "trainium.dev"
VERSION = "v1alpha1"
PLURAL = "trainingjobs"
KIND = "TrainingJob"

LABEL_JOB = f"{GROUP}/job-name"
LABEL_ROLE = f"{GROUP}/role"
ROLE_WORKER = "worker"
ANNOTATION_TEMPLATE_HASH = f"{GROUP}/template-hash"
FIELD_MANAGER = "trainium-operator"

TOKEN_AUDIENCE = f"{GROUP}/coordinator"
TOKEN_PATH = "/var/run/secrets/trainium.dev/token"  # noqa: S105 - a path, not a secret
CONFIG_DIRECTORY = "/etc/trainium"
CONFIG_PATH = f"{CONFIG_DIRECTORY}/trainer.yaml"
CA_PATH = f"{CONFIG_DIRECTORY}/ca.crt"
CHECKPOINT_MOUNT = "/checkpoints"
SHARED_MEMORY_MOUNT = "/dev/shm"  # noqa: S108 - the mount point that collective libraries expect
MEMORY_DIRECTORY = f"{SHARED_MEMORY_MOUNT}/trainium"
"""Snapshots and progress records; a memory-backed volume, so it survives a process but not the pod."""

COORDINATOR_PORT = 8443

ENV_COORDINATOR = "TRAINIUM_COORDINATOR"
"""`host:port` of the coordinator; the host may resolve to several addresses, only the leader answers."""
ENV_NAMESPACE = "TRAINIUM_NAMESPACE"
ENV_JOB = "TRAINIUM_JOB"
ENV_POD_NAME = "TRAINIUM_POD_NAME"
ENV_POD_UID = "TRAINIUM_POD_UID"
ENV_POD_IP = "POD_IP"
ENV_NODE_NAME = "TRAINIUM_NODE_NAME"
ENV_PROCESSES_PER_NODE = "TRAINIUM_PROCESSES_PER_NODE"
ENV_MAX_IN_PLACE_RESTARTS = "TRAINIUM_MAX_IN_PLACE_RESTARTS"
ENV_GRACE_SECONDS = "TRAINIUM_GRACE_SECONDS"
"""How long ranks may take to agree on a step, save and leave after SIGTERM or a graceful transition."""
ENV_CONFIG = "TRAINIUM_CONFIG"
ENV_MEMORY_DIRECTORY = "TRAINIUM_MEMORY_DIR"
ENV_TOKEN_PATH = "TRAINIUM_TOKEN_PATH"  # noqa: S105 - the name of a variable that holds a path
ENV_CA_PATH = "TRAINIUM_CA_PATH"
ENV_RUN_ID = "TRAINIUM_RUN_ID"
"""The TrainingJob's uid: generations of a job that was deleted and made again begin anew, also in its checkpoints."""
ENV_NEURON_DEVICES = "TRAINIUM_NEURON_DEVICES"
"""How many Neuron devices the worker must find under /dev; unset or 0 where it has none."""

# Set by the agent for each training process.
ENV_GENERATION = "TRAINIUM_GENERATION"
ENV_ATTEMPT = "TRAINIUM_ATTEMPT"
ENV_PROGRESS_FILE = "TRAINIUM_PROGRESS_FILE"
