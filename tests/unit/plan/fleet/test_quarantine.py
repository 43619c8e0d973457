"""Strikes, quarantine, probation, release, and the circuit breaker of the fleet, in virtual days."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.plan_builders import NOW
from trainium_contract.faults.causes import Cause
from trainium_contract.status.internal import FailureRecord
from trainium_operator.plan.fleet import memory
from trainium_operator.plan.fleet.quarantine import FleetObserved, FleetPlan, JobRecords, TaintNode, plan_fleet
from trainium_operator.plan.model.names import TAINT_QUARANTINED
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, NodeView, Taint, compute_max_bad_nodes

HOUR, DAY = 3600.0, 86_400.0
BROKEN = NodeCondition("NeuronHealth", NodeReadiness.TRUE, "NeuronHasError_DMA_ERROR", "", NOW)
OFFLINE = NodeCondition("NetworkingReady", NodeReadiness.FALSE, "InterfaceNotUp", "", NOW)


class Fleet:
    """A fleet whose memory is kept between plans, with the view of namespace `team`."""

    def __init__(self, nodes: int = 20) -> None:
        self.now = NOW
        self.nodes = {
            f"node-{number}": NodeView(name=f"node-{number}", provider_id=f"aws:///i-{number}")
            for number in range(nodes)
        }
        self.worker_nodes = frozenset(self.nodes)
        self.records: dict[str, list[FailureRecord]] = {"team/llama": []}
        self.memory: memory.Memory | None = memory.Memory()
        self.deleted_provider_ids: dict[str, str] = {}
        self.taints_nodes = False

    def fail(self, node: str, cause: Cause = Cause.DEVICE, job: str = "team/llama") -> None:
        record = FailureRecord(at=self.now, cause=cause, pod="p", node=node)
        self.records.setdefault(job, []).append(record)

    def wait(self, seconds: float) -> FleetPlan:
        self.now += seconds
        return self.plan()

    def plan(self) -> FleetPlan:
        jobs = tuple(
            JobRecords(uid=f"uid of {name}", name=name, failures=tuple(records))
            for name, records in self.records.items()
        )
        result = plan_fleet(
            FleetObserved(
                nodes=self.nodes,
                worker_nodes=self.worker_nodes,
                jobs=jobs,
                memory=self.memory,
                now=self.now,
                deleted_provider_ids=self.deleted_provider_ids,
                taints_nodes=self.taints_nodes,
            )
        )
        self.memory = result.memory
        self.view = result.view
        return replace(result, view=result.view.select_for_namespace("team"))

    def change(self, name: str, **fields: Any) -> None:
        self.nodes[name] = replace(self.nodes[name], **fields)

    def state(self, number: int) -> memory.MachineState | None:
        assert self.memory is not None
        entry = self.memory.machines.get(f"aws:///i-{number}")
        return entry.state if entry else None


def with_a_quarantined_node() -> Fleet:
    """Return a fleet after a broken device of node-3."""
    fleet = Fleet()
    fleet.fail("node-3")
    fleet.plan()
    return fleet


def test_a_renamed_node_keeps_its_quarantine() -> None:
    fleet = with_a_quarantined_node()
    del fleet.nodes["node-3"]
    fleet.wait(10)
    assert fleet.memory is not None
    assert fleet.memory.machines["aws:///i-3"].node == "node-3", "it is deleted, and that was its last name"
    fleet.nodes["ip-10-0-0-9"] = NodeView(name="ip-10-0-0-9", provider_id="aws:///i-3")
    assert fleet.wait(10).view.quarantined == {"ip-10-0-0-9"}
    assert fleet.memory.machines["aws:///i-3"].node == "ip-10-0-0-9"


def test_a_device_fault_quarantines_for_an_hour_then_probation_for_a_day() -> None:
    fleet = Fleet()
    fleet.fail("node-3")
    result = fleet.plan()
    assert result.view.quarantined == {"node-3"}
    assert result.requeue_after == HOUR
    message = "is Quarantined for namespace team until 2027-01-15T09:00:00Z: Device (team/llama)"
    assert result.changes == (f"node node-3 (aws:///i-3) {message}",)
    assert fleet.wait(HOUR - 1).view.quarantined == {"node-3"}
    after = fleet.wait(1)
    assert after.view.quarantined == frozenset()
    assert fleet.state(3) is memory.MachineState.PROBATION
    assert after.requeue_after == DAY
    fleet.wait(DAY)
    assert fleet.state(3) is None


def test_a_fault_on_probation_quarantines_at_once_and_longer() -> None:
    fleet = with_a_quarantined_node()
    fleet.wait(2 * HOUR)
    fleet.fail("node-3", Cause.NODE_LOST)
    assert fleet.plan().view.quarantined == {"node-3"}
    assert fleet.wait(3 * HOUR).view.quarantined == {"node-3"}
    assert fleet.wait(2 * HOUR).view.quarantined == frozenset()


def test_an_ambiguous_fault_counts_when_repeated() -> None:
    fleet = Fleet()
    fleet.fail("node-3", Cause.NODE_LOST)
    assert fleet.plan().view.quarantined == frozenset()
    assert fleet.state(3) is memory.MachineState.WATCHED
    fleet.now += HOUR
    fleet.fail("node-3", Cause.NODE_LOST)
    assert fleet.plan().view.quarantined == {"node-3"}


def test_three_faults_in_a_day_quarantine_permanently() -> None:
    fleet = Fleet()
    for job in ("team/llama", "other/job", "team/llama"):
        fleet.fail("node-3", job=job)
        fleet.plan()
        fleet.now += 6 * HOUR
    assert fleet.state(3) is memory.MachineState.PERMANENT
    assert fleet.wait(100 * DAY).view.quarantined == {"node-3"}


@pytest.mark.parametrize("cause", [Cause.CRASH, Cause.HANG])
def test_only_crashes_of_two_jobs_blame_the_node(cause: Cause) -> None:
    fleet = Fleet()
    for _ in range(5):
        fleet.fail("node-3", cause)
        fleet.plan()
        fleet.now += HOUR
    assert fleet.state(3) is memory.MachineState.WATCHED
    fleet.fail("node-3", cause, job="other/job")
    fleet.plan()
    assert fleet.state(3) is memory.MachineState.PERMANENT


def test_crashes_of_one_job_do_not_end_probation_early() -> None:
    fleet = with_a_quarantined_node()
    fleet.wait(HOUR)
    fleet.now += DAY - HOUR / 2
    fleet.fail("node-3", Cause.CRASH)
    assert fleet.plan().view.quarantined == frozenset()
    assert fleet.state(3) is memory.MachineState.PROBATION


def test_simultaneous_reports_are_one_strike() -> None:
    fleet = Fleet()
    for job in ("a/a", "b/b", "c/c"):
        fleet.fail("node-3", job=job)
        fleet.now += 60
    fleet.change("node-3", conditions=(replace(BROKEN, since=fleet.now - 30),))
    fleet.plan()
    assert fleet.state(3) is memory.MachineState.QUARANTINED
    assert fleet.memory is not None
    assert len(fleet.memory.machines["aws:///i-3"].strikes) == 1


def test_a_new_machine_of_the_same_name_has_no_strikes() -> None:
    fleet = with_a_quarantined_node()
    fleet.change("node-3", provider_id="aws:///i-new")
    assert fleet.plan().view.quarantined == frozenset()


def test_a_deleted_node_is_remembered_by_its_machine() -> None:
    fleet = Fleet()
    node = fleet.nodes.pop("node-3")
    fleet.deleted_provider_ids["node-3"] = node.provider_id
    fleet.fail("node-3")
    fleet.plan()
    assert fleet.state(3) is memory.MachineState.QUARANTINED
    fleet.nodes["node-3"] = node
    assert fleet.plan().view.quarantined == {"node-3"}


def test_without_provider_ids_nodes_are_remembered_by_name() -> None:
    fleet = Fleet()
    fleet.nodes = {name: NodeView(name=name) for name in fleet.nodes}
    fleet.fail("node-3")
    assert fleet.plan().view.quarantined == {"node-3"}


def test_deleting_the_memory_releases_all_machines() -> None:
    fleet = with_a_quarantined_node()
    fleet.memory = None
    assert fleet.plan().view.quarantined == frozenset()
    assert fleet.plan().memory.machines == {}


def test_a_reported_device_fault_is_one_strike_while_it_lasts() -> None:
    fleet = Fleet()
    fleet.change("node-3", conditions=(BROKEN,))
    assert fleet.plan().view.quarantined == {"node-3"}
    for _ in range(30):
        fleet.wait(HOUR)
    assert fleet.plan().view.quarantined == {"node-3"}, "it is still broken"
    assert fleet.state(3) is not memory.MachineState.PERMANENT, "it broke once"
    fleet.change("node-3", conditions=())
    assert fleet.plan().view.quarantined == frozenset()
    fleet.change("node-3", conditions=(replace(BROKEN, since=fleet.now),))
    fleet.plan()
    assert fleet.state(3) is memory.MachineState.QUARANTINED


def test_nodes_that_are_bad_now_get_no_new_worker() -> None:
    fleet = Fleet()
    fleet.change("node-3", conditions=(OFFLINE,))
    assert fleet.plan().view.quarantined == {"node-3"}
    assert fleet.plan().memory.machines == {}
    fleet.change("node-3", conditions=())
    assert fleet.plan().view.quarantined == frozenset()


@pytest.mark.parametrize(("nodes", "bad", "frozen"), [(20, 4, False), (20, 5, True), (5, 1, False), (5, 2, True)])
def test_too_many_bad_nodes_at_once_freeze_everything(nodes: int, bad: int, frozen: bool) -> None:
    fleet = Fleet(nodes)
    for number in range(bad):
        fleet.change(f"node-{number}", conditions=(BROKEN,))
        fleet.fail(f"node-{number}")
    result = fleet.plan()
    assert bool(result.view.frozen) is frozen
    assert len(result.view.quarantined) == (0 if frozen else bad)
    assert (result.memory.machines == {}) is frozen
    if frozen:
        assert result.view.frozen.startswith(f"{bad} of {nodes} nodes are bad at once, more than 20%")


def test_failures_while_frozen_count_against_no_node_afterwards() -> None:
    fleet = Fleet()
    for number in range(10):
        fleet.change(f"node-{number}", ready=NodeReadiness.UNKNOWN)
        fleet.fail(f"node-{number}", Cause.NODE_LOST)
    assert fleet.plan().view.frozen
    for number in range(10):
        fleet.change(f"node-{number}", ready=NodeReadiness.TRUE)
    result = fleet.wait(HOUR)
    assert (result.view.frozen, result.memory.machines) == ("", {})


def test_nodes_with_planned_disruptions_are_not_bad() -> None:
    fleet = Fleet()
    for number in range(10):
        fleet.change(f"node-{number}", taints=(Taint("karpenter.sh/disrupted"),))
    assert fleet.plan().view.frozen == ""


def test_nodes_without_workers_and_devices_are_ignored() -> None:
    fleet = Fleet(4)
    for number in range(100):
        fleet.nodes[f"web-{number}"] = NodeView(name=f"web-{number}", ready=NodeReadiness.FALSE)
    assert fleet.plan().view == replace(fleet.plan().view, quarantined=frozenset(), frozen="")


def test_failures_of_one_namespace_quarantine_only_there() -> None:
    fleet = Fleet(128)
    for _ in range(3):
        for number in range(25):
            fleet.fail(f"node-{number}", job="hostile/a")
            fleet.fail(f"node-{number}", job="hostile/b")
        fleet.plan()
        fleet.now += HOUR
    fleet.plan()
    assert fleet.view.quarantined == frozenset()
    assert fleet.view.select_for_namespace("team").quarantined == frozenset()
    assert len(fleet.view.select_for_namespace("hostile").quarantined) == 25
    assert memory.MachineState.PERMANENT not in {fleet.state(number) for number in range(128)}
    fleet.wait(2.5 * DAY)
    fleet.wait(DAY)
    assert fleet.view.select_for_namespace("hostile").quarantined == frozenset(), "it ages"


@pytest.mark.parametrize("minutes", [1, 120])
def test_another_namespace_or_the_node_itself_confirms_a_suspicion(minutes: int) -> None:
    by_job, by_node = Fleet(), Fleet()
    for fleet in (by_job, by_node):
        fleet.fail("node-3", job="hostile/a")
        fleet.plan()
        assert fleet.view.quarantined == frozenset()
        fleet.now += 60 * minutes
    by_job.fail("node-3", job="team/llama")
    by_node.change("node-3", conditions=(replace(BROKEN, since=by_node.now),))
    for fleet in (by_job, by_node):
        fleet.plan()
        assert fleet.view.quarantined == {"node-3"}
    by_node.change("node-3", conditions=())
    by_node.plan()
    assert by_node.view.quarantined == {"node-3"}


def test_suspicions_do_not_use_the_cap_of_confirmed_nodes() -> None:
    fleet = Fleet(10)
    for number in range(5):
        fleet.fail(f"node-{number}", job="hostile/a")
        fleet.fail(f"node-{number}", job="hostile/b")
    fleet.plan()
    fleet.now += HOUR / 2
    for job in ("team/llama", "other/job"):
        fleet.fail("node-9", job=job)
    fleet.plan()
    assert fleet.view.quarantined == {"node-9"}


def test_many_strikes_of_one_namespace_do_not_evict_those_of_another() -> None:
    fleet = Fleet()
    fleet.fail("node-3", Cause.NODE_LOST, job="team/llama")
    for _ in range(30):
        fleet.now += 700
        fleet.fail("node-3", job="hostile/a")
        fleet.plan()
    assert fleet.view.quarantined == {"node-3"}


def test_of_many_strikes_the_oldest_redundant_one_is_dropped() -> None:
    entry = memory.Machine(machine="m", node="n")
    for hours, job in enumerate(("team/llama", *("hostile/a",) * 9)):
        entry = memory.add_strike(entry, "n", memory.Strike(NOW + hours * HOUR, Cause.DEVICE, job))
    assert [(strike.at - NOW) / HOUR for strike in entry.strikes] == [0, 3, 4, 5, 6, 7, 8, 9]


def test_the_cap_spares_the_nodes_with_the_fewest_strikes() -> None:
    fleet = Fleet(10)
    for number in range(5):
        fleet.fail(f"node-{number}")
        fleet.now += 700
    fleet.fail("node-4")
    result = fleet.plan()
    assert len(result.view.quarantined) == 2
    assert "node-4" in result.view.quarantined


def test_a_smaller_fleet_keeps_only_the_worst_in_quarantine() -> None:
    fleet = Fleet(20)
    for number in (1, 2, 3, 2):
        fleet.fail(f"node-{number}")
        fleet.plan()
        fleet.now += 700
    assert fleet.plan().view.quarantined == {"node-1", "node-2", "node-3"}
    fleet.nodes = {
        name: node for name, node in fleet.nodes.items() if name in {f"node-{number}" for number in range(6)}
    }
    assert fleet.plan().view.quarantined == {"node-2"}


def test_taints_are_optional_and_removed_at_the_end() -> None:
    fleet = Fleet()
    fleet.fail("node-3")
    assert fleet.plan().taints == ()
    fleet.taints_nodes = True
    assert fleet.plan().taints == (), "one namespace alone taints no node"
    fleet.fail("node-3", job="other/job")
    taint = Taint(TAINT_QUARANTINED, "Device", "NoSchedule")
    assert fleet.plan().taints == (TaintNode("node-3", taint),)
    fleet.change("node-3", taints=(Taint("other"), taint))
    assert fleet.plan().taints == ()
    assert fleet.wait(HOUR).taints == (TaintNode("node-3", None),)


def test_the_memory_is_bounded_and_evicts_the_mildest_first() -> None:
    machines = {
        f"m-{number}": memory.Machine(
            machine=f"m-{number}", node="", strikes=(memory.Strike(NOW + number, Cause.NODE_LOST, "j"),)
        )
        for number in range(memory.MAX_MACHINES + 50)
    }
    machines["m-0"] = replace(machines["m-0"], state=memory.MachineState.PERMANENT)
    kept = memory.limit_machines(memory.Memory(machines=machines)).machines
    assert len(kept) == memory.MAX_MACHINES
    assert "m-0" in kept
    assert "m-1" not in kept


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["fail", "break", "repair", "lose", "wait", "delete", "rename"]),
        st.integers(0, 11),
        st.sampled_from([Cause.DEVICE, Cause.NODE_LOST, Cause.CRASH, Cause.HANG, Cause.NETWORK]),
        st.sampled_from([1.0, 700.0, HOUR, 7 * HOUR]),
    ),
    max_size=30,
)
ORDER = list(memory.MachineState)


@given(EVENTS)
def test_the_cap_holds_and_only_time_relaxes_a_state(events: list[Any]) -> None:
    fleet = Fleet(12)
    fleet.taints_nodes = True
    for kind, number, cause, seconds in events:
        name = f"node-{number}"
        if name not in fleet.nodes:
            continue
        before = fleet.memory
        match kind:
            case "fail":
                fleet.fail(name, cause, job=("team/a", "team/b", "other/c")[int(seconds) % 3])
            case "break":
                fleet.change(name, conditions=(replace(BROKEN, since=fleet.now),))
            case "repair":
                fleet.change(name, conditions=(), ready=NodeReadiness.TRUE)
            case "lose":
                fleet.change(name, ready=NodeReadiness.UNKNOWN)
            case "delete" if len(fleet.nodes) > 6:
                fleet.deleted_provider_ids[name] = fleet.nodes.pop(name).provider_id
            case "rename":
                fleet.nodes[f"{name}x"] = replace(fleet.nodes.pop(name), name=f"{name}x")
            case "wait":
                fleet.now += seconds
        result = fleet.plan()
        kept = (
            fleet.view.quarantined
            if fleet.view.frozen
            else frozenset(write.node for write in result.taints if write.taint is not None)
        )
        assert len(kept) <= compute_max_bad_nodes(12)
        assert all(len(nodes) <= compute_max_bad_nodes(12) for _, nodes in fleet.view.suspected), (
            "suspicions of one namespace have a cap too"
        )
        if kind != "wait":
            assert before is not None
            for machine, entry in before.machines.items():
                now = result.memory.machines[machine]
                assert ORDER.index(now.state) >= ORDER.index(entry.state)
                assert {(strike.at, strike.cause) for strike in now.strikes} >= {
                    (strike.at, strike.cause) for strike in entry.strikes
                }
        again = fleet.plan()
        assert (again.memory, again.view, again.changes) == (result.memory, result.view, ())
