"""What the coordinator knows: which membership it serves per job, and what each agent last said.

Invariants: memory only, rebuilt from the membership records and from re-registrations; jobs are told apart by `JobId`,
so a new job never inherits from an earlier one of its name; a served generation never goes back.
Times are Unix seconds of the injected clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from trainium_contract.wire.membership_change import diff_memberships
from trainium_contract.wire.messages import HeartbeatRequest, WorkerPhase
from trainium_operator.plan.model.observed import SILENCE_TOLD_SECONDS, AgentView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_contract.wire.membership_change import MembershipChange
    from trainium_contract.wire.messages import Membership, RegisterRequest
    from trainium_operator.plan.model.names import JobId

_telling = attrgetter(*sorted(HeartbeatRequest.model_fields.keys() - {"progress", "timing", "protocol"}))
"""What a plan should see at once when it changes; a thousand times a second, so not spelt out in Python."""
_OUTSIDE = (WorkerPhase.PREFLIGHT, WorkerPhase.STANDBY)
_ASK_AGAIN_SECONDS = 30.0
"""Until a port that has never answered is asked again."""

DETAILS_A_SECOND = 8.0
"""Full heartbeats of one job, together: all of its ranks make the same steps, so any of them tells the newest."""
LONGEST_DETAIL_SECONDS = 10.0
FARTHEST_AHEAD = 1_000
"""An agent may know a later generation than the one that is served (a record may be lost), but not by more."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A heartbeat was taken; `matters` when the plan should see it at once, else `progressed` may wait a little."""

    matters: bool
    progressed: bool
    before: HeartbeatRequest | None = None
    """The agent's last heartbeat before this one."""


class NotRegisteredError(Exception):
    """The pod's agent has not registered since this coordinator started."""


class FutureGenerationError(Exception):
    """The message belongs to a generation that is far from being served: its sender is not to be believed."""

    def __init__(self, generation: int, current: int) -> None:
        super().__init__(f"generation {generation} cannot be: generation {current} is current")


class OldGenerationError(Exception):
    """The message belongs to an older generation than the one that is served."""

    def __init__(self, generation: int, current: int) -> None:
        super().__init__(f"generation {generation} is over, generation {current} is current")
        self.current = current


@dataclass(frozen=True, slots=True)
class Doubt:
    """One agent whose port should be asked whether it is there."""

    job_id: JobId
    pod_uid: str
    namespace: str
    job: str
    pod: str
    host: str
    port: int
    heard: float
    """When it was last heard; an answer that comes after a newer message says nothing."""


@dataclass(slots=True)
class _Agent:
    view: AgentView
    reachable: bool = False
    """Its port has answered this process."""
    asked_at: float = -_ASK_AGAIN_SECONDS
    """When its port was last asked in vain."""
    silence_told: bool = False
    """The plan was told that it has fallen silent, and it was not heard since."""
    stepped: tuple[int, int] = (-1, -1)
    """Generation and attempt of the last heartbeat that brought a higher step."""
    step: int = -1
    """The newest that it reported since it last had none."""


class _Job:
    def __init__(self) -> None:
        self.membership: Membership | None = None
        self.change: MembershipChange | None = None
        """From the one that was served before it."""
        self.members: frozenset[str] = frozenset()
        """Pod uids of the membership."""
        self.agents: dict[str, _Agent] = {}
        self.gone: set[str] = set()

    def drop_gone(self) -> None:
        for pod_uid in self.gone - self.members:
            self.gone.discard(pod_uid)
            self.agents.pop(pod_uid, None)

    @property
    def generation(self) -> int:
        return self.membership.generation if self.membership else 0


