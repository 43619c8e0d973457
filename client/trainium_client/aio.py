"""`TrainingJob` with asynchronous methods, for programs and notebooks that do other work meanwhile.

`from trainium_client.aio import TrainingJob`. Each method runs that of the synchronous class in a thread, so the two
behave the same. Only waiting has a second implementation, because a thread must not sleep for a day.

Invariants: many jobs may be queried at once. A cancelled method returns at once; its request continues in its thread.
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

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def _in_thread(
    method: Callable[Concatenate[sync.TrainingJob, _Params], _Result],
) -> Callable[Concatenate[TrainingJob, _Params], Coroutine[Any, Any, _Result]]:
    """Wrap a method so that it has the same arguments and result, as a coroutine function."""

    async def call(self: TrainingJob, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        return await asyncio.to_thread(method, self.blocking, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


class TrainingJob:
    """A TrainingJob of a cluster, by its name; arguments and methods are those of `trainium_client.TrainingJob`."""

    __slots__ = ("blocking",)

    def __init__(self, name: str, spec: Mapping[str, Any] | None = None, **location: Any) -> None:
        """Create the job; `location` has namespace, context, kubeconfig and metadata."""
        self.blocking = sync.TrainingJob(name, spec, **location)

    @classmethod
    def from_spec(cls, name: str, spec: TrainingJobSpec, **location: Any) -> TrainingJob:
        """Create a job from the contract's typed model."""
        return cls._wrap(sync.TrainingJob.from_spec(name, spec, **location))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **location: Any) -> TrainingJob:
        """Create a job from a manifest. Raises ClientError if the file has none."""
        return cls._wrap(sync.TrainingJob.from_file(path, **location))

    @classmethod
    def _wrap(cls, blocking: sync.TrainingJob) -> TrainingJob:
        job = cls(blocking.name)
        job.blocking = blocking
        return job

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
        phase: str = "Completed",
        *,
        timeout_seconds: float = 24 * 3600.0,
        on_view: Callable[[JobView], Awaitable[None] | None] | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> JobView:
        """Wait until the job is in that phase; `on_view` is called with each view and may be a coroutine function.

        Raises JobFailedError if it fails instead, ClientError if it ends otherwise or after the timeout.
        """
        target = sync.WaitTarget(self.blocking.name, phase, timeout_seconds, time.monotonic())
        while True:
            view = await self.status()
            result = None if on_view is None else on_view(view)
            if inspect.isawaitable(result):
                await result
            if target.is_met(view, time.monotonic()):
                return view
            await pause(sync.POLL_SECONDS)

    async def watch(
        self, *, timeout_seconds: float = 24 * 3600.0, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> JobView:
        """Show the job live until it has ended or the timeout; several at once have separate outputs."""
        from trainium_client.live import WatchState, open_display, read_curve_if_possible  # noqa: PLC0415 - only watching needs it

        view = await self.status()
        with open_display() as display:
            watch_state = WatchState(display, time.monotonic() + timeout_seconds)
            while True:
                if watch_state.needs_curve(view):
                    watch_state.set_curve(await asyncio.to_thread(read_curve_if_possible, self.blocking.metrics))
                watch_state.update(view)
                if watch_state.has_ended(view, time.monotonic()):
                    return view
                await pause(sync.POLL_SECONDS)
                view = await self.status()

    def __repr__(self) -> str:
        """Represent the job as the synchronous class does."""
        return f"aio.{self.blocking!r}"

    def _repr_html_(self) -> str:
        """Render the job for a notebook, which cannot await."""
        return self.blocking._repr_html_()
