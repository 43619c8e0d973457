"""Count the free devices of each node as slices and claims change, so that a plan only looks them up.

A device is free if the newest generation of its pool publishes it, no taint prevents its allocation, and no claim holds
it. Where only some namespaces are served, claims of others are invisible, and the count is an upper bound.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_operator.cluster.cache.device_views import ClaimView, SliceView
    from trainium_operator.cluster.cache.store import Entry, IndexedCache, Key
    from trainium_operator.plan.model.devices import DeviceTaint

Device = tuple[str, str]
"""(pool, device)."""


class Inventory:
    """Free devices and taints, updated by the two stores that it listens to."""

    def __init__(self, slices: IndexedCache[SliceView], claims: IndexedCache[ClaimView]) -> None:
        self._slices: dict[str, dict[Key, SliceView]] = defaultdict(dict)
        self._holders: dict[Device, int] = defaultdict(int)
        self._held: dict[str, dict[Key, tuple[Device, ...]]] = {}
        """By pod uid: the devices that each of its claims holds."""
        self._node_of: dict[str, str] = {}
        """Pool -> node."""
        self._free: dict[str, int] = {}
        self._tainted: set[str] = set()
        """Nodes with a tainted device. Almost none, and each plan asks for the taints of all its pods."""
        slices.listen(self._handle_slice_change)
        claims.listen(self._handle_claim_change)

    def list_nodes(self) -> Iterator[str]:
        """Return an iterator over the nodes that publish devices."""
        return iter(self._free)

    def count_free_on(self, node: str) -> int:
        """Return how many devices of a node are free."""
        return self._free.get(node, 0)

    def find_taints(self, pod: str) -> tuple[DeviceTaint, ...]:
        """Return the taints of the devices that a pod (uid) holds."""
        if not self._tainted:
            return ()
        return tuple(
            taint
            for held in self._held.get(pod, {}).values()
            for pool, device in held
            if self._node_of.get(pool) in self._tainted
            for view in self._list_newest_slices(self._node_of.get(pool, ""))
            if view.pool == pool
            for taint in view.devices.get(device, ())
        )

    def _handle_slice_change(self, key: Key, old: Entry[SliceView] | None, new: Entry[SliceView] | None) -> None:
        for entry in (old, new):
            if entry is not None and entry.view.node:
                self._slices[entry.view.node].pop(key, None)
        if new is not None and new.view.node:
            self._slices[new.view.node][key] = new.view
            self._node_of[new.view.pool] = new.view.node
        for node in {entry.view.node for entry in (old, new) if entry is not None and entry.view.node}:
            self._recount_node(node)

    def _handle_claim_change(self, key: Key, old: Entry[ClaimView] | None, new: Entry[ClaimView] | None) -> None:
        before, after = old.view.held if old is not None else (), new.view.held if new is not None else ()
        for pod in old.view.pods if old is not None else ():
            self._held.get(pod, {}).pop(key, None)
            if not self._held.get(pod):
                self._held.pop(pod, None)
        for pod in new.view.pods if new is not None and after else ():
            self._held.setdefault(pod, {})[key] = after
        for device in before:
            self._holders[device] -= 1
            if not self._holders[device]:
                del self._holders[device]
        for device in after:
            self._holders[device] += 1
        for node in {self._node_of.get(pool, "") for pool, _ in before + after} - {""}:
            self._recount_node(node)

    def _list_newest_slices(self, node: str) -> list[SliceView]:
        """Return the slices of a node, without those of a pool that a newer generation has replaced."""
        views = self._slices.get(node, {}).values()
        newest: dict[str, int] = {}
        for view in views:
            newest[view.pool] = max(view.generation, newest.get(view.pool, 0))
        return [view for view in views if view.generation == newest[view.pool]]

    def _recount_node(self, node: str) -> None:
        if not self._slices.get(node):
            self._slices.pop(node, None)
            self._free.pop(node, None)
            self._tainted.discard(node)
            self._node_of = {pool: name for pool, name in self._node_of.items() if name != node}
            return
        views = self._list_newest_slices(node)
        self._free[node] = sum((view.pool, device) not in self._holders for view in views for device in view.free())
        if any(taints for view in views for taints in view.devices.values()):
            self._tainted.add(node)
        else:
            self._tainted.discard(node)
