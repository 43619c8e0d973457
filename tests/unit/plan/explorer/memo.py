"""Cache manifests, which follow from the spec alone: it saves a third of the time of a search."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from trainium_operator.plan.manifests import config_maps, worker_pod
from trainium_operator.plan.pods import replicas


@contextmanager
def remembered_manifests() -> Iterator[None]:
    """Build each manifest once for a spec and its keyword arguments."""
    with (
        patch.object(replicas, "config_map", _once(config_maps.config_map)),
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
