"""Into which Workloads a job's quota is divided: what it needs, and quota steps beyond it, each worth a pass.

Kueue admits and preempts whole Workloads. So an elastic job asks for its smallest size with one, and for each larger
size that saves a pass with one more: it starts on what it gets, a preemption takes steps and leaves the job training,
and a step that is free again makes it grow. A rigid job has one Workload. Pure arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_operator.plan.view.size import SizeDecision

MOST_STEPS = 8
"""Workloads beside the first; with more useful sizes than that a step is several of them."""


def needed_workers(size: SizeDecision) -> int:
    """Workers that the job cannot begin without; 0 when no size is legal."""
    if size.shape is None or not size.desired:
        return 0
    return next(filter(size.shape.is_legal, range(size.floor, size.desired + 1)), 0)


def steps_from(size: SizeDecision, workers: int, most: int = MOST_STEPS, *, extras: int = 0) -> tuple[int, ...]:
    """Workers of each further step, from so many workers up to the desired size and `extras`; at most `most` steps."""
    largest = size.desired + extras
    if size.shape is None or workers >= largest or most < 1:
        return ()
    elastic = size.floor < size.desired or workers >= size.desired
    between = size.shape.useful_sizes(workers + 1, largest) if elastic else (size.desired,)
    ends = [each for each in between if each < largest]
    ends.append(largest)
    # Evenly thinned out, and the last is kept: that is the size which the job asks for.
    count = min(most, len(ends))
    ends = [ends[(number + 1) * len(ends) // count - 1] for number in range(count)]
    return tuple(end - begin for begin, end in zip((workers, *ends), ends, strict=False))


def size_within(size: SizeDecision, workers: int) -> int:
    """The size to work towards with quota for so many workers.

    A job whose new smallest size is not granted yet goes on with what it has.
    """
    if size.shape is None or not size.desired:
        return 0
    most = min(workers, size.desired)
    return size.shape.best(most, size.floor) or size.shape.best(most)
