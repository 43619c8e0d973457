"""The coordinator's state: the membership that each job is served, and the last message of each agent.

Guarantees:
- It is in memory only, and rebuilt from the membership records and from registrations.
- Jobs are identified by `JobId`, so a new job never inherits the state of an earlier one with its name.
- A served generation never decreases. Times are Unix seconds of the injected clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from trainium_contract.wire.membership_change import MembershipChange, diff_memberships
from trainium_contract.wire.messages import (
    MAX_GENERATION_LEAD,
    HeartbeatRequest,
    ImportedModules,
    Membership,
    RegisterRequest,
    RoleEndpoints,
    WorkerPhase,
)
from trainium_operator.http.errors import RefusedError
from trainium_operator.plan.model.observed import SILENCE_REPORTED_SECONDS, AgentView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_operator.plan.model.names import JobId

_reported_fields = attrgetter(*sorted(HeartbeatRequest.model_fields.keys() - {"progress", "timing", "protocol"}))
"""Fields whose change the plan sees at once. Called a thousand times a second, so implemented in C."""
_NON_MEMBER_PHASES = (WorkerPhase.PREFLIGHT, WorkerPhase.STANDBY)
_PROBE_AGAIN_SECONDS = 30.0
"""Pause before a port that has never answered is probed again."""

FULL_HEARTBEATS_PER_SECOND = 8.0
"""Full heartbeats of one job per second. All of its ranks make the same steps, so any heartbeat has the newest."""
MAX_FULL_HEARTBEAT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """The result of a heartbeat. `is_urgent`: the plan sees it at once. `has_progressed`: that may wait a little."""

    is_urgent: bool
    has_progressed: bool
    before: HeartbeatRequest | None = None
    """The agent's last heartbeat before this one."""


class NotRegisteredError(RefusedError):
    """The pod's agent has not registered since this coordinator started."""

    status = 404

    def __init__(self) -> None:
        super().__init__("this agent has not registered with this coordinator; register first")


class FutureGenerationError(RefusedError):
    """The message belongs to a generation far ahead of the one that is served: its sender cannot be trusted."""

    status = 400

    def __init__(self, generation: int, current: int) -> None:
        super().__init__(f"generation {generation} cannot be: generation {current} is current")


class OldGenerationError(RefusedError):
    """The message belongs to an older generation than the served one."""

    status = 409

    def __init__(self, generation: int, current: int) -> None:
        super().__init__(f"generation {generation} is over, generation {current} is current")
        self.current = current


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """An agent whose port should be probed."""

    job_id: JobId
    pod_uid: str
    namespace: str
    job: str
    pod: str
    host: str
    port: int
    last_seen: float
    """When it was last seen; a newer message makes the result void."""


@dataclass(slots=True)
class _Agent:
    view: AgentView
    reachable: bool = False
    """Whether its port has accepted a connection of this process."""
    probe_failed_at: float = -_PROBE_AGAIN_SECONDS
    """When its port last did not answer."""
    silence_reported: bool = False
    """The plan was notified of its silence, and the agent was not seen since."""
    stepped: tuple[int, int] = (-1, -1)
    """Generation and attempt of the last heartbeat with a higher step."""
    step: int = -1
    """The newest step that it reported since it last reported none."""


class _Job:
    def __init__(self) -> None:
        self.membership: Membership | None = None
        self.change: MembershipChange | None = None
        """The difference to the membership that was served before."""
        self.members: frozenset[str] = frozenset()
        """Pod uids of the membership."""
        self.endpoints: RoleEndpoints | None = None
        self.imported: ImportedModules | None = None
        self.agents: dict[str, _Agent] = {}
        self.deleted: set[str] = set()

    def drop_deleted(self) -> None:
        for pod_uid in self.deleted - self.members:
            self.deleted.discard(pod_uid)
            self.agents.pop(pod_uid, None)

    @property
    def generation(self) -> int:
        return self.membership.generation if self.membership else 0


