"""A Kueue of one queue in virtual time: admits Workloads by priority and age, evicts them, and takes quota back.

Its conditions have the fields, types, reasons and order that a real controller writes (0.19.2, recorded). As in the
real one, reserved quota is free only when the Workload is deleted or finished or has returned it, and pod sets do not
change while quota is reserved.
"""

import asyncio
from typing import Any

from tests.testing.api.fake_api_server import FakeApiServer
from trainium_operator.cluster.api.resources import FLAVORS, WORKLOADS

INTERVAL_SECONDS = 0.3
FLAVOR = "trn1"


class FakeKueue:
    """A queue of `capacity` pods."""

    def __init__(self, cluster: FakeApiServer, capacity: int) -> None:
        self.cluster = cluster
        self.capacity = capacity
        spec = {"nodeLabels": {"pool": FLAVOR}, "tolerations": [{"key": "pool", "operator": "Exists"}]}
        cluster.add(FLAVORS, {"metadata": {"name": FLAVOR}, "spec": spec})
        self._frozen: dict[str, Any] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.check_pod_sets()
            self._admit()

    def workloads(self) -> dict[str, dict[str, Any]]:
        return {name: self.cluster.get(WORKLOADS, "default", name) for name in self.cluster.names(WORKLOADS)}

    def used_quota(self) -> int:
        return sum(_pod_count(raw) for raw in self.workloads().values() if _holds_quota(raw))

    def evict(self, name: str, reason: str = "Preempted") -> None:
        """Evict as a preemption does: the quota stays until it is returned."""

        def change(raw: dict[str, Any]) -> None:
            message = "Preempted to accommodate a workload (UID: u, JobUID: j) due to reclamation within the cohort"
            _set_condition(raw, "Evicted", True, reason, message)

        self.cluster.change(WORKLOADS, "default", name, change)

    def condition(self, name: str, kind: str) -> bool:
        return name in self.workloads() and _has_condition(self.workloads()[name], kind)

    def check_pod_sets(self) -> None:
        """Assert that admitted pod sets have not changed."""
        admitted = filter(_holds_quota, self.workloads().values())
        held = {raw["metadata"]["uid"]: raw["spec"]["podSets"] for raw in admitted}
        for uid, pod_sets in held.items():
            assert self._frozen.get(uid, pod_sets) == pod_sets, "pod sets were changed while quota was reserved"
        self._frozen = held

    def _admit(self) -> None:
        waiting = [raw for raw in self.workloads().values() if _is_pending(raw)]
        for raw in sorted(waiting, key=lambda workload: (-workload["spec"]["priority"], workload["metadata"]["name"])):
            fits = self.used_quota() + _pod_count(raw) <= self.capacity
            self.cluster.change(WORKLOADS, "default", raw["metadata"]["name"], _reserve if fits else _refuse)


def _pod_count(raw: dict[str, Any]) -> int:
    return sum(pod_set["count"] for pod_set in raw["spec"]["podSets"])


def _has_condition(raw: dict[str, Any], kind: str) -> bool:
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == kind and condition["status"] == "True" for condition in conditions)


def _holds_quota(raw: dict[str, Any]) -> bool:
    return _has_condition(raw, "QuotaReserved") and not _has_condition(raw, "Finished")


def _is_pending(raw: dict[str, Any]) -> bool:
    deactivated = raw["spec"].get("active") is False
    return not (deactivated or _has_condition(raw, "QuotaReserved") or _has_condition(raw, "Finished"))


def _set_condition(raw: dict[str, Any], kind: str, true: bool, reason: str, message: str) -> None:
    status = raw.setdefault("status", {})
    others = [condition for condition in status.get("conditions") or () if condition["type"] != kind]
    fields = {"lastTransitionTime": "2026-11-23T09:19:57Z", "observedGeneration": 1, "reason": reason}
    status["conditions"] = [*others, {**fields, "message": message, "status": str(true), "type": kind}]


def _reserve(raw: dict[str, Any]) -> None:
    assignments = [
        {
            "count": pod_set["count"],
            "flavors": {"pods": FLAVOR},
            "name": pod_set["name"],
            "resourceUsage": {"pods": str(pod_set["count"])},
        }
        for pod_set in raw["spec"]["podSets"]
    ]
    raw.setdefault("status", {})["admission"] = {"clusterQueue": "team", "podSetAssignments": assignments}
    _set_condition(raw, "QuotaReserved", True, "QuotaReserved", "Quota reserved in ClusterQueue team")
    _set_condition(raw, "Admitted", True, "Admitted", "The workload is admitted")
    if _has_condition(raw, "Evicted"):
        _set_condition(raw, "Evicted", False, "QuotaReserved", "Previously: Preempted to accommodate a workload")


def _refuse(raw: dict[str, Any]) -> None:
    message = "couldn't assign flavors to pod set workers: insufficient unused quota for pods in flavor trn1"
    if not raw.get("status", {}).get("conditions"):
        _set_condition(raw, "QuotaReserved", False, "Pending", message)
