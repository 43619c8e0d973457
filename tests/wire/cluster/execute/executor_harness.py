"""An executor on an in-memory API server, and one job whose actions it executes."""

from typing import Any, cast

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.api.objects import owner_reference, training_job
from tests.testing.operator.wire_messages import member, membership
from tests.testing.suite.virtual_time import run_virtual
from trainium_contract.wire.messages import Membership
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import EVENTS, JOBS, PODS
from trainium_operator.cluster.cache.caches import make_caches
from trainium_operator.cluster.execute.events import EventRecorder
from trainium_operator.cluster.execute.executor import Executor
from trainium_operator.cluster.execute.owner_check import OwnerCheck
from trainium_operator.cluster.execute.status_writes import StatusWrites
from trainium_operator.cluster.queue.refusal_backoff import RefusalBackoff
from trainium_operator.cluster.queue.write_outcomes import WriteOutcomes
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.plan.manifests.config_maps import build_membership_map
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import (
    CreatePod,
    Plan,
    PublishMembership,
)
from trainium_operator.plan.model.names import JobId
from trainium_operator.plan.model.observed import JobView
from trainium_operator.settings import Settings


class ExecutorHarness:
    """An executor for one job; `cluster` is its API server, `published` the generations that it published."""

    def __init__(self) -> None:
        self.cluster = FakeApiServer()
        self.cluster.add(JOBS, training_job("j"))
        api = Api(self.cluster)
        self.caches = make_caches(api, Settings(job_network_policy=True))
        self.recorder = EventRecorder(api, "i", wall_clock=lambda: 1.7e9)
        self.published: list[int] = []
        self.now = 1000.0
        self.refusal_backoff = RefusalBackoff(lambda: self.now)
        self.outcomes = WriteOutcomes(lambda: self.now)
        owners = OwnerCheck(api, self.recorder, self.refusal_backoff)
        self.executor = Executor(
            api,
            self.caches,
            self.recorder,
            cast("CoordinatorState", self),
            self.refusal_backoff,
            self.outcomes,
            StatusWrites(api, self.caches, self.recorder, owners, lambda: self.now, on_refused=lambda: None),
            owners,
            lambda: self.now,
        )
        run_virtual(self.caches.jobs.refresh())

    def publish(self, job: JobId, membership: Membership) -> None:
        assert job == self.job.id
        self.published.append(membership.generation)

    @property
    def job(self) -> JobView:
        record = self.caches.jobs.store.get(("default", "j"))
        assert record is not None
        assert record.view is not None
        return record.view

    def owned_object(self, name: str, **more: Any) -> dict[str, Any]:
        owner = owner_reference("j", self.job.uid)
        labels = {**names.build_object_labels("j", "worker"), **names.build_selector_labels("j")}
        annotations = {names.ANNOTATION_CONTENT_HASH: "digest"}
        return {
            "metadata": {"name": name, "labels": labels, "annotations": annotations, "ownerReferences": [owner]},
            **more,
        }

    def pod_creations(self, count: int) -> tuple[CreatePod, ...]:
        spec = {"containers": [{"name": "worker"}]}
        return tuple(CreatePod(self.owned_object(f"j-w-{number}", spec=spec)) for number in range(count))

    def publish_action(self, generation: int, replaces: int, ip: str = "10.0.0.1") -> PublishMembership:
        new = membership(generation, member("j-w-0", pod_ip=ip))
        return PublishMembership(new, build_membership_map(self.job, new), replaces)

    def pod_uids(self) -> dict[str, str]:
        """Return the uids of existing pods by name."""
        return {name: self.cluster.get(PODS, "default", name)["metadata"]["uid"] for name in self.cluster.names(PODS)}

    def events(self) -> list[dict[str, Any]]:
        return [raw for key, raw in self.cluster.objects.items() if key[0] == EVENTS.plural]

    def refuse_creations(self, kind: str, message: str) -> None:
        """Refuse requests that create objects of this kind, until the faults are cleared."""

        def refuse(method: str, path: str) -> Any:
            return http_error(403, "Forbidden", message) if method == "POST" and path.endswith(kind) else None

        self.cluster.faults.append(refuse)

    async def execute(self, *actions: Any, **changes: Any) -> None:
        await self.executor.execute(self.job, Plan(status=replace_status(self.job, **changes), actions=actions))


def replace_status(job: JobView, **changes: Any) -> Any:
    return job.status.model_copy(update=changes)