class CoordinatorState:
    """Shared by the plan (agents, published), the executor (publish) and the streams."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self.since = wall_clock()
        self._wall_clock = wall_clock
        self._jobs: dict[JobId, _Job] = {}
        self.on_publish: Callable[[JobId], None] = lambda _job_id: None
        """Called after each newly served membership."""

    def start_serving(self) -> None:
        """Start to answer agents."""
        self.since = self._wall_clock()

    def publish(self, job_id: JobId, membership: Membership) -> None:
        """Serve this membership, unless a newer one is served."""
        job = self._get_or_create_job(job_id)
        if membership.generation >= job.generation:
            if job.membership is not None and membership.generation > job.generation:
                job.change = diff_memberships(job.membership, membership)
            job.membership = membership.share_fields_set()
            job.members = frozenset(member.pod_uid for member in membership.members)
            job.drop_deleted()
            self.on_publish(job_id)

    def publish_endpoints(self, job_id: JobId, endpoints: RoleEndpoints) -> None:
        """Serve these addresses of the job's roles."""
        self._get_or_create_job(job_id).endpoints = endpoints
        self.on_publish(job_id)

    def get_endpoints(self, job_id: JobId) -> RoleEndpoints | None:
        """Return the served addresses of the job's roles; None for none."""
        job = self._jobs.get(job_id)
        return job.endpoints if job else None

    def record_imported(self, job_id: JobId, pod_uid: str, imported: ImportedModules) -> None:
        """Serve the modules that a member has imported, if they are more than those that are served."""
        job = self._get_or_create_job(job_id)
        if pod_uid in job.members and len(imported.modules) > len(job.imported.modules if job.imported else ()):
            job.imported = imported
            self.on_publish(job_id)

    def get_imported_modules(self, job_id: JobId, pod_uid: str) -> ImportedModules | None:
        """Return the served modules for a pod; None for none, and for a member, whose ranks record their own."""
        job = self._jobs.get(job_id)
        return job.imported if job and pod_uid not in job.members else None

    def forget_job(self, job_id: JobId) -> None:
        """Drop the state of a deleted job."""
        self._jobs.pop(job_id, None)

    def forget_pod(self, job_id: JobId, pod_uid: str) -> None:
        """Drop the state of a deleted pod; a member's stays until the next generation."""
        job = self._jobs.get(job_id)
        if job is not None and pod_uid in job.agents:
            job.deleted.add(pod_uid)
            job.drop_deleted()

    def get_published_generation(self, job_id: JobId) -> int:
        """Return the generation that is served; 0 for none."""
        job = self._jobs.get(job_id)
        return job.generation if job else 0

    def get_membership(self, job_id: JobId) -> Membership | None:
        """Return the membership that is served."""
        job = self._jobs.get(job_id)
        return job.membership if job else None

    def get_membership_change(self, job_id: JobId) -> MembershipChange | None:
        """Return the difference of the served membership to the previous one; None where that is not shorter."""
        job = self._jobs.get(job_id)
        return job.change if job else None

    def list_agents(self, job_id: JobId) -> Mapping[str, AgentView]:
        """Return a copy of the views of the job's agents, by pod uid."""
        job = self._jobs.get(job_id)
        return {uid: agent.view for uid, agent in job.agents.items()} if job else {}

    def get_full_heartbeat_seconds(self, job_id: JobId) -> float:
        """Return how long an agent may send keepalives alone; other agents of the job send the newest step."""
        job = self._jobs.get(job_id)
        return min(MAX_FULL_HEARTBEAT_SECONDS, len(job.agents) / FULL_HEARTBEATS_PER_SECOND) if job else 0.0

    def count_agents(self) -> int:
        """Return how many agents of all jobs are registered."""
        return sum(len(job.agents) for job in self._jobs.values())

    def register(self, job_id: JobId, request: RegisterRequest) -> bool:
        """Apply a registration; return whether anything in it is new."""
        now = self._wall_clock()
        job = self._get_or_create_job(job_id)
        agent = job.agents.get(request.pod_uid)
        if agent is None:
            view = AgentView(registration=request, last_seen=now, first_seen=now)
            job.agents[request.pod_uid] = _Agent(view)
            return True
        changed = agent.view.registration != request
        agent.view = replace(agent.view, registration=request, last_seen=now, refused_at=None)
        return changed

    def find_newly_silent(self) -> set[tuple[str, str]]:
        """Return the jobs (namespace and name) with a member that fell silent since the last call."""
        now = self._wall_clock()
        job_keys = set()
        for job in self._jobs.values():
            for pod_uid in job.members:
                agent = job.agents.get(pod_uid)
                if agent is None:
                    continue
                silent = now - agent.view.last_seen >= SILENCE_REPORTED_SECONDS
                if silent and not agent.silence_reported:
                    job_keys.add((_rebuild_registration(agent).namespace, _rebuild_registration(agent).job))
                agent.silence_reported = silent
        return job_keys

    def list_probe_targets(self) -> list[ProbeTarget]:
        """Return the members to probe: once while they send messages, and whenever they are silent."""
        now = self._wall_clock()
        targets = []
        for job_id, job in self._jobs.items():
            for member in job.membership.members if job.membership is not None else ():
                agent = job.agents.get(member.pod_uid)
                if agent is None or agent.view.refused_at is not None or member.pod_uid in job.deleted:
                    continue
                silent = now - agent.view.last_seen >= SILENCE_REPORTED_SECONDS
                unknown = not agent.reachable and not silent and now >= agent.probe_failed_at + _PROBE_AGAIN_SECONDS
                if unknown or (silent and agent.reachable):
                    request = _rebuild_registration(agent)
                    targets.append(
                        ProbeTarget(
                            job_id=job_id,
                            pod_uid=member.pod_uid,
                            namespace=request.namespace,
                            job=request.job,
                            pod=request.pod_name,
                            host=request.pod_ip,
                            port=request.rendezvous_port,
                            last_seen=agent.view.last_seen,
                        )
                    )
        return targets

    def record_port_open(self, target: ProbeTarget) -> None:
        """Record that the agent's port accepts connections."""
        agent = self._find_agent(target)
        if agent is not None:
            agent.reachable = True

    def record_port_unknown(self, target: ProbeTarget) -> None:
        """Record that the probe had no result."""
        agent = self._find_agent(target)
        if agent is not None:
            agent.probe_failed_at = self._wall_clock()

    def record_port_refused(self, target: ProbeTarget) -> bool:
        """Record that the agent's port refuses connections; return whether that is new."""
        agent = self._find_agent(target)
        if agent is None:
            return False
        if not agent.reachable:
            agent.probe_failed_at = self._wall_clock()
            return False
        if agent.view.last_seen != target.last_seen or agent.view.refused_at is not None:
            return False
        agent.view = replace(agent.view, refused_at=self._wall_clock())
        return True

    def _find_agent(self, target: ProbeTarget) -> _Agent | None:
        job = self._jobs.get(target.job_id)
        return job.agents.get(target.pod_uid) if job is not None else None

    def record_contact(self, job_id: JobId, pod_uid: str) -> AgentView:
        """Record that the agent was seen. Raises NotRegisteredError."""
        job = self._jobs.get(job_id)
        agent = job.agents.get(pod_uid) if job else None
        if agent is None:
            raise NotRegisteredError
        agent.view = replace(agent.view, last_seen=self._wall_clock(), refused_at=None)
        return agent.view

    def record_keepalive(self, job_id: JobId, pod_uid: str, step: int) -> None:
        """Record a keepalive: only the step has changed, -1 for none. Raises NotRegisteredError."""
        view = self.record_contact(job_id, pod_uid)
        agent = self._jobs[job_id].agents[pod_uid]
        if agent.step >= 0 and step > agent.step:
            agent.view = _add_steps(view, step - agent.step, first_step=False)
            agent.step = step

    def record_heartbeat(self, job_id: JobId, request: HeartbeatRequest) -> HeartbeatResult:
        """Record a heartbeat; one that arrives after a later one only counts as seen.

        Raises NotRegisteredError, and OldGenerationError or FutureGenerationError for one that is refused.
        """
        self.record_contact(job_id, request.pod_uid)
        job = self._jobs[job_id]
        current = job.generation
        if current and request.generation > current + MAX_GENERATION_LEAD:
            raise FutureGenerationError(request.generation, current)
        is_spare = request.pod_uid not in job.members and request.phase in _NON_MEMBER_PHASES
        if 0 < request.generation < current and not is_spare:  # a spare may not have received the newest generation
            raise OldGenerationError(request.generation, current)
        agent = job.agents[request.pod_uid]
        old = agent.view.heartbeat
        if old is not None and old.generation == request.generation and request.attempt < old.attempt:
            return HeartbeatResult(is_urgent=False, has_progressed=False)
        stepped = _get_step(request) > agent.step
        moved = stepped or _get_stage_progress(request) != _get_stage_progress(old)
        first_step = stepped and agent.stepped != (request.generation, request.attempt)
        if stepped:
            agent.stepped = (request.generation, request.attempt)
        agent.view = replace(agent.view, heartbeat=request, joining_since=_find_joining_since(agent.view, request))
        if _get_step(request) > agent.step:
            agent.view = _add_steps(agent.view, _get_step(request) - agent.step, first_step=first_step)
        agent.step = _get_step(request)
        is_urgent = (
            old is None
            or first_step
            or _reported_fields(old) != _reported_fields(request)
            or _select_results(old) != _select_results(request)
        )
        return HeartbeatResult(is_urgent=is_urgent, has_progressed=moved, before=old)

    def _get_or_create_job(self, job_id: JobId) -> _Job:
        return self._jobs.setdefault(job_id, _Job())


