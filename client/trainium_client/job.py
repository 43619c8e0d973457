"""`TrainingJob`: apply a job, wait for it, read it and delete it from a Python program or a notebook.

Invariants: every method makes one or a few calls to the API server and caches nothing, so results are current. Errors
are a `ClientError` with a sentence. Waiting has a limit.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from trainium_client.api import Api, Unreadable
from trainium_client.manifest import read_manifest
from trainium_client.pod_exec import read_curve_in_pod
from trainium_client.read import read_interruption, read_job_snapshot, read_members
from trainium_client.retry import correct_manifest, retry_job
from trainium_client.views.log_lines import parse_log_line
from trainium_contract.api_server.errors import ClientError, NotFoundError
from trainium_contract.views.checkpoints import get_metrics_path
from trainium_contract.views.events import EventView, build_event_views
from trainium_contract.views.job import build_job_view
from trainium_contract.views.raw import read_mapping, read_text
from trainium_contract.wire.worker_env import GROUP, KIND, VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_client.views.interruption_report import InterruptionReport
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.views.curve import CurvePoint
    from trainium_contract.views.job_view import ArtifactView, JobView

_Result = TypeVar("_Result")
_MANAGER = "trainium-client"
_POLL_SECONDS = 2.0


class JobFailedError(ClientError):
    """The awaited job has failed; the sentence is its verdict."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A TrainingJob of a cluster, by its name."""

    name: str
    spec: Mapping[str, Any] | None = None
    """Manifest to apply; None for a job that exists."""
    namespace: str = ""
    """Empty for the namespace of the kubeconfig's context."""
    context: str | None = None
    kubeconfig: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Labels and annotations to apply."""

    @classmethod
    def from_spec(cls, name: str, spec: TrainingJobSpec, **location: Any) -> TrainingJob:
        """Create a job from the contract's typed model."""
        return cls(name, spec.to_wire(), **location)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **location: Any) -> TrainingJob:
        """Create a job from a manifest. Raises ClientError if the file has none."""
        manifest = read_manifest(path)
        metadata = read_mapping(manifest, "metadata")
        labels = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
        location = {"namespace": read_text(metadata, "namespace"), **location}
        return cls(read_text(metadata, "name"), read_mapping(manifest, "spec"), metadata=labels, **location)

    def apply(self) -> TrainingJob:
        """Create the job, or change it to this spec (server-side apply)."""
        if self.spec is None:
            raise ClientError(f"there is no spec of {self.name} to apply: give one, or use from_file")
        self._call(lambda api: api.apply_job(self._build_manifest(api), _MANAGER))
        return self

    def _build_manifest(self, api: Api) -> dict[str, Any]:
        metadata = {**self.metadata, "name": self.name, "namespace": api.namespace}
        return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": dict(self.spec or {})}

    def status(self) -> JobView:
        """Return the job as `kubectl trn status` shows it."""
        return self._call(lambda api: read_job_snapshot(api, self.name, time.time()).view)

    def why(self, entry: int | None = None) -> InterruptionReport:
        """Return the last interruption, or why the job failed, with the log lines about it."""
        return self._call(lambda api: read_interruption(api, self.name, time.time(), entry))

    def events(self) -> tuple[EventView, ...]:
        """Return the events, the newest first."""

        def read(api: Api) -> tuple[EventView, ...]:
            uid = read_text(read_mapping(api.read_job(self.name), "metadata"), "uid")
            return build_event_views(_require_readable(api.list_events(self.name)), uid=uid)

        return self._call(read)

    def logs(self, rank: int = 0, *, tail: int | None = None) -> list[str]:
        """Return the lines of a rank in its current pod; `tail` limits them to the last lines of the pod."""

        def read(api: Api) -> list[str]:
            member = read_members(api, self.name).find_by_rank(rank)
            if member is None:
                raise ClientError(f"there is no rank {rank} of {self.name}")
            query = {"timestamps": "true", **({} if tail is None else {"tailLines": str(tail)})}
            lines = str(_require_readable(api.read_log(member.pod, query=query))).splitlines()
            entries = [parse_log_line(line.partition(" ")[2]) for line in lines]
            return [line for entry in entries if entry.rank == rank for line in entry.text.split("\n")]

        return self._call(read)

    def metrics(self) -> tuple[CurvePoint, ...]:
        """Return the loss curve, thinned; read in the worker of rank 0, so while the job runs."""

        def read(api: Api) -> tuple[CurvePoint, ...]:
            first = read_members(api, self.name).rows[0]
            return read_curve_in_pod(api, first.pod, get_metrics_path(api.read_job(self.name)))

        return self._call(read)

    def artifacts(self) -> tuple[ArtifactView, ...]:
        """Return the run's artifacts so far: models and adapters with their paths."""
        return self._call(lambda api: build_job_view(api.read_job(self.name), now=time.time()).artifacts)

    def wait(
        self,
        phase: str = "Completed",
        *,
        timeout_seconds: float = 24 * 3600.0,
        on_view: Callable[[JobView], None] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> JobView:
        """Wait until the job is in that phase; `on_view` is called with each view.

        Raises JobFailedError if it fails instead, ClientError if it ends otherwise or after the timeout.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            view = self.status()
            if on_view is not None:
                on_view(view)
            if view.phase == phase:
                return view
            if view.phase == "Failed":
                raise JobFailedError(view.verdict or f"{self.name} failed")
            if view.ended:
                raise ClientError(f"{self.name} has {view.phase.lower()}, and cannot be {phase} any more")
            if time.monotonic() >= deadline:
                current = view.phase or "without a status"
                raise ClientError(f"{self.name} is {current} after {timeout_seconds:.0f} s, not {phase}")
            pause(_POLL_SECONDS)

    def watch(self, *, timeout_seconds: float = 24 * 3600.0, pause: Callable[[float], None] = time.sleep) -> JobView:
        """Show the job live until it has ended or the timeout: in a notebook with its curve, else as text.

        An interrupt (Ctrl-C, or the notebook's stop button) only ends watching. Returns the last view.
        """
        from trainium_client import live  # noqa: PLC0415 - only watching needs it

        return live.watch(
            self.status, self.metrics, timeout_seconds=timeout_seconds, pause=lambda: pause(_POLL_SECONDS)
        )

    def scale(self, size: int, *, role: str = "") -> None:
        """Change the number of nodes, or of the pods of a role."""
        if role:
            self._call(lambda api: api.scale_role(api.read_job(self.name), role, size))
        else:
            self._call(lambda api: api.scale_job(self.name, size))

    def suspend(self) -> None:
        """Save and release the nodes."""
        self._call(lambda api: api.patch_job(self.name, {"spec": {"suspend": True}}))

    def resume(self) -> None:
        """Resume from the newest checkpoint."""
        self._call(lambda api: api.patch_job(self.name, {"spec": {"suspend": False}}))

    def retry(self) -> None:
        """Run a failed job again from its newest checkpoint, with this spec or unchanged."""

        def start(api: Api) -> None:
            job = api.read_job(self.name)
            retry_job(
                api, job, None if self.spec is None else correct_manifest(job, self._build_manifest(api), "the spec")
            )

        self._call(start)

    def delete(self) -> None:
        """Delete the job and its pods; checkpoints stay. A missing job is no error."""

        def remove(api: Api) -> None:
            uid = read_text(read_mapping(api.read_job(self.name), "metadata"), "uid")
            api.delete_job(self.name, uid, foreground=False)

        try:
            self._call(remove)
        except NotFoundError:
            return

    def _repr_html_(self) -> str:
        """Render the job for a notebook."""
        from trainium_client.notebook import render_cell  # noqa: PLC0415 - only notebooks need it

        return render_cell(self.status())

    def _call(self, action: Callable[[Api], _Result]) -> _Result:
        # Imported here: the Kubernetes library takes a third of a second.
        from trainium_contract.api_server.connection import Connection  # noqa: PLC0415 - as above
        from trainium_contract.api_server.kubeconfig import find_access  # noqa: PLC0415 - as above

        access = find_access(self.kubeconfig, self.context, os.environ)
        api = Api(Connection(access), self.namespace or access.namespace)
        try:
            return action(api)
        finally:
            api.connection.close()


def _require_readable(value: _Result | Unreadable) -> _Result:
    if isinstance(value, Unreadable):
        raise ClientError(value.reason)
    return value
