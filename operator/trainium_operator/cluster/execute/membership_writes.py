"""Write the record of a membership to its ConfigMap, by compare and swap.

Guarantees:
- One generation number never has two memberships: a write replaces only the record of the previous generation.
- The cached copy saves a read only if the API server confirms that it is current, because its version is part of the
  write. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import AlreadyExistsError, ConflictError, NotFoundError
from trainium_contract.wire.recorded_membership import REFUSAL_KEY, STATUS_KEY
from trainium_operator.cluster.api.resources import CONFIG_MAPS
from trainium_operator.cluster.cache.membership_record import read_membership
from trainium_operator.cluster.cache.parts import as_mapping
from trainium_operator.cluster.execute.merge_patch import replace_content
from trainium_operator.cluster.queue.write_outcomes import check_identity

if TYPE_CHECKING:
    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.reflector import Lister
    from trainium_operator.cluster.cache.views import ChildRecord
    from trainium_operator.cluster.execute.owner_check import OwnerCheck
    from trainium_operator.plan.model.actions import PublishMembership
    from trainium_operator.plan.model.observed import JobView

_PARTS = frozenset({"data", "binaryData"})


@dataclass(frozen=True, slots=True)
class MembershipWrites:
    """See PublishMembership."""

    api: Api
    records: Lister[ChildRecord]
    owners: OwnerCheck

    async def write(self, job: JobView, action: PublishMembership) -> None:
        """Write the record. Raises ConflictError when the object holds a generation other than the one to replace.

        Raises ChangedError when the API server stores another record.
        """
        raw = await self._swap_cached(job, action) or await self._swap(job, action)
        changed = {part for part in _PARTS & action.manifest.keys() if raw.get(part) != action.manifest[part]}
        if changed and read_membership(raw) == action.membership:
            changed = set()  # another version of the operator packed the same record
        check_identity(action.manifest, raw, *changed)
        self.records.write_through(raw)
        name = action.manifest["metadata"]["name"]
        kept = self.records.store.get((job.namespace, name))
        record = kept.record if kept is not None else None
        written = {part: action.manifest[part] for part in _PARTS & action.manifest.keys()}
        if record is not None and record.to_config_map_data() == written:
            record.set_parsed(action.membership)

    async def _swap_cached(self, job: JobView, action: PublishMembership) -> Json | None:
        """Replace the cached version without a read; return None if it has changed or is not cached completely."""
        name = action.manifest["metadata"]["name"]
        cached = self.records.store.get_entry((job.namespace, name))
        record = cached.view.record if cached is not None and cached.owner == job.id else None
        if cached is None or record is None or record.holds_more or record.membership is None:
            return None
        if not record.membership.generation == action.replaces < action.membership.generation:
            return None
        try:
            return await self._merge(job, action, record.to_config_map_data(), str(cached.version))
        except (ConflictError, NotFoundError):
            return None

    async def _swap(self, job: JobView, action: PublishMembership) -> Json:
        name = action.manifest["metadata"]["name"]
        try:
            current = await self.api.get(CONFIG_MAPS, job.namespace, name)
        except NotFoundError:
            return await self._create(job, action)
        if await self.owners.check(job, CONFIG_MAPS, current):
            return await self._merge(job, action, current, current["metadata"]["resourceVersion"], keep=())
        recorded = read_membership(current)
        if recorded == action.membership:
            return current
        if recorded is not None and recorded.generation != action.replaces:
            # The cache was old: let the next plan read the current state.
            self.records.observe(current, deleted=False)
            raise ConflictError(
                f"ConfigMap {name} holds generation {recorded.generation}, not {action.replaces}", status=409
            )
        return await self._merge(job, action, current, current["metadata"]["resourceVersion"])

    async def _create(self, job: JobView, action: PublishMembership) -> Json:
        # Also when `replaces` names a generation: a person deleted the record, and the status has the generation.
        try:
            raw = await self.api.create(CONFIG_MAPS, job.namespace, action.manifest)
        except AlreadyExistsError as error:
            raise ConflictError(str(error), status=409) from error
        await self.owners.check(job, CONFIG_MAPS, raw)
        return raw

    async def _merge(
        self,
        job: JobView,
        action: PublishMembership,
        current: Json,
        version: str,
        keep: tuple[str, ...] = (STATUS_KEY, REFUSAL_KEY),
    ) -> Json:
        """Replace the content except for the keys of a refused status (see `status_writes`)."""
        metadata = {**action.manifest["metadata"], "resourceVersion": version}
        data = as_mapping(current.get("data"))
        kept = {key: data[key] for key in keep if key in data}
        manifest = {**action.manifest, "data": kept} if kept else action.manifest
        patch = {**replace_content(current, manifest), "metadata": metadata}
        return await self.api.merge(CONFIG_MAPS, job.namespace, metadata["name"], patch)