class CoordinatorState:
    """Serves the plan (agents, published), the executor (publish) and the HTTP server."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self.since = wall_clock()
        self._wall_clock = wall_clock
        self._jobs: dict[JobId, _Job] = {}
        self.on_publish: Callable[[JobId], None] = lambda _job_id: None
        """Told after each membership that is served anew."""

    def begin(self) -> None:
        """Agents are answered from now on."""
        self.since = self._wall_clock()

    def publish(self, job_id: JobId, membership: Membership) -> None:
        """Serve this membership, unless a newer one is served already."""
        job = self._job(job_id)
        if membership.generation >= job.generation:
            if job.membership is not None and membership.generation > job.generation:
                job.change = diff_memberships(job.membership, membership)
            job.membership = membership.lean()
            job.members = frozenset(member.pod_uid for member in membership.members)
            job.drop_gone()
            self.on_publish(job_id)

    def forget_job(self, job_id: JobId) -> None:
        """The job is gone."""
        self._jobs.pop(job_id, None)

    def forget_pod(self, job_id: JobId, pod_uid: str) -> None:
        """The pod is gone; what a member of the current generation said last stays until the next generation."""
        job = self._jobs.get(job_id)
        if job is not None and pod_uid in job.agents:
            job.gone.add(pod_uid)
            job.drop_gone()

    def published(self, job_id: JobId) -> int:
        """Generation that is served; 0 for none."""
        job = self._jobs.get(job_id)
        return job.generation if job else 0

    def membership(self, job_id: JobId) -> Membership | None:
        """The membership that is served."""
        job = self._jobs.get(job_id)
        return job.membership if job else None

    def change(self, job_id: JobId) -> MembershipChange | None:
        """What makes the membership that is served of the one before; None where that would not be shorter."""
        job = self._jobs.get(job_id)
        return job.change if job else None

    def agents(self, job_id: JobId) -> Mapping[str, AgentView]:
        """A copy of what the job's agents said, by pod uid."""
        job = self._jobs.get(job_id)
        return {uid: agent.view for uid, agent in job.agents.items()} if job else {}

    def full_heartbeat_seconds(self, job_id: JobId) -> float:
        """How long an agent may give signs of life alone: the job's newest step is heard of often all the same."""
        job = self._jobs.get(job_id)
        return min(LONGEST_DETAIL_SECONDS, len(job.agents) / DETAILS_A_SECOND) if job else 0.0

    def agent_count(self) -> int:
        """Registered agents of all jobs."""
        return sum(len(job.agents) for job in self._jobs.values())

    def register(self, job_id: JobId, request: RegisterRequest) -> bool:
        """Take a registration; whether it says anything new."""
        now = self._wall_clock()
        job = self._job(job_id)
        known = job.agents.get(request.pod_uid)
        if known is None:
            view = AgentView(registration=request, heard=now, first_heard=now)
            job.agents[request.pod_uid] = _Agent(view)
            return True
        changed = known.view.registration != request
        known.view = replace(known.view, registration=request, heard=now, refused=None)
        return changed

    def newly_silent(self) -> set[tuple[str, str]]:
        """Jobs (namespace and name) of which a member has fallen silent since the last call."""
        now = self._wall_clock()
        found = set()
        for job in self._jobs.values():
            for pod_uid in job.members:
                agent = job.agents.get(pod_uid)
                if agent is None:
                    continue
                silent = now - agent.view.heard >= SILENCE_TOLD_SECONDS
                if silent and not agent.silence_told:
                    found.add((agent.view.registration.namespace, agent.view.registration.job))
                agent.silence_told = silent
        return found

    def doubts(self) -> list[Doubt]:
        """Members whose port is to be asked: once while they are heard, and whenever they are silent."""
        now = self._wall_clock()
        found = []
        for job_id, job in self._jobs.items():
            for member in job.membership.members if job.membership is not None else ():
                agent = job.agents.get(member.pod_uid)
                if agent is None or agent.view.refused is not None or member.pod_uid in job.gone:
                    continue
                silent = now - agent.view.heard >= SILENCE_TOLD_SECONDS
                unknown = not agent.reachable and not silent and now >= agent.asked_at + _ASK_AGAIN_SECONDS
                if unknown or (silent and agent.reachable):
                    request = agent.view.registration
                    found.append(
                        Doubt(
                            job_id=job_id,
                            pod_uid=member.pod_uid,
                            namespace=request.namespace,
                            job=request.job,
                            pod=request.pod_name,
                            host=request.pod_ip,
                            port=request.rendezvous_port,
                            heard=agent.view.heard,
                        )
                    )
        return found

    def port_answered(self, doubt: Doubt) -> None:
        """Somebody listens on the agent's port."""
        agent = self._agent_in(doubt)
        if agent is not None:
            agent.reachable = True

    def port_unanswered(self, doubt: Doubt) -> None:
        """Nobody knows."""
        agent = self._agent_in(doubt)
        if agent is not None:
            agent.asked_at = self._wall_clock()

    def port_refused(self, doubt: Doubt) -> bool:
        """Nobody listens on the agent's port; whether that says anything new."""
        agent = self._agent_in(doubt)
        if agent is None:
            return False
        if not agent.reachable:
            agent.asked_at = self._wall_clock()
            return False
        if agent.view.heard != doubt.heard or agent.view.refused is not None:
            return False
        agent.view = replace(agent.view, refused=self._wall_clock())
        return True

    def _agent_in(self, doubt: Doubt) -> _Agent | None:
        job = self._jobs.get(doubt.job_id)
        return job.agents.get(doubt.pod_uid) if job is not None else None

    def heard(self, job_id: JobId, pod_uid: str) -> AgentView:
        """The pod gave a sign of life. Raises NotRegisteredError."""
        job = self._jobs.get(job_id)
        agent = job.agents.get(pod_uid) if job else None
        if agent is None:
            raise NotRegisteredError
        agent.view = replace(agent.view, heard=self._wall_clock(), refused=None)
        return agent.view

    def alive(self, job_id: JobId, pod_uid: str, step: int) -> None:
        """A sign of life: nothing has changed but the step, -1 for none. Raises NotRegisteredError."""
        view = self.heard(job_id, pod_uid)
        agent = self._jobs[job_id].agents[pod_uid]
        if agent.step >= 0 and step > agent.step:
            agent.view = _moved(view, step - agent.step, first_step=False)
            agent.step = step

    def heartbeat(self, job_id: JobId, request: HeartbeatRequest) -> Accepted:
        """Take a heartbeat; one that was overtaken by a later one is only a sign of life.

        Raises NotRegisteredError, and OldGenerationError or FutureGenerationError for one that is refused.
        """
        self.heard(job_id, request.pod_uid)
        job = self._jobs[job_id]
        current = job.generation
        if current and request.generation > current + FARTHEST_AHEAD:
            raise FutureGenerationError(request.generation, current)
        if 0 < request.generation < current and not self._is_outsider(job, request):
            raise OldGenerationError(request.generation, current)
        agent = job.agents[request.pod_uid]
        old = agent.view.heartbeat
        if old is not None and old.generation == request.generation and request.attempt < old.attempt:
            return Accepted(matters=False, progressed=False)
        stepped = _step(request) > agent.step
        moved = stepped or _stage_done(request) != _stage_done(old)
        first_step = stepped and agent.stepped != (request.generation, request.attempt)
        if stepped:
            agent.stepped = (request.generation, request.attempt)
        agent.view = _advanced(agent.view, request, steps=_step(request) - agent.step, first_step=first_step)
        agent.step = _step(request)
        news = old is None or first_step or _differs(old, request) or _results(old) != _results(request)
        return Accepted(matters=news, progressed=moved, before=old)

    def _is_outsider(self, job: _Job, request: HeartbeatRequest) -> bool:
        """A spare lives in no generation, so its number does not matter."""
        return request.pod_uid not in job.members and request.phase in _OUTSIDE

    def _job(self, job_id: JobId) -> _Job:
        return self._jobs.setdefault(job_id, _Job())


