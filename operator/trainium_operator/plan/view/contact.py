"""Whether so many workers are silent at once that the fault is more likely between them and the operator.

A partition and the loss of a zone look alike from here. Kubernetes' own node controller stops evicting when too much of
a cluster is unreachable at once; so do we. Above the bound nobody is given up because of what the control plane says (a
node that is not ready, or not there), nor because of its port when as many ports refuse. Two things still count:
members that report and wait for the silent ones, for then training stands still anyway, and a person's or the cloud's
word that a node is out of service.
Invariants: one may always be given up, so the loss of one node is answered at once, but none while the fleet is frozen:
many jobs of one worker each must not be given up one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainium_operator.plan.model.breaker import cap_of


@dataclass(frozen=True, slots=True)
class Contact:
    """The judgement."""

    lost: str = ""
    """Why silence says nothing now, as a sentence; empty while it does."""
    ports_believed: bool = True
    """Whether a port that refuses still says that its agent is gone."""


def judge_contact(*, running: int, silent: int, refusing: int, frozen: str) -> Contact:
    """From counts of workers; `frozen` is why nothing may be done to nodes (`FleetView`)."""
    bound = cap_of(running)
    if silent == 0 or (silent <= bound and not frozen):
        return Contact()
    why = f"while {frozen}" if frozen else "more than fail by chance"
    return Contact(
        lost=(
            f"{silent} of {running} workers are silent at once, {why}: none of their pods is deleted unless workers "
            "that still report wait for them. If their machines are gone, delete their nodes or taint them "
            "node.kubernetes.io/out-of-service"
        ),
        ports_believed=refusing <= bound,
    )
