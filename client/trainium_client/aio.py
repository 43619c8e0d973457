"""`TrainingJob` with asynchronous verbs, for programs and notebooks that do other things meanwhile.

`from trainium_client.aio import TrainingJob`. Each verb is the other TrainingJob's, run in a thread, so the two cannot
differ in what they do; only waiting has a second implementation, because a thread must not sleep for a day.
Invariants: many jobs may be asked at once; a verb that is cancelled returns at once, and its one request, which has a
time limit, ends by itself.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from trainium_client import job as sync
from trainium_client.job import JobFailedError
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.views.job import JobView

__all__ = ["ClientError", "JobFailedError", "TrainingJob"]

_Asked = ParamSpec("_Asked")
_Result = TypeVar("_Result")


def _in_thread(
    verb: Callable[Concatenate[sync.TrainingJob, _Asked], _Result],
) -> Callable[Concatenate[TrainingJob, _Asked], Coroutine[Any, Any, _Result]]:
    """Wrap a method so that it has the same arguments and result, as a coroutine function."""

    async def asked(self: TrainingJob, /, *args: _Asked.args, **kwargs: _Asked.kwargs) -> _Result:
        return await asyncio.to_thread(verb, self.blocking, *args, **kwargs)

    functools.update_wrapper(asked, verb)
    return asked


class TrainingJob:
    """One TrainingJob of a cluster, by its name; arguments and verbs are those of `trainium_client.TrainingJob`."""

    __slots__ = ("blocking",)

    def __init__(self, name: str, spec: Mapping[str, Any] | None = None, **where: Any) -> None:
        """`where`: namespace, context, kubeconfig, metadata."""
        self.blocking = sync.TrainingJob(name, spec, **where)

    @classmethod
    def from_spec(cls, name: str, spec: TrainingJobSpec, **where: Any) -> TrainingJob:
        """Create a job from the contract's typed model."""
        return cls._of(sync.TrainingJob.from_spec(name, spec, **where))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **where: Any) -> TrainingJob:
        """Create a job from a manifest. Raises ClientError when the file holds none."""
        return cls._of(sync.TrainingJob.from_file(path, **where))

    @classmethod
    def _of(cls, blocking: sync.TrainingJob) -> TrainingJob:
        made = cls(blocking.name)
        made.blocking = blocking
        return made

    status = _in_thread(sync.TrainingJob.status)
    why = _in_thread(sync.TrainingJob.why)
    events = _in_thread(sync.TrainingJob.events)
    logs = _in_thread(sync.TrainingJob.logs)
    metrics = _in_thread(sync.TrainingJob.metrics)
    artifacts = _in_thread(sync.TrainingJob.artifacts)
    scale = _in_thread(sync.TrainingJob.scale)
    suspend = _in_thread(sync.TrainingJob.suspend)
    resume = _in_thread(sync.TrainingJob.resume)
    retry = _in_thread(sync.TrainingJob.retry)
    delete = _in_thread(sync.TrainingJob.delete)

    async def apply(self) -> TrainingJob:
        """Create the job, or change it to this spec (server-side apply)."""
        await asyncio.to_thread(self.blocking.apply)
        return self

    async def wait(
        self,
        until: str = "Completed",
        *,
        seconds: float = 24 * 3600.0,
        on_view: Callable[[JobView], Awaitable[None] | None] | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> JobView:
        """Wait until the job is in that phase; `on_view` is called with each view and may be a coroutine function.

        Raises JobFailedError when it fails instead, ClientError when it ends otherwise or the time is over.
        """
        target = sync.WaitTarget(self.blocking.name, until, seconds, time.monotonic())
        while True:
            view = await self.status()
            result = None if on_view is None else on_view(view)
            if inspect.isawaitable(result):
                await result
            if target.is_met(view, time.monotonic()):
                return view
            await pause(sync.POLL_SECONDS)

    async def watch(
        self, *, seconds: float = 24 * 3600.0, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> JobView:
        """Show the job, live, until it has ended or the time is over; several at once, each in a separate place."""
        from trainium_client.live import Watched, curve_so_far, open_display  # noqa: PLC0415 - only watching needs it

        view = await self.status()
        with open_display() as display:
            watched = Watched(display, time.monotonic() + seconds)
            while True:
                if watched.lacks_curve(view):
                    watched.begin(await asyncio.to_thread(curve_so_far, self.blocking.metrics))
                watched.saw(view)
                if watched.is_over(view, time.monotonic()):
                    return view
                await pause(sync.POLL_SECONDS)
                view = await self.status()

    def __repr__(self) -> str:
        """Represent the job as the other class does."""
        return f"aio.{self.blocking!r}"

    def _repr_html_(self) -> str:
        """Render the job for a notebook, which cannot await."""
        return self.blocking._repr_html_()
