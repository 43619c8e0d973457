"""The deadlines of a job, and when its activity started."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import MessageModel

DeadlineSeconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""A limit in whole seconds, at most a year."""


class ActivityStatus(MessageModel):
    """The clock of the deadlines: it stops while the job is suspended or waits for a queue, and then restarts at 0."""

    since: float | None = None
    """Unix seconds since when the job has been active; absent while it is not."""
    stepped: bool = False
    """Whether it has made a step since."""
