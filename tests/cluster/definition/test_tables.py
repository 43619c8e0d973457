"""The real kubectl prints the tables of TrainingJobs that pages show."""

import asyncio
import json
import re
import time
from typing import Any, cast

import pytest

from tests.cluster.definition.conftest import Api
from tests.testing.outputs.tables import table
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.status.internal import FailureRecord, StepWindow, pack_internal
from trainium_operator.cluster.cache.lenient import read_status
from trainium_operator.cluster.execute.events import EventRecorder
from trainium_operator.plan.model.actions import Event
from trainium_operator.plan.model.names import JobId
from trainium_operator.plan.model.reasons import Reason

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
    trainer = {"steps": 10, "data": {"source": "python-docs"}}
    spec = {"workers": {"replicas": 16, "accelerator": {"device": "cpu"}}, "trainer": trainer}
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
        # Without names kubectl sends one request, so that the ages of all rows are of one moment.
        printed = crd_api.kubectl("get", "trainingjobs", *(["-o", "wide"] if wide else []))
        # Columns are as wide as the longest age, which may grow meanwhile.
        moments = range(int(before) - 1, int(time.time()) + 2)
        shown = "\n".join(line.rstrip() for line in printed.splitlines())
        assert shown in {table(sorted_as_shown(shown, jobs), float(now), wide=wide) for now in moments}
        assert set(STATUSES) <= set(crd_api.kubectl("get", "training").split()), "the category of training jobs"
    finally:
        for name in STATUSES:
            crd_api.delete_job(name)


def sorted_as_shown(shown: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [line.split()[0] for line in shown.splitlines()[1:]]
    return sorted(jobs, key=lambda each: names.index(each["metadata"]["name"]))


class RecordingApi:
    """Keeps the events that a recorder creates."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def create(self, _resource: object, _namespace: str, body: dict[str, Any]) -> None:
        self.bodies.append(body)


def test_kubectl_describe_shows_events_in_the_order_in_which_they_occurred(crd_api: Api) -> None:
    crd_api.kubectl("apply", "-f", "-", stdin=build_job_json("eventful"))
    uid = crd_api.kubectl("get", "trn", "eventful", "-o", "jsonpath={.metadata.uid}")
    times = iter(range(1_800_000_000, 1_900_000_000, 7))
    stored = RecordingApi()
    recorder = EventRecorder(cast("Any", stored), "operator-0", wall_clock=lambda: float(next(times)))
    texts = [f"occurrence {number}" for number in range(9)]

    async def record() -> None:
        writer = asyncio.create_task(recorder.run())
        for text in texts:
            job = JobId(crd_api.namespace, "eventful", uid)
            recorder.record(job, Event(reason=Reason.RECOVERED, note=text))
        await recorder.flush(10.0)
        writer.cancel()

    asyncio.run(record())
    for body in reversed(stored.bodies):
        crd_api.kubectl("create", "-f", "-", stdin=json.dumps(body))
    described = crd_api.kubectl("describe", "trn", "eventful")
    assert re.findall(r"occurrence \d", described) == texts
    crd_api.kubectl("delete", "trn", "eventful")


def test_kubectl_describe_shows_what_the_operator_remembers_in_one_line(crd_api: Api) -> None:
    crd_api.kubectl("apply", "-f", "-", stdin=build_job_json("failing"))
    failures = tuple(FailureRecord(at=1.8e9, cause=Cause.CRASH, pod=f"failing-w-{number}") for number in range(99))
    window = StepWindow(size=2, step=7, samples=(0.25,) * 15)
    status = TrainingJobStatus(failures=failures, goodput=GoodputStatus(window=window), next_pod_ordinal=101)
    crd_api.report_status("failing", TrainingJobStatus().to_wire())
    empty = crd_api.kubectl("describe", "trn", "failing")
    crd_api.report_status("failing", pack_internal(status))
    described = crd_api.kubectl("describe", "trn", "failing")
    (line,) = (line for line in described.splitlines() if "failing-w-98" in line)
    assert line.strip().startswith("Internal:")
    assert described.count("failing-w-") == len(failures)
    assert len(described.splitlines()) <= len(empty.splitlines()) + 1
    stored = json.loads(crd_api.kubectl("get", "trn", "failing", "-o", "json"))["status"]
    assert read_status(stored, "failing") == status
    crd_api.delete_job("failing")
