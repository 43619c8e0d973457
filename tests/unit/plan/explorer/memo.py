"""Manifests follow from the spec alone; remembering them while exploring spares a third of the time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from trainium_operator.plan.manifests import worker_pod
from trainium_operator.plan.pods import replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def remembered_manifests() -> Iterator[None]:
    """Each manifest is built once for a spec and what is asked by name."""
    with (
        patch.object(replicas, "config_map", _once(replicas.config_map)),
        patch.object(worker_pod, "pod_template", _once(worker_pod.pod_template)),
    ):
        yield


def _once(build: Callable[..., Any]) -> Callable[..., Any]:
    built: dict[tuple[int, *tuple[tuple[str, Any], ...]], tuple[Any, Any]] = {}

    def remembered(job: Any, *rest: Any, **asked: Any) -> Any:
        key = (id(job.spec), *sorted(asked.items()))
        known = built.get(key)
        if known is None:
            # The spec is kept with what was built from it, so that no other object gets its id.
            known = built[key] = (job.spec, build(job, *rest, **asked))
        return known[1]

    return remembered
