"""Manifests follow from the spec alone; remembering them while exploring spares a third of the time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from trainium_operator.plan.manifests import worker_pod
from trainium_operator.plan.pods import configuration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def remembered_manifests() -> Iterator[None]:
    """Each manifest is built once per spec."""
    with (
        patch.object(configuration, "config_map", _once(configuration.config_map)),
        patch.object(worker_pod, "pod_template", _once(worker_pod.pod_template)),
    ):
        yield


def _once(build: Callable[..., Any]) -> Callable[..., Any]:
    built: dict[int, tuple[Any, Any]] = {}

    def remembered(job: Any, *rest: Any) -> Any:
        known = built.get(id(job.spec))
        if known is None:
            # The spec is kept with what was built from it, so that no other object gets its id.
            known = built[id(job.spec)] = (job.spec, build(job, *rest))
        return known[1]

    return remembered
