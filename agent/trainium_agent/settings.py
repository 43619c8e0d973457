"""Read the agent's settings from its environment (names: `trainium_contract.wire.worker_env`).

Either every value is present and valid, or one sentence names what is missing or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from trainium_contract.spec.health import PreflightCheck
from trainium_contract.spec.program import ProgramSpec
from trainium_contract.spec.recovery import HangSpec
from trainium_contract.wire import worker_env
from trainium_contract.wire.log_format import choose_log_format
from trainium_contract.wire.log_line import LogFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

ENV_RANK_ENTRY = "TRAINIUM_RANK_ENTRY"
"""`module:function` that each training process calls instead of the trainer's command line."""
DEFAULT_RANK_ENTRY = "trainium_trainer.cli:main"
ENV_PAIR_ENTRY = "TRAINIUM_PAIR_ENTRY"
"""`module:function` that each process of the pairwise test calls."""
ENV_PAIR_SECONDS = "TRAINIUM_PAIR_SECONDS"
DEFAULT_PAIR_ENTRY = "trainium_trainer.checks.pair_test:main"
ENV_CHECK_ENTRY = "TRAINIUM_CHECK_ENTRY"
"""`module:function` that each process of the node's own checks calls."""
DEFAULT_CHECK_ENTRY = "trainium_trainer.checks.node_test:main"
QUICK_CHECKS = frozenset({PreflightCheck.DEVICES, PreflightCheck.MEMORY, PreflightCheck.DISK, PreflightCheck.CLOCK})
"""The checks of an agent for which none are set; the others compute with the trainer's libraries."""

DEFAULT_KERNEL_LOG = Path("/dev/kmsg")
_DEFAULT_HANG = HangSpec()
_Spec = TypeVar("_Spec", bound=BaseModel)

_REQUIRED = (
    worker_env.ENV_COORDINATOR,
    worker_env.ENV_NAMESPACE,
    worker_env.ENV_JOB,
    worker_env.ENV_POD_NAME,
    worker_env.ENV_POD_UID,
    worker_env.ENV_POD_IP,
    worker_env.ENV_NODE_NAME,
    worker_env.ENV_PROCESSES_PER_NODE,
    worker_env.ENV_MAX_IN_PLACE_RESTARTS,
    worker_env.ENV_GRACE_SECONDS,
    worker_env.ENV_CONFIG,
)


class SettingsError(ValueError):
    """The environment is not one that the operator creates; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One name and port of the coordinator; the name may stand for several addresses."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The agent's settings: its pod, its coordinator and its limits."""

    coordinator: tuple[Endpoint, ...]
    namespace: str
    job: str
    pod_name: str
    pod_uid: str
    pod_ip: str
    node_name: str
    processes_per_node: int
    max_in_place_restarts: int
    grace_seconds: float
    config_path: Path
    memory_directory: Path
    token_path: Path
    ca_path: Path
    neuron_devices: int = 0
    unit_nodes: int = 1
    """Nodes of the UltraServer that work as one with this one."""
    rank_entry: str = DEFAULT_RANK_ENTRY
    kernel_log: Path = DEFAULT_KERNEL_LOG
    checks: frozenset[PreflightCheck] = QUICK_CHECKS
    """Checks before the pod may join."""
    minimum_bandwidth: float = 0.0
    """Lowest bandwidth of an all-reduce, in Gbit/s; 0 to only measure it."""
    check_seconds: float = 60.0
    """Time limit of the checks."""
    check_entry: str = DEFAULT_CHECK_ENTRY
    scratch_directory: Path | None = None
    """Directory of caches; None if not set."""
    hang: HangSpec = _DEFAULT_HANG
    """When a stalled rank counts as hung."""
    background_sizes: tuple[int, ...] = ()
    """Numbers of nodes that an idle spare compiles for."""
    pair_entry: str = DEFAULT_PAIR_ENTRY
    pair_seconds: float = 8.0
    """Time limit of one exchange of the pairwise test, at least a second."""
    log_format: LogFormat = LogFormat.TEXT
    required_files: tuple[Path, ...] = ()
    """Files that the ranks read, and that must not be empty."""
    program: ProgramSpec | None = None
    """Program of the job; None for the built-in trainer."""

    @property
    def run_id(self) -> str:
        """Identifier of the job in this cluster."""
        return f"{self.namespace}.{self.job}"

    @property
    def rules_path(self) -> Path:
        """Path of `spec.recovery.rules`, if the job has any."""
        return self.config_path.with_name(worker_env.RULES_NAME)

    @property
    def largest_nodes(self) -> int:
        """Return the largest number of nodes of the job, from the file beside the configuration; 0 without the file."""
        try:
            text = self.config_path.with_name(worker_env.NODES_NAME).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return 0
        return int(text) if text.isdigit() else 0

    @property
    def progress_directory(self) -> Path:
        """Directory of the ranks' progress records."""
        return self.memory_directory / "progress"


