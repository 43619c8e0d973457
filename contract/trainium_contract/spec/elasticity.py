"""`spec.elasticity`: the sizes at which a job may train."""

from __future__ import annotations

from enum import StrEnum

from trainium_contract.base import ContractModel
from trainium_contract.sizes import SizeRule


class IdleNodes(StrEnum):
    """Use of nodes that no other workload needs."""

    LEAVE = "Leave"
    """They stay idle."""
    TAKE = "Take"
    """The job grows onto them, up to workers.maxReplicas, to sizes that save a pass, where the steps that are left
    repay the change; its workers there have the lowest priority, and are the first to go."""


class ElasticitySpec(ContractModel):
    """Sizes at which the job may train."""

    sizes: SizeRule = SizeRule.ANY
    """Any: every number of nodes whose processes are whole model-parallel groups. Even: only those at which
    trainer.batch.globalSize is divisible by data-parallel degree x microSize."""
    idle_nodes: IdleNodes = IdleNodes.LEAVE
    """Take: train on idle nodes too, beyond workers.replicas and up to workers.maxReplicas, while they save a pass, and
    save and release them when another workload needs them."""