def _rebuild_registration(agent: _Agent) -> RegisterRequest:
    assert agent.view.registration is not None, "the coordinator knows an agent by its registration"
    return agent.view.registration


def _get_step(heartbeat: HeartbeatRequest | None) -> int:
    return heartbeat.progress.step if heartbeat is not None and heartbeat.progress is not None else -1


def _get_stage_progress(heartbeat: HeartbeatRequest | None) -> float | None:
    return heartbeat.progress.stage_progress if heartbeat is not None and heartbeat.progress is not None else None


def _select_results(heartbeat: HeartbeatRequest) -> tuple[object, ...]:
    """Return the part of the progress that a plan should see at once."""
    progress = heartbeat.progress
    return () if progress is None else (progress.stage, progress.artifacts, progress.evaluation)


def _add_steps(view: AgentView, steps: int, *, first_step: bool) -> AgentView:
    """Return the view after these new steps. The time before an attempt's first step includes the interruption."""
    step_seconds = view.step_seconds
    if view.progressed_at is not None and not first_step:
        step_seconds = (view.last_seen - view.progressed_at) / steps
    return replace(view, progressed_at=view.last_seen, step_seconds=step_seconds)


def _find_joining_since(view: AgentView, request: HeartbeatRequest) -> float | None:
    if request.phase is not WorkerPhase.JOINING:
        return None
    old = view.heartbeat
    same = old is not None and (old.generation, old.attempt) == (request.generation, request.attempt)
    return view.joining_since if same and view.joining_since is not None else view.last_seen
