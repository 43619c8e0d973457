"""Policy: others are kept away from a job's workers by a NetworkPolicy, as soon as there are pods.

Nothing waits for it: it is written after the pods, with a pause of its own when it is refused, and a job without it
trains. What keeps it from being there is told in the condition NetworkPolicyApplied, which a job has only from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.manifests.network_policy import KIND, network_policy, on_host_network
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import Answer, ApplyPolicy, event
from trainium_operator.plan.model.conditions import find_condition, is_terminal, is_true, with_condition
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.observed import PolicyRefusal
    from trainium_operator.plan.view.facts import Facts

_KIND = ConditionType.NETWORK_POLICY_APPLIED
LOOK_SECONDS = 5.0
"""Until the policies that there are have been read."""


def keep_others_away(facts: Facts, status: TrainingJobStatus) -> Answer:
    """Make the policy, or bring it in line with the settings; what turned out not to be possible is told."""
    observed, ingress = facts.observed, facts.settings.worker_ingress
    if ingress is None:
        return Answer(status=_without_condition(status))
    if is_terminal(status) or not observed.pods:
        return Answer(status=status)
    applied = observed.children.get(f"{KIND}/{names.network_policy_name(facts.job.name)}")
    if applied is None and on_host_network(facts.job):
        return Answer(status=_without_condition(status))
    manifest = network_policy(facts.job, ingress)
    if applied == manifest["metadata"]["annotations"][names.ANNOTATION_CONTENT_HASH]:
        if find_condition(status, _KIND) is not None:
            status = with_condition(status, _KIND, True, Reason.POLICY_APPLIED, "", now=facts.now)
        return Answer(status=status)
    if not observed.policies_known:
        return Answer(status=status, looks=(facts.now + LOOK_SECONDS,))
    answer = Answer(status=status)
    if observed.policy_refusal is not None:
        answer = _told(facts, status, observed.policy_refusal)
        if facts.now < observed.policy_refusal.again_from:
            return answer.then(Answer(status=answer.status, looks=(observed.policy_refusal.again_from,)))
    return answer.then(Answer(status=answer.status, actions=(ApplyPolicy(manifest),)))


def _told(facts: Facts, status: TrainingJobStatus, refusal: PolicyRefusal) -> Answer:
    """The condition, and an event when it is new."""
    reason = Reason.NAME_TAKEN if refusal.taken else Reason.WRITE_FAILED
    text = f"others can reach the workers' ports: {refusal.sentence}"
    # False with a name that is taken would call the job stalled, and it trains.
    status = with_condition(status, _KIND, None if refusal.taken else False, reason, text, now=facts.now)
    before = find_condition(facts.job.status, _KIND)
    new = before is None or is_true(facts.job.status, _KIND) or before.reason != reason
    return Answer(status=status, notes=(event(reason, text, warning=True),) if new else ())


def _without_condition(status: TrainingJobStatus) -> TrainingJobStatus:
    if find_condition(status, _KIND) is None:
        return status
    return status.replaced(conditions=tuple(each for each in status.conditions if each.type is not _KIND))
