"""`spec.elasticity`: at which sizes a job may train."""

from __future__ import annotations

from trainium_contract.base import ContractModel
from trainium_contract.sizes import SizeRule


class ElasticitySpec(ContractModel):
    """At which sizes the job may train."""

    sizes: SizeRule = SizeRule.ANY
    """Any: every number of nodes whose processes are whole model-parallel groups. Even: only those at which
    trainer.batch.globalSize is divisible by data-parallel degree x microSize."""
