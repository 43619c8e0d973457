"""Faults of the fake data plane: processes, agents, pods, nodes and the network between them.

Each fault returns whether it applied; one that cannot happen in the current state changes nothing.
"""

from dataclasses import replace

from tests.unit.plan.fake_data_plane import FakeDataPlane, Node, Pod
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.model.observed import NodeCondition, NodeView, PodPhase, Taint


class FaultyDataPlane(FakeDataPlane):
    """A data plane with fault injection."""

    def members(self) -> list[Pod]:
        """Return pods of the membership that exist, by rank."""
        by_uid = {pod.view.uid: pod for pod in self.pods.values()}
        wanted = self.membership.members if self.membership else ()
        return [by_uid[member.pod_uid] for member in wanted if member.pod_uid in by_uid]

    def crash_process(self, rank: int, code: int = 139, cause: Cause = Cause.CRASH) -> bool:
        """Kill one rank, or the rank that hangs; the agents restart all ranks in place."""
        agents = [(pod, pod.agent) for pod in self.members() if pod.agent is not None]
        if not agents or any(agent.phase is not WorkerPhase.TRAINING for _, agent in agents):
            return False
        victim = agents[rank % len(agents)][1]
        victim.failures.append(victim.build_failure(rank, code, step=victim.step, at=self.now))
        for _, agent in agents:
            agent.phase = WorkerPhase.JOINING
            agent.restart_in_place(cause if agent is victim else Cause.PEER_LOST, step=agent.step, at=self.now)
        return True

    def give_up(self, rank: int, code: int) -> bool:
        """Let one agent give up with a verdict and the others of its generation stop."""
        agents = [pod.agent for pod in self.members() if pod.agent is not None]
        if not agents or any(agent.phase is not WorkerPhase.TRAINING for agent in agents):
            return False
        for agent in agents:
            agent.phase = WorkerPhase.FAILED
        victim = agents[rank % len(agents)]
        victim.verdict = victim.build_failure(rank, code, step=victim.step, at=self.now)
        return True

    def fail_preflight(self, name: str, code: int = 80) -> bool:
        """Fail the preflight of a worker that is no member."""
        pod = self.pods.get(name)
        agent = pod.agent if pod is not None else None
        if agent is None or agent.phase is not WorkerPhase.STANDBY:
            return False
        agent.phase, agent.ready = WorkerPhase.FAILED, False
        agent.verdict = agent.build_failure(0, code, step=-1, at=self.now, message="unfit")
        return True

    def kill_pod(self, name: str, phase: PodPhase = PodPhase.FAILED, code: int = 137) -> bool:
        """End the agent and so the pod, whose ranks have not finished, whatever its phase."""
        pod = self.pods.get(name)
        if pod is None or pod.agent is None:
            return False
        reason = "Completed" if code == 0 else "Error"
        pod.view = replace(pod.view, phase=phase, reason=reason, exit_code=code, finished=self.now)
        pod.agent = None
        return True

    def lose_node(self, name: str) -> bool:
        """Power off, freeze or disconnect a node: the control plane sees no difference."""
        node = self.nodes.get(name)
        if node is None or not node.up:
            return False
        node.up, node.down_since = False, self.now
        return True

    def resume_node(self, name: str) -> bool:
        """Unfreeze a node: its processes continue."""
        node = self.nodes.get(name)
        if node is None or node.up:
            return False
        node.up = True
        return True

    def partition_node(self, name: str, *, partitioned: bool = True) -> bool:
        """Cut the network between the agents of a node and the operator; training continues."""
        node = self.nodes.get(name)
        if node is None or node.partitioned is partitioned:
            return False
        node.partitioned = partitioned
        return True

    def delete_node(self, name: str) -> bool:
        """Delete the node object and its pods, as a scale-in does."""
        return self.nodes.pop(name, None) is not None

    def slow_node(self, name: str, slowness: float = 3.0) -> bool:
        """Slow down a node."""
        node = self.nodes.get(name)
        if node is None or node.slowness == slowness:
            return False
        node.slowness = slowness
        return True

    def mark_node(
        self,
        name: str,
        *,
        condition: NodeCondition | None = None,
        taint: Taint | None = None,
        schedulable: bool = True,
        deleting: bool = False,
    ) -> bool:
        """Set a condition, a taint, a cordon or a deletion on the node object."""
        node = self.nodes.get(name)
        if node is None:
            return False
        view = NodeView(
            name=name,
            conditions=(condition,) if condition else (),
            taints=(taint,) if taint else (),
            schedulable=schedulable,
            deleting=deleting,
        )
        if node.view == view:
            return False
        node.view = view
        return True

    def clear_node(self, name: str) -> None:
        """Recreate or repair the node, without conditions and taints."""
        node = self.nodes.setdefault(name, Node(name))
        node.view, node.partitioned, node.slowness = None, False, 1.0
        self.restore_node(name)

    def restore_node(self, name: str) -> None:
        """Boot a lost node: its processes have failed."""
        node = self.nodes.get(name)
        if node is None or node.up:
            return
        node.up = True
        for pod in self.pods.values():
            if pod.view.node == name and pod.agent is not None:
                pod.view = replace(pod.view, phase=PodPhase.FAILED, reason="ContainerStatusUnknown", exit_code=255)
                pod.agent = None