def parse_settings(environment: Mapping[str, str]) -> AgentSettings:
    """Parse the settings of an environment.

    Raises SettingsError with one sentence about everything that is missing, or about the first value that is wrong.
    """
    missing = [name for name in _REQUIRED if not environment.get(name)]
    if missing:
        raise SettingsError(
            f"The pod lacks the environment variable{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            "the operator sets them in every worker pod, so start the agent through a TrainingJob."
        )
    rank_entry = environment.get(ENV_RANK_ENTRY, DEFAULT_RANK_ENTRY)
    if rank_entry.count(":") != 1:
        raise SettingsError(f"{ENV_RANK_ENTRY}={rank_entry!r} must have the form module:function.")
    program = _parse_spec(ProgramSpec, environment, worker_env.ENV_PROGRAM, "spec.program")
    config_path, checks = Path(environment[worker_env.ENV_CONFIG]), _parse_checks(environment)
    return AgentSettings(
        coordinator=_parse_endpoints(environment[worker_env.ENV_COORDINATOR]),
        namespace=environment[worker_env.ENV_NAMESPACE],
        job=environment[worker_env.ENV_JOB],
        pod_name=environment[worker_env.ENV_POD_NAME],
        pod_uid=environment[worker_env.ENV_POD_UID],
        pod_ip=environment[worker_env.ENV_POD_IP],
        node_name=environment[worker_env.ENV_NODE_NAME],
        processes_per_node=_parse_integer(environment, worker_env.ENV_PROCESSES_PER_NODE, 1),
        max_in_place_restarts=_parse_integer(environment, worker_env.ENV_MAX_IN_PLACE_RESTARTS, 0),
        grace_seconds=_parse_number(environment, worker_env.ENV_GRACE_SECONDS),
        config_path=config_path,
        memory_directory=Path(environment.get(worker_env.ENV_MEMORY_DIRECTORY) or worker_env.MEMORY_DIRECTORY),
        token_path=Path(environment.get(worker_env.ENV_TOKEN_PATH) or worker_env.TOKEN_PATH),
        ca_path=Path(environment.get(worker_env.ENV_CA_PATH) or worker_env.CA_PATH),
        neuron_devices=_parse_integer(environment, worker_env.ENV_NEURON_DEVICES, 0, default="0"),
        unit_nodes=_parse_integer(environment, worker_env.ENV_UNIT_NODES, 1, default="1"),
        rank_entry=rank_entry,
        kernel_log=Path(environment.get(worker_env.ENV_KERNEL_LOG) or DEFAULT_KERNEL_LOG),
        pair_seconds=_parse_number(environment, ENV_PAIR_SECONDS, default="8"),
        pair_entry=environment.get(ENV_PAIR_ENTRY) or DEFAULT_PAIR_ENTRY,
        hang=_parse_spec(HangSpec, environment, worker_env.ENV_HANG_LIMITS, "spec.recovery.hang") or HangSpec(),
        background_sizes=_parse_sizes(environment.get(worker_env.ENV_BACKGROUND_SIZES, "")),
        checks=checks,
        check_seconds=_parse_number(environment, worker_env.ENV_PREFLIGHT_SECONDS, default="60"),
        minimum_bandwidth=_parse_number(environment, worker_env.ENV_MINIMUM_BANDWIDTH, "Gbit/s", default="0"),
        check_entry=environment.get(ENV_CHECK_ENTRY) or DEFAULT_CHECK_ENTRY,
        scratch_directory=Path(environment["XDG_CACHE_HOME"]) if environment.get("XDG_CACHE_HOME") else None,
        log_format=_parse_log_format(environment),
        required_files=(config_path,),
        program=program,
    )


def _parse_log_format(environment: Mapping[str, str]) -> LogFormat:
    try:
        return choose_log_format(environment)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _parse_checks(environment: Mapping[str, str]) -> frozenset[PreflightCheck]:
    """Return the named checks; unknown names are ignored."""
    text = environment.get(worker_env.ENV_PREFLIGHT)
    if text is None:
        return QUICK_CHECKS
    checks = {check.value: check for check in PreflightCheck}
    return frozenset(checks[name] for name in text.split(",") if name in checks)


def _parse_sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise SettingsError(
            f"{worker_env.ENV_BACKGROUND_SIZES}={text!r} must be numbers of nodes separated by commas, "
            "for instance 64,128."
        )
    return tuple(map(int, parts))


def _parse_spec(kind: type[_Spec], environment: Mapping[str, str], name: str, field: str) -> _Spec | None:
    """Return a part of the job's spec from its JSON; None without it."""
    text = environment.get(name)
    try:
        return kind.model_validate_json(text) if text else None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(str(part) for part in first["loc"]) or "the text"
        raise SettingsError(f"{name} must be {field} as JSON: {location}: {first['msg']}.") from error


def _parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    endpoints = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65535:
            raise SettingsError(
                f"{worker_env.ENV_COORDINATOR}={text!r} must be host:port (several, separated by commas, are allowed), "
                "for instance trainium-operator-coordinator.trainium-system.svc:8443."
            )
        endpoints.append(Endpoint(host.strip("[]"), int(port)))
    return tuple(endpoints)


def _parse_integer(environment: Mapping[str, str], name: str, minimum: int, *, default: str = "") -> int:
    text = environment.get(name, default)
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise SettingsError(f"{name}={text!r} must be a whole number of at least {minimum}.")
    return int(text)


def _parse_number(environment: Mapping[str, str], name: str, unit: str = "seconds", *, default: str = "") -> float:
    text = environment.get(name, default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SettingsError(f"{name}={text!r} must be a number of {unit}, zero or more.")
    return value
