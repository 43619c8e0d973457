"""The real kubectl prints the tables of TrainingJobs that pages show."""

import json
import time
from typing import Any

import pytest

from tests.cluster.definition.conftest import Api
from tests.testing.outputs.tables import table

pytestmark = pytest.mark.cluster

STATUSES: dict[str, dict[str, Any]] = {
    "waits": {},
    "llama3-8b": {
        "phase": "Running",
        "stage": "Train",
        "readyReplicas": 16,
        "replicas": 16,
        "progress": {"step": 8123, "loss": 2.417353, "tokensPerSecond": 51234.5},
        "checkpoint": {"durableStep": 8000},
        "restarts": {"total": 2},
        "membership": {"dataParallel": 64},
        "goodput": {"ratio": 0.97},
        "artifacts": [{"kind": kind, "path": f"/out/{kind}", "step": 70} for kind in ("Adapter", "Model")],
    },
}


def build_job_json(name: str) -> str:
    spec = {"workers": {"replicas": 16, "accelerator": {"device": "cpu"}}, "trainer": {"steps": 10}}
    head = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}}
    return json.dumps({**head, "spec": spec})


@pytest.mark.parametrize("wide", [False, True])
def test_our_table_equals_that_of_kubectl(crd_api: Api, wide: bool) -> None:
    for name, status in STATUSES.items():
        crd_api.kubectl("apply", "-f", "-", stdin=build_job_json(name))
        if status:
            crd_api.report_status(name, status)
    try:
        jobs = [json.loads(crd_api.kubectl("get", "trn", name, "-o", "json")) for name in sorted(STATUSES)]
        before = time.time()
        printed = crd_api.kubectl("get", "trainingjobs", *STATUSES, *(["-o", "wide"] if wide else []))
        # Columns are as wide as the longest age, which may grow meanwhile.
        moments = range(int(before) - 1, int(time.time()) + 2)
        shown = "\n".join(line.rstrip() for line in printed.splitlines())
        assert shown in {table(sorted_as_shown(shown, jobs), float(now), wide=wide) for now in moments}
    finally:
        for name in STATUSES:
            crd_api.delete_job(name)


def sorted_as_shown(shown: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [line.split()[0] for line in shown.splitlines()[1:]]
    return sorted(jobs, key=lambda each: names.index(each["metadata"]["name"]))
