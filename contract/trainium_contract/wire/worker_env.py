"""Define names that operator and worker share: labels, environment variables, paths, ports.

Invariant: the operator writes these names into pods and the agent and trainer read them; no other file spells them.
"""

from __future__ import annotations

GROUP = "trainium.dev"
VERSION = "v1alpha1"
PLURAL = "trainingjobs"
KIND = "TrainingJob"

LABEL_JOB = f"{GROUP}/job-name"
LABEL_ROLE = f"{GROUP}/role"
ROLE_WORKER = "worker"
ROLE_EVALUATION = "evaluation"
"""Role of the pod that measures a milestone's model; no label selector of workers matches it."""
OTHER_ROLES = f"{LABEL_ROLE},{LABEL_ROLE}!={ROLE_WORKER}"
"""Label selector of the pods of `spec.roles`, whose label is the role's name."""
LABEL_EXTRA = f"{GROUP}/extra"
"""On a worker beyond the requested ones, on an idle node: it is the first to leave."""
LABEL_UNIT = f"{GROUP}/unit"
"""On a worker of a job whose unit is the UltraServer: the unit, unique in the cluster."""
ANNOTATION_TEMPLATE_HASH = f"{GROUP}/template-hash"
ANNOTATION_AVOIDED_NODES = f"{GROUP}/avoided-nodes"
"""Host names of the nodes that the pod's affinity forbids, separated by commas."""
ANNOTATION_IMAGE = f"{GROUP}/image"
"""Image that the operator requested; an admission policy may have changed that of the container."""
FIELD_MANAGER = "trainium-operator"

TOKEN_AUDIENCE = f"{GROUP}/coordinator"
TOKEN_PATH = "/var/run/secrets/trainium.dev/token"  # noqa: S105 - a path, not a secret
CONFIG_DIRECTORY = "/etc/trainium"
CONFIG_PATH = f"{CONFIG_DIRECTORY}/trainer.yaml"
CA_PATH = f"{CONFIG_DIRECTORY}/ca.crt"
RULES_NAME = "rules.json"
"""File beside the configuration with `spec.recovery.rules` as a JSON list; absent without rules. A file instead of a
variable, so that a change reaches running workers."""
NODES_NAME = "nodes"
"""File beside the configuration with the largest number of nodes of the job. A file instead of a variable, so that a
job that grows keeps its pods."""
CHECKPOINT_MOUNT = "/checkpoints"
CACHE_DIRECTORY = "/var/cache/trainium"
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
"""Time for ranks to agree on a step, save and leave after SIGTERM or a graceful transition."""
EXIT_MARGIN_SECONDS = 10
"""Additional grace of the pod after that of the ranks, for the agent's last message."""
ENV_CONFIG = "TRAINIUM_CONFIG"
ENV_MEMORY_DIRECTORY = "TRAINIUM_MEMORY_DIR"
ENV_TOKEN_PATH = "TRAINIUM_TOKEN_PATH"  # noqa: S105 - the name of a variable that holds a path
ENV_CA_PATH = "TRAINIUM_CA_PATH"
ENV_RUN_ID = "TRAINIUM_RUN_ID"
"""The TrainingJob's uid: generations of a recreated job start at 1 again, also in its checkpoints."""
ENV_CLUSTER = "TRAINIUM_CLUSTER"
"""uid of the cluster's namespace kube-system: distinguishes jobs of one name in two clusters; may be unset."""
ENV_BACKGROUND_SIZES = "TRAINIUM_BACKGROUND_SIZES"
"""Numbers of nodes that an idle spare compiles graphs for, separated by commas; absent for none."""
ENV_COMPILE_CACHE = "TRAINIUM_COMPILE_CACHE"
"""Folder of the compiler on this node, for a program that compiles ahead."""
ENV_NODES = "TRAINIUM_NODES"
"""Number of nodes of the size that a program's `precompile.command` compiles for."""
COMPILED_FOLDER = "compiled"
"""Folder with compiled graphs, on the checkpoints' volume, of all jobs that use it."""
ENV_SHARED_COMPILE_CACHE = "TRAINIUM_SHARED_COMPILE_CACHE"
"""Folder in which nodes share compiled graphs of programs; unset if they share no volume."""
ENV_IMAGE = "TRAINIUM_IMAGE"
"""The worker's image: results of another one are not used. Unset: the versions of compiler and libraries."""
ENV_PREFLIGHT = "TRAINIUM_PREFLIGHT"
"""Names of the checks before a worker may join (`health.PreflightCheck`), separated by commas."""
ENV_PREFLIGHT_SECONDS = "TRAINIUM_PREFLIGHT_SECONDS"
"""Time limit of those checks; a check that has not ended by then counts as passed."""
ENV_MINIMUM_BANDWIDTH = "TRAINIUM_MINIMUM_BANDWIDTH_GBPS"
"""Lowest bandwidth of check Bandwidth, in Gbit/s; unset or 0: it is measured only."""
ENV_NEURON_DEVICES = "TRAINIUM_NEURON_DEVICES"
"""Number of Neuron devices that the worker must find under /dev; unset or 0 where it has none."""
ENV_UNIT_NODES = "TRAINIUM_UNIT_NODES"
"""Nodes of the UltraServer that work as one with this one; unset for single nodes."""
ENV_KERNEL_LOG = "TRAINIUM_KERNEL_LOG"
"""File, FIFO or device with the kernel's lines; unset: /dev/kmsg, which most pods may not read."""
ENV_HANG_LIMITS = "TRAINIUM_HANG_LIMITS"
"""`spec.recovery.hang` as JSON: when a process without progress counts as hung. Unset: the defaults."""
ENV_TERMINATION_LOG = "TRAINIUM_TERMINATION_LOG"
"""`terminationMessagePath` of the worker container, if its template sets one. Unset: /dev/termination-log."""
ENV_LOG_FORMAT = "TRAINIUM_LOG_FORMAT"
"""`json` or `text` (`log_line.LogFormat`): what agent and training processes write into the pod's log. Unset: text."""