def _step(heartbeat: HeartbeatRequest | None) -> int:
    return heartbeat.progress.step if heartbeat is not None and heartbeat.progress is not None else -1


def _stage_done(heartbeat: HeartbeatRequest | None) -> float | None:
    return heartbeat.progress.stage_progress if heartbeat is not None and heartbeat.progress is not None else None


def _results(heartbeat: HeartbeatRequest) -> tuple[object, ...]:
    """What of the progress a plan should see at once."""
    progress = heartbeat.progress
    return () if progress is None else (progress.stage, progress.artifacts, progress.evaluation)


def _advanced(view: AgentView, request: HeartbeatRequest, *, steps: int, first_step: bool) -> AgentView:
    """The view after this heartbeat; `view.heard` is now."""
    view = replace(view, heartbeat=request, joining_since=_joining_since(view, request))
    return _moved(view, steps, first_step=first_step) if steps > 0 else view


def _moved(view: AgentView, steps: int, *, first_step: bool) -> AgentView:
    """The view when so many steps are new. Before the first step of an attempt lies what stopped it."""
    step_seconds = view.step_seconds
    if view.progressed is not None and not first_step:
        step_seconds = (view.heard - view.progressed) / steps
    return replace(view, progressed=view.heard, step_seconds=step_seconds)


def _joining_since(view: AgentView, request: HeartbeatRequest) -> float | None:
    if request.phase is not WorkerPhase.JOINING:
        return None
    old = view.heartbeat
    same = old is not None and (old.generation, old.attempt) == (request.generation, request.attempt)
    return view.joining_since if same and view.joining_since is not None else view.heard


def _differs(old: HeartbeatRequest, new: HeartbeatRequest) -> bool:
    """Whether anything but progress and step times has changed."""
    return bool(_telling(old) != _telling(new))
