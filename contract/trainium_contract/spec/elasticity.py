"""`spec.elasticity`: at which sizes a job may train."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel, StatusModel, later
from trainium_contract.sizes import SizeRule


class IdleNodes(StrEnum):
    """What becomes of nodes that nobody needs."""

    LEAVE = "Leave"
    """They stay idle."""
    TAKE = "Take"
    """The job grows onto them, up to workers.maxReplicas, to sizes that save a pass, where the steps that are left
    repay the change; its workers there have the lowest priority, and are the first to go."""


class ElasticitySpec(ContractModel):
    """At which sizes the job may train."""

    sizes: SizeRule = SizeRule.ANY
    """Any: every number of nodes whose processes are whole model-parallel groups. Even: only those at which
    trainer.batch.globalSize is divisible by data-parallel degree x microSize."""
    idle_nodes: IdleNodes = later(IdleNodes.LEAVE)
    """Take: train on idle nodes too, beyond workers.replicas and up to workers.maxReplicas, while they save a pass, and
    give them back, saved, to whoever needs them."""


class IdleNodesStatus(StatusModel):
    """Nodes beyond those that were asked for; with `elasticity.idleNodes: Take`."""

    taken: Annotated[int, Field(ge=0)] = 0
    """Of the desired nodes, those beyond what was asked for."""
    wanted: Annotated[int, Field(ge=0)] = 0
    """Workers of the lowest priority that are kept, or asked for, beyond what was asked for."""
    asked_at: float | None = None
    """Unix seconds since when some of them wait for a node; absent while none does."""
    in_vain: Annotated[int, Field(ge=0)] = 0
    """How often in a row some of them found no node."""
    retry_at: float | None = None
    """Unix seconds before which no more are asked for."""
