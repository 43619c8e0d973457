"""Policy: a job that has ended is deleted `ttlSecondsAfterFinished` after its end, with everything it owns.

Invariant: only what this plan saw is deleted: the uid and the version of the job are preconditions, so a job that was
made again under the name, or changed a moment ago, is looked at anew first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.model.actions import DeleteJob
from trainium_operator.plan.model.answer import Answer
from trainium_operator.plan.model.times import parse_rfc3339, rfc3339

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.facts import Facts


def expire(facts: Facts, status: TrainingJobStatus) -> Answer:
    """Ask for the deletion of an ended job when it is due, else for a look at that time."""
    ttl = facts.job.spec.ttl_seconds_after_finished
    if ttl is None:
        return Answer(status=status)
    ended = parse_rfc3339(status.completion_time)
    if ended is None:
        # Lost, or edited by hand: the time begins anew rather than the job going at once.
        status = status.replaced(completion_time=rfc3339(facts.now))
        ended = facts.now
    # A time from the future (a clock that was set back) delays the deletion by no more than the whole time.
    due = min(ended, facts.now) + ttl
    if facts.now < due or status != facts.job.status:
        return Answer(status=status, looks=(max(due, facts.now),))
    return Answer(status=status, actions=(DeleteJob(facts.job.uid, facts.job.resource_version),))
