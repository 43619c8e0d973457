"""Faults of the fake world: processes, agents, pods, nodes and the network between them.

Each fault answers whether it applied: one that makes no sense in the present state changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from plan_world import Agent, FakeWorld, Node, Pod

from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import ProcessFailure, RestartRecord, WorkerPhase
from trainium_operator.plan.model.observed import NodeCondition, NodeView, PodPhase, Taint


class FaultyWorld(FakeWorld):
    """The world with its faults."""

    def members(self) -> list[Pod]:
        """Pods of the membership that exist, by rank."""
        by_uid = {each.view.uid: each for each in self.pods.values()}
        wanted = self.membership.members if self.membership else ()
        return [by_uid[member.pod_uid] for member in wanted if member.pod_uid in by_uid]

    def crash_process(self, rank: int, code: int = 139, cause: Cause = Cause.CRASH) -> bool:
        """One rank dies, or is killed as the cause of a hang; the agents restart all ranks in place by themselves."""
        agents = [(each, each.agent) for each in self.members() if each.agent is not None]
        if not agents or any(agent.phase is not WorkerPhase.TRAINING for _, agent in agents):
            return False
        victim = agents[rank % len(agents)][1]
        victim.failures.append(self._failure(victim, rank, code))
        for _, agent in agents:
            agent.attempt += 1
            agent.phase = WorkerPhase.JOINING
            agent.restarts.append(
                RestartRecord(
                    sequence=len(agent.restarts),
                    generation=agent.generation,
                    attempt=agent.attempt,
                    cause=cause if agent is victim else Cause.PEER_LOST,
                    failed_at=self.now,
                    detected_at=self.now,
                    step_before=agent.step,
                )
            )
        return True

    def _failure(self, victim: Agent, rank: int, code: int) -> ProcessFailure:
        return ProcessFailure(
            sequence=len(victim.failures),
            generation=victim.generation,
            attempt=victim.attempt,
            rank=rank,
            exit_code=code,
            step=victim.step,
            message="boom",
            at=self.now,
        )

    def give_up(self, rank: int, code: int) -> bool:
        """One agent gives up with a verdict, the others of its generation stop."""
        agents = [each.agent for each in self.members() if each.agent is not None]
        if not agents or any(agent.phase is not WorkerPhase.TRAINING for agent in agents):
            return False
        for agent in agents:
            agent.phase = WorkerPhase.FAILED
        victim = agents[rank % len(agents)]
        victim.verdict = self._failure(victim, rank, code)
        return True

    def unfit(self, name: str, code: int = 80) -> bool:
        """The preflight of a worker that is no member finds that it cannot work there."""
        found = self.pods.get(name)
        agent = found.agent if found is not None else None
        if agent is None or agent.phase is not WorkerPhase.STANDBY:
            return False
        agent.phase, agent.ready = WorkerPhase.FAILED, False
        agent.verdict = ProcessFailure(
            sequence=0, generation=0, attempt=0, rank=0, exit_code=code, message="unfit", at=self.now
        )
        return True

    def kill_pod(self, name: str) -> bool:
        """The pod ends with its agent killed."""
        found = self.pods.get(name)
        if found is None or found.agent is None:
            return False
        found.view = replace(found.view, phase=PodPhase.FAILED, reason="Error", exit_code=137, finished=self.now)
        found.agent = None
        return True

    def lose_node(self, name: str) -> bool:
        """Power off, frozen or cut off: to the control plane it is the same."""
        node = self.nodes.get(name)
        if node is None or not node.up:
            return False
        node.up, node.down_since = False, self.now
        return True

    def thaw_node(self, name: str) -> bool:
        """It was only frozen: what ran there goes on, and does not know that time has passed."""
        node = self.nodes.get(name)
        if node is None or node.up:
            return False
        node.up = True
        return True

    def mute_node(self, name: str, *, muted: bool = True) -> bool:
        """The network between its agents and the operator is cut; training goes on."""
        node = self.nodes.get(name)
        if node is None or node.muted is muted:
            return False
        node.muted = muted
        return True

    def delete_node(self, name: str) -> bool:
        """The node object and what ran there are deleted, as after a scale-in."""
        return self.nodes.pop(name, None) is not None

    def slow_node(self, name: str, slowness: float = 3.0) -> bool:
        """Its work takes longer from now on."""
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
        """Something is written on the node: a condition, a taint, a cordon, a deletion."""
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
        """Nothing is written on it any more, and it is there, up and reachable."""
        node = self.nodes.setdefault(name, Node(name))
        node.view, node.muted, node.slowness = None, False, 1.0
        self.restore_node(name)

    def restore_node(self, name: str) -> None:
        """It comes back after a reboot: what ran there has failed."""
        node = self.nodes.get(name)
        if node is None or node.up:
            return
        node.up = True
        for each in self.pods.values():
            if each.view.node == name and each.agent is not None:
                each.view = replace(each.view, phase=PodPhase.FAILED, reason="ContainerStatusUnknown", exit_code=255)
                each.agent = None