ENV_PROGRAM = "TRAINIUM_PROGRAM"
"""`spec.program` as JSON: the agent runs this program in place of the trainer. Absent for the trainer."""

# The agent sets these for each training process.
ENV_GENERATION = "TRAINIUM_GENERATION"
ENV_ATTEMPT = "TRAINIUM_ATTEMPT"
ENV_CAUSE = "TRAINIUM_CAUSE"
"""Cause of the interruption before an attempt, or Resize; unset for the first one of a job."""
ENV_PROGRESS_FILE = "TRAINIUM_PROGRESS_FILE"
ENV_ACCUMULATION = "TRAINIUM_ACCUMULATION"
"""`Membership.accumulation`, for a program that states its batch."""
ENV_GLOBAL_BATCH = "TRAINIUM_GLOBAL_BATCH"
"""`program.batch.globalSize`; unset where the job declares no batch."""
ENV_WORLD_SIZE = "TRAINIUM_WORLD_SIZE"
"""The number of processes that the agents start; a launcher in them sets another WORLD_SIZE."""
ENV_REQUESTED_WORLD_SIZE = "TRAINIUM_REQUESTED_WORLD_SIZE"
"""The number of ranks at the requested size, for a program whose batch follows from it."""
ENV_ROLE_PREFIX = "TRAINIUM_ROLE_"
"""With the role's name in capitals and `_` for `-`: the addresses of its ready pods at the start, separated by commas;
unset if they have more than `MAX_ROLE_VARIABLE` characters."""
MAX_ROLE_VARIABLE = 4096
ENV_ROLES_FILE = "TRAINIUM_ROLES_FILE"
"""File with the addresses of the ready pods of each role as JSON, replaced when they change; unset without roles."""
ENV_ROLE = "TRAINIUM_ROLE"
"""In a pod of a role: the name of the role."""
ENV_ROLE_PORT = "TRAINIUM_ROLE_PORT"
"""In a pod of a role: the port at which it serves."""
AGENT_MOUNT = "/trainium"
"""Folder of the agent with its interpreter, libraries and loader: in its own image, from which an init container copies
it to a volume, and in the container of a program, which mounts the volume at the same path."""
AGENT_INTERPRETER = (
    f"{AGENT_MOUNT}/lib/ld.so",
    "--library-path",
    f"{AGENT_MOUNT}/lib",
    f"{AGENT_MOUNT}/bin/python",
    "-I",
)
"""Start of a command that needs nothing from the image in which it runs, not even a C library."""


def format_role_variable(role: str) -> str:
    """Return the name of the variable with the addresses of a role."""
    return ENV_ROLE_PREFIX + role.upper().replace("-", "_")


def compute_ranks_grace(pod_seconds: int) -> float:
    """Return the time for ranks to save in a pod with this grace period; of a short one the agent keeps half."""
    return max(pod_seconds - EXIT_MARGIN_SECONDS, pod_seconds / 2)
