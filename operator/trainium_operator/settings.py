"""Define the operator's settings in one typed list: from flags, `TRAINIUM_OPERATOR_*` variables, or defaults.

Invariant: a flag wins over its variable; an invalid value is refused with a sentence before anything starts.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import sys
import uuid
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from trainium_contract.spec.pod_template import describe_shape_error
from trainium_contract.wire.log_line import LogFormat
from trainium_contract.wire.worker_env import COORDINATOR_PORT
from trainium_operator.command_line import HELP_OPTIONS, PROGRAM, fail, run_command
from trainium_operator.plan.model.observed import PlanSettings, WorkerIngress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
PREFIX = "TRAINIUM_OPERATOR_"
LOG_LEVELS = ("debug", "info", "warning", "error")


def _declare_setting(default: Any, text: str, *, variable: str = "") -> Any:
    """Declare a setting: default, help text, and another variable to read it from (the downward API's)."""
    return field(default=default, metadata={"help": text, "variable": variable})


MAX_NAMESPACES = 50
"""Maximum number of namespaces served by name: each takes five connections to the API server, one for each kind."""
LEASE_SECONDS = (3, 600)
"""Shortest and longest time of the Lease."""
MAX_NAMED_JOBS = 500
"""Maximum number of jobs with separate metrics: about 25 time series each, and 0.25 ms of the loop at each scrape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings; their help texts describe them. Times in seconds."""

    namespace: str = _declare_setting(
        "",
        "namespace of the operator itself (Lease, Secret, memory of bad machines); default: the pod's",
        variable="POD_NAMESPACE",
    )
    watch_namespace: str = _declare_setting("", "a namespace to serve in addition to --watch-namespaces")
    watch_namespaces: str = _declare_setting(
        "", f"serve the jobs of these namespaces only, separated by commas, at most {MAX_NAMESPACES}; empty: of all"
    )
    watch_nodes: bool = _declare_setting(True, "read nodes, to see deleted and unready ones")
    kubeconfig: str = _declare_setting("", "kubeconfig file, for running outside of a pod")
    trainer_image: str = _declare_setting("trainium-trainer:latest", "worker image of jobs that name none")
    agent_image: str = _declare_setting(
        "trainium-agent:latest", "image whose agent is copied into the workers of programs"
    )
    image_pull_policy: str = _declare_setting("IfNotPresent", "imagePullPolicy of worker containers")
    image_pull_secrets: str = _declare_setting("", "names of image pull secrets of worker pods, separated by commas")
    worker_user: int | None = _declare_setting(
        1000, "user and group id of worker processes; empty: the platform assigns them"
    )
    worker_template: str = _declare_setting(
        "",
        "pod template for the workers of all jobs, as JSON (metadata and spec); the template of a job takes precedence",
    )
    lease_name: str = _declare_setting("trainium-operator", "name of the Lease that the acting replica holds")
    lease_duration: int = _declare_setting(
        4, "seconds after the last renewal that was seen in which no other replica takes the Lease"
    )
    lease_renew_deadline: float = _declare_setting(3.0, "seconds without a renewal after which the holder stops acting")
    lease_retry: float = _declare_setting(1.0, "seconds between two renewals")
    coordinator_service: str = _declare_setting(
        "trainium-operator-coordinator", "name of the headless Service by which workers find the coordinator"
    )
    coordinator_port: int = _declare_setting(COORDINATOR_PORT, "port of the coordinator (HTTPS); 0: any free one")
    coordinator_address: str = _declare_setting(
        "", "host:port that workers are given; default: the Service's name and the coordinator's port"
    )
    tls_secret_name: str = _declare_setting(
        "", "Secret with the coordinator's certificates; default: <coordinator service>-tls"
    )
    quarantine_name: str = _declare_setting(
        "", "ConfigMap in the operator's namespace that remembers bad machines; default: <lease name>-quarantine"
    )
    keep_memory: bool = _declare_setting(
        False, "keep that ConfigMap when the operator is uninstalled, for the next one of the same name"
    )
    deployment: str = _declare_setting(
        "",
        "Deployment that this operator is a part of: its Lease and its memory of bad machines are removed with it; "
        "empty: they stay",
    )
    taint_nodes: bool = _declare_setting(False, "taint nodes in quarantine; otherwise only TrainingJobs avoid them")
    kueue: bool = _declare_setting(False, "ask Kueue for the quota of jobs that name a queue")
    extra_priority_class: str = _declare_setting(
        "",
        "PriorityClass, below that of any other pod, of workers on idle nodes (elasticity.idleNodes); empty: none are "
        "taken",
    )
    dra: bool = _declare_setting(False, "let jobs claim their devices (dynamic resource allocation)")
    job_network_policy: bool = _declare_setting(
        False,
        "create a NetworkPolicy for the workers of each job: only they themselves and this operator may reach them",
    )
    operator_labels: str = _declare_setting(
        "",
        "labels of this operator's own pods (key=value, separated by commas), which --job-network-policy admits",
    )
    object_labels: str = _declare_setting(
        "", "labels (key=value, separated by commas) of every object that the operator creates"
    )
    job_ingress: str = _declare_setting(
        "", "further ingress rules of the workers' NetworkPolicies, as a JSON list of objects with `from` and `ports`"
    )
    metrics_port: int = _declare_setting(8080, "port of /livez, /readyz and /metrics (HTTP); 0: any free one")
    secure_metrics: bool = _declare_setting(
        False, "serve /metrics at the HTTPS port only, to users with the right to get the nonResourceURL /metrics"
    )
    ui: bool = _declare_setting(
        False, "serve pages of jobs (/ui) at the HTTPS port, to each user what the API server lets them read"
    )
    ui_service: str = _declare_setting(
        "", "name of the Service by which /ui is reached, a name of the operator's own certificate"
    )
    https_port: int = _declare_setting(
        8444, "port for readers (HTTPS), open where something is served there; 0: any free one"
    )
    https_certificate: str = _declare_setting(
        "", "folder with tls.crt and tls.key for the HTTPS port; default: the coordinator's certificate"
    )
    named_jobs: int = _declare_setting(0, "jobs with separate metrics, by namespace and name; 0: none")
    bind_address: str = _declare_setting("", "address to listen at; default: the pod's, else all", variable="POD_IP")
    workers: int = _declare_setting(
        32, "jobs that are reconciled at the same time; half of them at most may be slow ones (a webhook that hangs)"
    )
    status_interval: float = _declare_setting(5.0, "shortest time between two status writes that only report progress")
    resync: float = _declare_setting(300.0, "every job is reconciled at least once in this time, even without changes")
    log_level: str = _declare_setting("info", "debug, info, warning or error")
    log_format: str = _declare_setting("json", "json or text")
    worker_log_format: str = _declare_setting("text", "log format of agents and training processes: json or text")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Return the served namespaces without duplicates; empty for all."""
        given = f"{self.watch_namespaces},{self.watch_namespace}".split(",")
        return tuple(dict.fromkeys(name.strip() for name in given if name.strip()))

    def build_worker_ingress(self, namespace: str) -> WorkerIngress | None:
        """Return the rules of each job's NetworkPolicy, for an operator in this namespace; None without policies."""
        if not self.job_network_policy:
            return None
        labels = _parse_labels(self.operator_labels)
        return WorkerIngress(
            operator_namespace=namespace, operator_labels=labels, rules=_parse_ingress_rules(self.job_ingress)
        )

    def build_plan_settings(self, namespace: str) -> PlanSettings:
        """Return what plans need of the settings, for an operator in this namespace."""
        address = f"{self.coordinator_service}.{namespace}.svc:{self.coordinator_port}"
        return PlanSettings(
            image=self.trainer_image,
            agent_image=self.agent_image,
            coordinator=self.coordinator_address or address,
            status_interval_seconds=self.status_interval,
            image_pull_policy=self.image_pull_policy,
            image_pull_secrets=tuple(name for name in self.image_pull_secrets.split(",") if name),
            worker_user=self.worker_user,
            worker_template=self.template,
            extra_priority_class=self.extra_priority_class,
            worker_ingress=self.build_worker_ingress(namespace),
            worker_log_format=LogFormat(self.worker_log_format),
        )

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of every object that the operator creates. Raises ValueError if they are invalid."""
        return _parse_labels(self.object_labels)

    @property
    def secret_name(self) -> str:
        """Return the name of the Secret with the certificates."""
        return self.tls_secret_name or f"{self.coordinator_service}-tls"

    @property
    def memory_name(self) -> str:
        """Return the name of the ConfigMap with the memory of bad machines."""
        return self.quarantine_name or f"{self.lease_name}-quarantine"

    @property
    def template(self) -> dict[str, Any]:
        """Return the pod template for all workers. Raises ValueError if it is invalid."""
        return _parse_template(self.worker_template)

    @property
    def serves_readers(self) -> bool:
        """Return whether anything is served at the HTTPS port."""
        return self.secure_metrics or self.ui

    def find_problems(self) -> list[str]:
        """Return all problems of the values, one sentence each."""
        checks = (
            *self._list_lease_checks(),
            ("--workers", self.workers, self.workers >= 1, "at least 1"),
            ("--status-interval", self.status_interval, self.status_interval > 0, "above 0 seconds"),
            ("--resync", self.resync, self.resync > 0, "above 0 seconds"),
            ("--coordinator-port", self.coordinator_port, 0 <= self.coordinator_port <= 65535, "from 0 to 65535"),
            ("--metrics-port", self.metrics_port, 0 <= self.metrics_port <= 65535, "from 0 to 65535"),
            ("--https-port", self.https_port, 0 <= self.https_port <= 65535, "from 0 to 65535"),
            (
                "--https-port",
                self.https_port,
                self.https_port not in {self.metrics_port, self.coordinator_port} - {0} or not self.serves_readers,
                "another port than --metrics-port and --coordinator-port",
            ),
            ("--taint-nodes", self.taint_nodes, self.watch_nodes or not self.taint_nodes, "given with --watch-nodes"),
            ("--named-jobs", self.named_jobs, 0 <= self.named_jobs <= MAX_NAMED_JOBS, f"from 0 to {MAX_NAMED_JOBS}"),
            (
                "--watch-namespaces",
                ",".join(self.namespaces),
                all(_NAMESPACE.fullmatch(name) for name in self.namespaces) and len(self.namespaces) <= MAX_NAMESPACES,
                f"at most {MAX_NAMESPACES} names of namespaces, separated by commas",
            ),
            (
                "--worker-template",
                self.worker_template[:100],
                _is_read(_parse_template, self.worker_template),
                "a JSON object with metadata and spec of a pod",
            ),
            (
                "--operator-labels",
                self.operator_labels,
                _is_read(_parse_labels, self.operator_labels)
                and bool(self.operator_labels or not self.job_network_policy),
                "key=value, separated by commas, and given with --job-network-policy",
            ),
            (
                "--object-labels",
                self.object_labels,
                _is_read(_parse_labels, self.object_labels),
                "key=value, with commas",
            ),
            (
                "--job-ingress",
                self.job_ingress,
                _is_read(_parse_ingress_rules, self.job_ingress),
                "a JSON list of objects with no other keys than from and ports, each a list",
            ),
            ("--log-level", self.log_level, self.log_level in LOG_LEVELS, "one of " + ", ".join(LOG_LEVELS)),
            *(
                (flag, given, given in ("json", "text"), "json or text")
                for flag, given in (("--log-format", self.log_format), ("--worker-log-format", self.worker_log_format))
            ),
        )
        return [f"{flag} must be {rule}, not {value!r}" for flag, value, good, rule in checks if not good]

    def _list_lease_checks(self) -> tuple[tuple[str, float, bool, str], ...]:
        """Return the checks that a holder that loses the Lease stops before another may take it.

        One failed renewal must be harmless.
        """
        duration, deadline, retry = self.lease_duration, self.lease_renew_deadline, self.lease_retry
        low, high = LEASE_SECONDS
        longest = f"four fifths of --lease-duration ({0.8 * duration:g})"
        return (
            ("--lease-duration", duration, low <= duration <= high, f"from {low} to {high} seconds"),
            ("--lease-renew-deadline", deadline, 1 <= deadline <= 0.8 * duration, f"from 1 second to {longest}"),
            (
                "--lease-retry",
                retry,
                0.2 <= retry <= deadline / 2,
                f"from 0.2 seconds to half of --lease-renew-deadline ({deadline / 2:g})",
            ),
        )


_DESCRIPTION = """Run TrainingJobs.

Each option can also be set by its variable. Other commands: trainium-operator check, trainium-operator simulate.
"""


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Parse a command line and the environment. Ends the process with a sentence if a value is invalid."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)
    app.command(help=_DESCRIPTION)(_build_settings_command())
    settings = run_command(app, arguments, PROGRAM)
    if not isinstance(settings, Settings):
        sys.exit(settings)  # the help was printed
    problems = settings.find_problems()
    if problems:
        fail(f"{problems[0]}; see {PROGRAM} --help")
    return settings


def _build_settings_command() -> Callable[..., Settings]:
    """Return a function whose parameters are the settings, each with its flag, its variables and its help."""
    types = get_type_hints(Settings)
    parameters = []
    for setting in fields(Settings):
        kind, variable = types[setting.name], PREFIX + setting.name.upper()
        parser, metavar = _PARSERS.get(kind, (None, None))
        kind = kind if parser is None else str  # a bool would be a flag without a value
        option = typer.Option(
            f"--{setting.name.replace('_', '-')}",
            envvar=[variable, setting.metadata["variable"]] if setting.metadata["variable"] else variable,
            help=setting.metadata["help"],
            parser=parser,
            metavar=metavar,
        )
        annotation = Annotated[kind, option]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(
                setting.name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=annotation
            )
        )

    def read(**values: Any) -> Settings:
        return Settings(**values)

    read.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return read


def create_process_identity(environment: Mapping[str, str]) -> str:
    """Return the identity of the Lease's holder: the same after a restart of the container in its pod, else unique."""
    pod, uid = environment.get("POD_NAME"), environment.get("POD_UID")
    return f"{pod}_{uid}" if pod and uid else f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:12]}"


