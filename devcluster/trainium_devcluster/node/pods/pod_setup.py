"""Set up a pod: its directory, volumes, hosts file, and the command line of each container.

Guarantees:
- All files are in one directory named after the pod's uid, which `remove` deletes.
- A container starts only with a complete configuration; else it waits with CreateContainerConfigError.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainium_contract.api_server.errors import UnavailableError
from trainium_devcluster.node.api.events import EventSeverity
from trainium_devcluster.node.api.objects import Json, get_name, get_namespace, get_uid
from trainium_devcluster.node.network.service_directory import HostsFile
from trainium_devcluster.node.pods.container import Container
from trainium_devcluster.node.pods.node_services import NodeServices
from trainium_devcluster.node.pods.probe_actions import Execute, ProbeTarget
from trainium_devcluster.node.processes.command import ADDABLE_CAPABILITIES, CAPABILITIES, ContainerCommand
from trainium_devcluster.node.processes.programs import build_agent_mounts, remount_hidden
from trainium_devcluster.node.spec import environment, mounts, unsupported_fields
from trainium_devcluster.node.spec.downward_api import PodFacts
from trainium_devcluster.node.spec.environment import ConfigError
from trainium_devcluster.node.volumes.volumes import PodVolumes

_CONFIG_RETRY_SECONDS = 1.0
_MAX_HOSTNAME = 63


@dataclass(slots=True, eq=False)
class PodSetup:
    """The environment of one pod."""

    services: NodeServices
    pod: Callable[[], Json]
    address: str
    folder: Path = field(init=False)
    volumes: PodVolumes = field(init=False)

    def __post_init__(self) -> None:
        self.folder = find_pod_folder(self.services.options.state_dir, get_uid(self.pod()))
        self.volumes = PodVolumes(self.services.api, self.services.cache, self.folder, self._collect_facts)

    @property
    def hostname(self) -> str:
        """The host name that the pod's processes see."""
        spec = self.pod()["spec"]
        if spec.get("hostNetwork"):
            return self.services.options.name
        return str(spec.get("hostname") or get_name(self.pod())[:_MAX_HOSTNAME].rstrip("-."))

    async def prepare(self) -> None:
        """Create the pod's directory, volumes and hosts file.

        Raises:
            VolumeError: when a volume cannot be created yet.
        """
        await self.volumes.create()
        mounts.write_pod_files(self.folder, self.hostname)
        file = HostsFile(self.folder / "hosts", self.address, self.hostname, self.pod)
        await self.services.directory.add(get_uid(self.pod()), file)

    async def start(self, container: Container) -> float | None:
        """Start `container`; return the seconds before the next try if its configuration is not complete."""
        try:
            command, termination_log = await self._build_command(container)
        except (ConfigError, UnavailableError) as error:
            container.emit(EventSeverity.WARNING, "Failed", f"Error: {error}", container.name)
            container.set_waiting("CreateContainerConfigError", str(error))
            return _CONFIG_RETRY_SECONDS
        await container.start(command, str(termination_log))
        return None

    def probe_target(self, spec: Json, execute: Execute) -> ProbeTarget:
        """Return the target of a container's probes."""
        return ProbeTarget(self.address, spec, execute, self.services.http)

    def remove(self) -> None:
        """Remove all files; the containers have ended."""
        self.services.directory.remove(get_uid(self.pod()))
        self.volumes.remove()

    def _collect_facts(self) -> PodFacts:
        return PodFacts(self.pod(), self.address, self.services.address)

    async def _build_command(self, container: Container) -> tuple[ContainerCommand, Path]:
        spec, pod = container.spec, self.pod()
        if problem := unsupported_fields.check_non_root(pod, spec):
            raise ConfigError(problem)
        objects: dict[tuple[str, str], Json | None] = {}
        for plural, object_name in environment.find_references(spec):
            # A change of the object does not affect a running container; the volumes' listener wakes without effect.
            objects[plural, object_name] = await self.services.cache.acquire(
                plural, get_namespace(pod), object_name, get_uid(pod), self.volumes.changed.set
            )
        variables = environment.build_environment(
            spec, self._collect_facts(), lambda plural, key: objects.get((plural, key))
        )
        env = self.services.build_base_environment(self.hostname) | variables
        run_folder = container.folder / f"run-{container.restart_count}-{int(container.has_started)}"
        run_folder.mkdir(parents=True, exist_ok=True)
        termination_log = run_folder / "termination-log"
        termination_log.write_bytes(b"")
        termination_log.chmod(0o666)
        volume_mounts = mounts.build_volume_mounts(spec, self.volumes.paths)
        own = mounts.build_node_files(spec, self.folder, termination_log, {m.target for m in volume_mounts})
        state_dir = str(self.services.options.state_dir)
        programs = remount_hidden(volume_mounts, self.services.programs, state_dir)
        agent = build_agent_mounts(spec.get("image", ""), self.services.agent_folder)
        context = spec.get("securityContext") or {}
        return (
            ContainerCommand(
                argv=environment.expand_command(spec, env),
                env=env,
                cwd=spec.get("workingDir") or "/",
                hostname=self.hostname,
                mounts=(*own, *volume_mounts, *programs, *agent),
                scratch=str(run_folder / "scratch"),
                shm=str(self.volumes.shm),
                hidden=state_dir,
                read_only_root=bool(context.get("readOnlyRootFilesystem")),
                capabilities=list_capabilities(context),
                no_new_privileges=context.get("allowPrivilegeEscalation") is False,
            ),
            termination_log,
        )


def find_pod_folder(state_dir: Path, pod_uid: str) -> Path:
    """Return the folder of a pod."""
    return state_dir / "pods" / pod_uid


def list_capabilities(context: Json) -> tuple[int, ...]:
    """Return the capabilities that a container keeps, as numbers."""
    changes = context.get("capabilities") or {}
    dropped = {text.removeprefix("CAP_") for text in changes.get("drop") or []}
    capabilities = {} if "ALL" in dropped else {key: value for key, value in CAPABILITIES.items() if key not in dropped}
    for text in changes.get("add") or []:
        capabilities[text.removeprefix("CAP_")] = ADDABLE_CAPABILITIES[text.removeprefix("CAP_")]
    return tuple(sorted(capabilities.values()))
