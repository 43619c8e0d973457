"""CEL rules about how long a job may be active, and about who controls it."""

from __future__ import annotations

from trainium_contract.definition.cel import RefusalReason, Rule, format_message
from trainium_contract.spec.managed_by import MANAGER

ACTIVITY_RULES: tuple[Rule, ...] = (
    Rule(
        """!has(self.startupDeadlineSeconds) || !has(self.activeDeadlineSeconds)
        || self.startupDeadlineSeconds <= self.activeDeadlineSeconds""",
        "startupDeadlineSeconds must not be above activeDeadlineSeconds, which would end the job before",
        ".startupDeadlineSeconds",
        format_message(
            "startupDeadlineSeconds %s is above activeDeadlineSeconds %s, which would end the job before: lower it, or "
            "leave one of them out",
            "self.startupDeadlineSeconds",
            "self.activeDeadlineSeconds",
        ),
    ),
    Rule(
        """!has(self.managedBy) || self.managedBy.matches(
        '^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[-A-Za-z0-9._~%/:@+=]+$')""",
        f"managedBy names a controller as domain/name, for instance {MANAGER} (this operator)",
        ".managedBy",
    ),
)
"""Of `spec`, beside `crd_rules.SPEC_RULES`."""

CONTROLLER_RULES: tuple[Rule, ...] = (
    Rule(
        """has(self.spec.managedBy) == has(oldSelf.spec.managedBy)
        && (!has(self.spec.managedBy) || self.spec.managedBy == oldSelf.spec.managedBy)""",
        "managedBy cannot change: a job has one controller from its creation on; create the job again, and it resumes "
        "from its newest checkpoint",
        ".spec.managedBy",
        reason=RefusalReason.FORBIDDEN,
    ),
)
"""Of the whole job, beside `crd_rules.ROOT_RULES`."""