def _parse_template(text: str) -> dict[str, Any]:
    """Parse a pod template. Raises ValueError."""
    rules = json.loads(text or "{}")
    if not isinstance(rules, dict) or not rules.keys() <= {"metadata", "spec"}:
        raise ValueError(text)
    if not all(isinstance(part, dict) for part in rules.values()) or describe_shape_error(rules):
        raise ValueError(text)
    return rules


def _parse_labels(text: str) -> dict[str, str]:
    """Parse labels. Raises ValueError."""
    pairs = [pair.partition("=") for pair in text.split(",") if text]
    if any(not key.strip() or not equals for key, equals, _ in pairs):
        raise ValueError(text)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _parse_ingress_rules(text: str) -> tuple[dict[str, Any], ...]:
    """Parse ingress rules. Raises ValueError; the API server checks `from` and `ports`."""
    rules = json.loads(text or "[]")
    good = isinstance(rules, list) and all(
        isinstance(rule, dict) and rule.keys() <= {"from", "ports"} and all(isinstance(x, list) for x in rule.values())
        for rule in rules
    )
    if not good:
        raise ValueError(text)
    return tuple(rules)


def _is_read(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


def _parse_boolean(value: str | bool) -> bool:
    text = str(value).lower()
    if text in ("true", "yes", "1"):
        return True
    if text in ("false", "no", "0"):
        return False
    raise typer.BadParameter(f"must be true or false, not {value!r}")


def _parse_optional_integer(value: str | int) -> int | None:
    try:
        return int(value) if value != "" else None
    except ValueError:
        raise typer.BadParameter(f"must be an integer or empty, not {value!r}") from None


_PARSERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    bool: (_parse_boolean, "true|false"),
    int | None: (_parse_optional_integer, "INTEGER"),
}
"""Functions that parse values which may be empty, or have no value in a command line of click."""
