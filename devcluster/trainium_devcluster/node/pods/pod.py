"""Run one pod on this node: from its binding until it is deleted from the API server.

Each pod has three tasks. The lifecycle task waits for the deletion of the pod. The sync task compares, after every
change, the desired with the current state and takes the next step: create volumes, run init containers in order, start
the main containers, restart ended ones, end the pod. The status writer writes the status. Each change (a process ended,
a probe reported, the pod was edited or deleted) sets the event of each task.

Guarantees:
- Containers start only after all volumes exist.
- A pod that reached Succeeded or Failed is never started again.
- Deletion ends the containers first, then writes the final status, then removes the object.
- The pod's files are removed last.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field

from trainium_contract.api_server.errors import ApiError, ConnectionFailedError
from trainium_contract.rfc3339 import format_rfc3339
from trainium_devcluster.node.api.events import EventSeverity
from trainium_devcluster.node.api.objects import (
    Json,
    find,
    get_containers,
    get_grace_seconds,
    get_init_containers,
    get_name,
    get_namespace,
    get_uid,
    is_terminal,
    parse_time,
)
from trainium_devcluster.node.api.waiting import wait_for_event
from trainium_devcluster.node.pods.container import Container
from trainium_devcluster.node.pods.node_services import NodeServices
from trainium_devcluster.node.pods.pod_setup import PodSetup
from trainium_devcluster.node.pods.resource_claims import ClaimError, check_claims
from trainium_devcluster.node.pods.status import (
    ContainerKind,
    PodSnapshot,
    Terminated,
    Waiting,
    build_pod_status,
    find_container_kind,
    should_restart,
)
from trainium_devcluster.node.pods.status_writer import StatusWriter
from trainium_devcluster.node.spec import unsupported_fields
from trainium_devcluster.node.volumes.volumes import VolumeError

_log = logging.getLogger(__name__)
_VOLUME_RETRY_SECONDS = 1.0  # a change of a missing object ends the wait earlier
_DELETE_RETRY_SECONDS = 0.5
_DEADLINE_MESSAGE = "Pod was active on the node longer than the specified deadline"


@dataclass(slots=True, eq=False)
class PodRunner:
    """Runs one pod; the node creates one for every pod bound to it."""

    services: NodeServices
    pod: Json
    address: str
    containers: list[Container] = field(default_factory=list)
    setup: PodSetup = field(init=False)
    writer: StatusWriter = field(init=False)
    _lifecycle_event: asyncio.Event = field(default_factory=asyncio.Event)  # wakes the lifecycle task
    _sync_event: asyncio.Event = field(default_factory=asyncio.Event)  # wakes the sync task
    _failure: tuple[str, str] | None = None  # reason and message
    _sandbox_ready: bool = False
    _ended: bool = False
    _deleted: bool = False  # the object is deleted from the API server
    _start_time: str = ""

    def __post_init__(self) -> None:
        status = self.pod.get("status") or {}
        self._start_time = status.get("startTime") or format_rfc3339(time.time())
        self.setup = PodSetup(self.services, lambda: self.pod, self.address)
        self.writer = StatusWriter(self.services.api, lambda: self.pod, self._build_status, self._handle_written_status)
        grace = float(self.pod["spec"].get("terminationGracePeriodSeconds") or 0)
        for spec in [*get_init_containers(self.pod), *get_containers(self.pod)]:
            kind = find_container_kind(self.pod, spec)
            folder = self.setup.folder / "containers" / spec["name"]
            container = Container(
                spec,
                kind,
                folder,
                self.services.launcher,
                self.wake,
                self._emit,
                self.setup.probe_target,
                default_grace=grace,
            )
            if get_init_containers(self.pod):
                container.state = Waiting("PodInitializing")
            old = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
            if former := find(old, "name", spec["name"]):
                container.restore(former, rebooted_at=time.time())
            self.containers.append(container)
        self._ended = is_terminal(self.pod)

    # --- Called by the node ------------------------------------------------------------------------------------------

    def update(self, pod: Json) -> None:
        """Apply a change of the object."""
        refused = None if unsupported_fields.reject_ephemeral(self.pod) else unsupported_fields.reject_ephemeral(pod)
        self.pod = pod
        if refused:
            self._emit(EventSeverity.WARNING, "NotSupported", refused, "")
        self.setup.volumes.changed.set()  # labels and annotations may be in files
        self.wake()

    def handle_deletion(self, pod: Json) -> None:
        """Handle the deletion of the object."""
        self.pod = pod
        self._deleted = self.writer.deleted = True
        self.wake()

    def wake(self) -> None:
        """Wake the tasks of the pod after a change."""
        self._lifecycle_event.set()
        self._sync_event.set()
        self.writer.mark_dirty()

    @property
    def active(self) -> bool:
        """Whether the pod holds resources: it has not ended, or still has processes."""
        return not self._ended or any(c.running for c in self.containers)

    def find_container(self, container_name: str | None = None) -> Container | None:
        """Return the container of that name; the first main container without a name."""
        if container_name is None:
            return next(c for c in self.containers if c.kind is ContainerKind.MAIN)
        return next((c for c in self.containers if c.name == container_name), None)

    # --- The pod's task ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the pod until it has ended and is deleted; raises only on cancellation."""
        writer = asyncio.create_task(self.writer.run())
        self.wake()
        try:
            sync_task = asyncio.create_task(self._run_until_end())
            while not (self._deleted or "deletionTimestamp" in self.pod["metadata"]):
                await self._wait_for_change()
            sync_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sync_task
            await self._terminate()
            await self._delete()
        finally:
            writer.cancel()
            self.setup.remove()

    async def _run_until_end(self) -> None:
        """Run the pod to its end."""
        if self._ended:
            return
        try:
            if not self._admit():
                return
            await self._set_up_volumes()
            await self._supervise()
        except Exception:  # noqa: BLE001 - a defect here must show on the pod, not silently leave it as it is
            _log.exception("pod %s/%s", get_namespace(self.pod), get_name(self.pod))
            self._fail("NodeError", "the node failed to run the pod; its log has the reason")
        self.wake()

    def _admit(self) -> bool:
        sentences = unsupported_fields.find_unsupported(self.pod)
        if sentences:
            for sentence in sentences:
                self._emit(EventSeverity.WARNING, "NotSupported", sentence, "")
            self._fail("NotSupported", "; ".join(sentences))
            return False
        if insufficient := self.services.find_insufficient_resource(self.pod):
            resource, message = insufficient
            self._emit(EventSeverity.WARNING, f"OutOf{resource}", message, "")
            self._fail(f"OutOf{resource}", f"Pod was rejected: {message}")
            return False
        self.services.report_unenforced(self.pod)
        return True

    async def _set_up_volumes(self) -> None:
        while True:
            try:
                await check_claims(self.services.api, self.pod)
                await self.setup.prepare()
            except (ClaimError, VolumeError) as error:
                is_claim_error = isinstance(error, ClaimError)
                reason = "FailedPrepareDynamicResources" if is_claim_error else "FailedMount"
                self._emit(EventSeverity.WARNING, reason, str(error), "")
                await wait_for_event(self.setup.volumes.changed, _VOLUME_RETRY_SECONDS)
                self.setup.volumes.changed.clear()
            else:
                self._sandbox_ready = True
                self.wake()
                return

    async def _supervise(self) -> None:
        """Take the next step after every change, until no container will run again."""
        started = parse_time(self._start_time)
        limit = self.pod["spec"].get("activeDeadlineSeconds")
        while True:
            self._sync_event.clear()
            requeue_delays: list[float] = []
            if limit is not None:
                requeue_delays.append(started + limit - time.time())
                if requeue_delays[-1] <= 0:
                    self._failure = ("DeadlineExceeded", _DEADLINE_MESSAGE)
                    await self._kill_all(get_grace_seconds(self.pod), _DEADLINE_MESSAGE)
                    self._finish()
                    return
            if await self._initialize(requeue_delays):
                for container in (c for c in self.containers if c.kind is ContainerKind.MAIN):
                    await self._sync_container(container, requeue_delays)
            if self._is_finished():
                await self._stop_sidecars(time.monotonic() + get_grace_seconds(self.pod))
                self._finish()
                return
            await wait_for_event(self._sync_event, min(requeue_delays, default=None))

    async def _initialize(self, requeue_delays: list[float]) -> bool:
        """Run init containers and sidecars in order; return whether all are complete."""
        has_started = any(c.has_started for c in self.containers if c.kind is ContainerKind.MAIN)
        for container in (c for c in self.containers if c.kind is not ContainerKind.MAIN):
            if container.kind is ContainerKind.SIDECAR:
                await self._sync_container(container, requeue_delays)
                if not has_started and not container.started:
                    return False
            elif not has_started and not container.ready:
                await self._sync_container(container, requeue_delays)
                if not container.ready:
                    return False
        return True

    def _are_init_containers_complete(self) -> bool:
        """Return whether all init containers are complete, so that main containers can start."""
        inits = [c for c in self.containers if c.kind is not ContainerKind.MAIN]
        return all(c.ready if c.kind is ContainerKind.INIT else c.started for c in inits)

    async def _sync_container(self, container: Container, requeue_delays: list[float]) -> None:
        """Start `container` if it should run and does not; append a backoff to `requeue_delays`."""
        if container.running:
            return
        state = container.state if isinstance(container.state, Terminated) else container.last_termination
        if state is not None and isinstance(container.state, Terminated | Waiting) and container.has_started:
            if not should_restart(self.pod, container.spec, state.exit_code):
                return
            remaining = container.backoff.compute_remaining(state.finished_at, time.time())
            if remaining > 0:
                requeue_delays.append(self._back_off(container, remaining))
                return
            container.backoff.record_restart(time.time())
        requeue_delay = await self.setup.start(container)
        if requeue_delay is not None:
            requeue_delays.append(requeue_delay)

    def _back_off(self, container: Container, seconds: float) -> float:
        """Set `container` to waiting in CrashLoopBackOff; return `seconds`."""
        where = f"{get_name(self.pod)}_{get_namespace(self.pod)}({get_uid(self.pod)})"
        if container.is_new_backoff(container.backoff.delay):
            message = f"Back-off restarting failed container {container.name} in pod {where}"
            self._emit(EventSeverity.WARNING, "BackOff", message, container.name)
        pause = f"back-off {container.backoff.delay:g}s"
        container.set_waiting("CrashLoopBackOff", f"{pause} restarting failed container={container.name} pod={where}")
        return seconds

    def _is_finished(self) -> bool:
        """Return whether no relevant container runs, and none will start."""
        main = [c for c in self.containers if c.kind is ContainerKind.MAIN]
        if any(c.running for c in self.containers if c.kind is not ContainerKind.SIDECAR):
            return False
        for container in (c for c in self.containers if c.kind is ContainerKind.INIT):
            state = container.state
            if (
                isinstance(state, Terminated)
                and state.exit_code
                and not should_restart(self.pod, container.spec, state.exit_code)
            ):
                return True
        return all(
            isinstance(c.state, Terminated) and not should_restart(self.pod, c.spec, c.state.exit_code) for c in main
        )

    def _finish(self) -> None:
        self._ended = True
        self.services.release_address(get_uid(self.pod))
        self.wake()

    def _fail(self, reason: str, message: str) -> None:
        self._failure = (reason, message)
        self._finish()

    # --- Ending ------------------------------------------------------------------------------------------------------

    async def _terminate(self) -> None:
        """End all containers within the grace period."""
        # A later deletion with a shorter period has no effect, as on a kubelet.
        await self._kill_all(get_grace_seconds(self.pod), "Stopping container {name}")
        if not self._ended:
            initialized = self._are_init_containers_complete()
            for container in self.containers:
                if initialized or container.kind is not ContainerKind.MAIN:
                    container.end_unstarted()
        self._ended = True

    async def _kill_all(self, grace: int, message: str) -> None:
        deadline = time.monotonic() + grace
        for container in self.containers:
            if container.running:
                self._emit(EventSeverity.NORMAL, "Killing", message.format(name=container.name), container.name)
        await asyncio.gather(*(c.stop(deadline) for c in self.containers if c.kind is not ContainerKind.SIDECAR))
        await self._stop_sidecars(deadline)

    async def _stop_sidecars(self, deadline: float) -> None:
        for container in reversed([c for c in self.containers if c.kind is ContainerKind.SIDECAR]):
            await container.stop(deadline)

    async def _delete(self) -> None:
        """Write the final status, then remove the object, which only its node may do."""
        await self.writer.flush()
        path = f"/api/v1/namespaces/{get_namespace(self.pod)}/pods/{get_name(self.pod)}"
        while not self._deleted:
            try:
                await self.services.api.delete(
                    path, {"gracePeriodSeconds": 0, "preconditions": {"uid": get_uid(self.pod)}}
                )
            except ConnectionFailedError:
                pass
            except ApiError as error:
                if error.status in {404, 409}:
                    return
                _log.warning("deleting pod %s: %s", path, error)
            else:
                return
            await asyncio.sleep(_DELETE_RETRY_SECONDS)

    # --- Status ------------------------------------------------------------------------------------------------------

    def _build_status(self, now: str) -> Json:
        running = any(c.running for c in self.containers)
        terminal = self._ended and not running
        had_address = self._sandbox_ready or (self.pod.get("status") or {}).get("podIP")
        snapshot = PodSnapshot(
            self.pod,
            [container.view() for container in self.containers],
            host_ip=self.services.address,
            pod_ip=self.address if had_address else "",
            sandbox_ready=self._sandbox_ready and not terminal,
            start_time=self._start_time,
            terminal=terminal,
            failure=None if running else self._failure,  # while containers are still being stopped the phase stays
        )
        return build_pod_status(snapshot, now)

    def _handle_written_status(self, pod: Json) -> None:
        # The answer is newer than the watched object; it keeps the transition times of conditions.
        if int(pod["metadata"]["resourceVersion"]) > int(self.pod["metadata"]["resourceVersion"]):
            self.pod = pod

    def _emit(self, severity: EventSeverity, reason: str, message: str, container: str) -> None:
        kind = "initContainers" if find(get_init_containers(self.pod), "name", container) else "containers"
        path = f"spec.{kind}{{{container}}}" if container else ""
        self.services.events.emit(self.pod, "Pod", severity, reason, message, field_path=path)

    async def _wait_for_change(self) -> None:
        await self._lifecycle_event.wait()
        self._lifecycle_event.clear()
