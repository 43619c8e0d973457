"""Rules of the API server for `spec.recovery`, in the Common Expression Language; see `rules.py`.

Guarantees: every rule that `faults.classify.match_rules` would skip is refused here, so no rule is silently unused.
"""

from __future__ import annotations

from trainium_contract.definition.cel import Rule
from trainium_contract.faults.causes import NO_FAULT_CAUSES, USER_CAUSES, Cause


def _listed(causes: frozenset[Cause]) -> str:
    return "[" + ", ".join(f"'{cause.value}'" for cause in Cause if cause in causes) + "]"


_NO_FAULTS = ", ".join(cause.value for cause in Cause if cause in NO_FAULT_CAUSES)
_FAULTS = frozenset(Cause) - NO_FAULT_CAUSES

RECOVERY_RULE_RULES: tuple[Rule, ...] = (
    Rule(
        """(has(self.exitCodes) && size(self.exitCodes) > 0) || (has(self.reason) && self.reason != '')
        || (has(self.message) && self.message != '')""",
        "a rule needs a condition: give exitCodes, reason or message, or it would match every failure",
    ),
    Rule(
        f"!(self.cause in {_listed(NO_FAULT_CAUSES)})",
        f"{_NO_FAULTS} are no faults: give the cause that the failure is to be attributed to, for instance UserCode",
        ".cause",
    ),
    Rule(
        f"self.action != 'AvoidNode' || !(self.cause in {_listed(USER_CAUSES)})",
        "a node is not to blame for an error of the user: choose action ReplaceWorker, or a cause such as Host",
        ".action",
    ),
)
"""Of one entry of `spec.recovery.rules`."""

BY_CAUSE_RULES: tuple[Rule, ...] = (
    Rule(
        f"self.all(cause, cause in {_listed(_FAULTS)})",
        "a key of byCause is not the cause of a fault; see the causes of recovery.rules[].cause",
    ),
)
"""Of `spec.recovery.budgets.byCause`."""
