"""What the coordinator knows: which membership it serves per job, and what each agent last said.

Invariants: memory only, rebuilt from the membership records and from re-registrations; jobs are told apart by uid, so a
new job never inherits from an earlier one of its name; a served generation never goes back.
Times are Unix seconds of the injected clock.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.messages import WorkerPhase
from trainium_operator.plan.model import AgentView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from trainium_contract.messages import HeartbeatRequest, Membership, RegisterRequest

_OUTSIDE = (WorkerPhase.PREFLIGHT, WorkerPhase.STANDBY)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A heartbeat was taken; `matters` when the plan should see it at once, else `progressed` may wait a little."""

    matters: bool
    progressed: bool


class NotRegisteredError(Exception):
    """The pod's agent has not registered since this coordinator started."""


class OldGenerationError(Exception):
    """The message belongs to an older generation than the one that is served."""

    def __init__(self, generation: int, current: int) -> None:
        super().__init__(f"generation {generation} is over, generation {current} is current")
        self.current = current


@dataclass(slots=True)
class _Agent:
    view: AgentView
    stepped: tuple[int, int] = (-1, -1)
    """Generation and attempt of the last heartbeat that brought a higher step."""


class _Job:
    def __init__(self) -> None:
        self.membership: Membership | None = None
        self.agents: dict[str, _Agent] = {}
        self.gone: set[str] = set()
        self.changed = asyncio.Event()

    def drop_gone(self) -> None:
        for pod_uid in tuple(self.gone):
            if self.membership is None or self.membership.rank_of(pod_uid) is None:
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
        self._jobs: dict[str, _Job] = {}
        self._closed = False

    def begin(self) -> None:
        """Agents are answered from now on."""
        self.since = self._wall_clock()

    def close(self) -> None:
        """End all long polls."""
        self._closed = True
        for job in self._jobs.values():
            job.changed.set()

    def publish(self, job_uid: str, membership: Membership) -> None:
        """Serve this membership, unless a newer one is served already."""
        job = self._job(job_uid)
        if membership.generation >= job.generation:
            job.membership = membership
            job.drop_gone()
            # Waiters hold the old event; those who come later wait for the next change.
            job.changed.set()
            job.changed = asyncio.Event()

    def forget_job(self, job_uid: str) -> None:
        """The job is gone."""
        job = self._jobs.pop(job_uid, None)
        if job is not None:
            job.changed.set()

    def forget_pod(self, job_uid: str, pod_uid: str) -> None:
        """The pod is gone; what a member of the current generation said last stays until the next generation."""
        job = self._jobs.get(job_uid)
        if job is not None and pod_uid in job.agents:
            job.gone.add(pod_uid)
            job.drop_gone()

    def published(self, job_uid: str) -> int:
        """Generation that is served; 0 for none."""
        job = self._jobs.get(job_uid)
        return job.generation if job else 0

    def membership(self, job_uid: str) -> Membership | None:
        """The membership that is served."""
        job = self._jobs.get(job_uid)
        return job.membership if job else None

    def agents(self, job_uid: str) -> Mapping[str, AgentView]:
        """A copy of what the job's agents said, by pod uid."""
        job = self._jobs.get(job_uid)
        return {uid: agent.view for uid, agent in job.agents.items()} if job else {}

    def agent_count(self) -> int:
        """Registered agents of all jobs."""
        return sum(len(job.agents) for job in self._jobs.values())

    def register(self, job_uid: str, request: RegisterRequest) -> bool:
        """Take a registration; whether it says anything new."""
        now = self._wall_clock()
        job = self._job(job_uid)
        known = job.agents.get(request.pod_uid)
        if known is None:
            view = AgentView(registration=request, heard=now, first_heard=now)
            job.agents[request.pod_uid] = _Agent(view)
            return True
        changed = known.view.registration != request
        known.view = replace(known.view, registration=request, heard=now)
        return changed

    def heard(self, job_uid: str, pod_uid: str) -> AgentView:
        """The pod gave a sign of life. Raises NotRegisteredError."""
        job = self._jobs.get(job_uid)
        agent = job.agents.get(pod_uid) if job else None
        if agent is None:
            raise NotRegisteredError
        agent.view = replace(agent.view, heard=self._wall_clock())
        return agent.view

    def heartbeat(self, job_uid: str, request: HeartbeatRequest) -> Accepted:
        """Take a heartbeat. Raises NotRegisteredError, and OldGenerationError for one that is refused."""
        self.heard(job_uid, request.pod_uid)
        job = self._jobs[job_uid]
        current = job.generation
        if 0 < request.generation < current and not self._is_outsider(job, request):
            raise OldGenerationError(request.generation, current)
        agent = job.agents[request.pod_uid]
        old = agent.view.heartbeat
        stepped = _step(request) > _step(old)
        first_step = stepped and agent.stepped != (request.generation, request.attempt)
        if stepped:
            agent.stepped = (request.generation, request.attempt)
        agent.view = _advanced(agent.view, request, stepped=stepped)
        return Accepted(matters=old is None or first_step or _differs(old, request), progressed=stepped)

    async def newer_membership(self, job_uid: str, after: int, seconds: float) -> Membership | None:
        """The membership once its generation is above `after`; None when that takes longer, or we are closing."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        job = self._job(job_uid)
        while not self._closed and self._jobs.get(job_uid) is job:
            if job.membership is not None and job.generation > after:
                return job.membership
            try:
                async with asyncio.timeout_at(deadline):
                    await job.changed.wait()
            except TimeoutError:
                return None
        return None

    @property
    def closed(self) -> bool:
        """Whether long polls have been ended for good."""
        return self._closed

    def keep_only(self, job_uids: Iterable[str]) -> None:
        """Drop jobs that do not exist (any more)."""
        for uid in set(self._jobs) - set(job_uids):
            self.forget_job(uid)

    def _is_outsider(self, job: _Job, request: HeartbeatRequest) -> bool:
        """A spare lives in no generation, so its number does not matter."""
        outside = job.membership is None or job.membership.rank_of(request.pod_uid) is None
        return outside and request.phase in _OUTSIDE

    def _job(self, uid: str) -> _Job:
        return self._jobs.setdefault(uid, _Job())


def _step(heartbeat: HeartbeatRequest | None) -> int:
    return heartbeat.progress.step if heartbeat is not None and heartbeat.progress is not None else -1


def _advanced(view: AgentView, request: HeartbeatRequest, *, stepped: bool) -> AgentView:
    """The view after this heartbeat; `view.heard` is now."""
    if not stepped:
        return replace(view, heartbeat=request)
    step_seconds = view.step_seconds
    if view.progressed is not None:
        step_seconds = (view.heard - view.progressed) / (_step(request) - _step(view.heartbeat))
    return replace(view, heartbeat=request, progressed=view.heard, step_seconds=step_seconds)


def _differs(old: HeartbeatRequest, new: HeartbeatRequest) -> bool:
    """Whether anything but progress has changed."""
    silent = {"progress": None, "protocol": new.protocol}
    return old.model_copy(update=silent) != new.model_copy(update=silent)
