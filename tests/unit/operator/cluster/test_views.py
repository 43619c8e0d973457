"""Pods, nodes and ConfigMaps as the API server stores them, read into small views, also malformed ones."""

import base64
import copy
import gzip
import json
import tracemalloc
import uuid
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.api.objects import terminated_status
from tests.testing.api.recorded_jobs import recorded_object
from tests.testing.fuzz.invariants import check_type
from tests.testing.fuzz.objects import NODE, POD
from tests.testing.operator import wire_messages
from tests.testing.suite.any_json import SLOW_ALLOWED, as_json, mutated_values
from trainium_contract.wire import worker_env
from trainium_contract.wire.last_report import encode_last_report
from trainium_contract.wire.messages import MAX_GENERATION, HeartbeatRequest, Membership, WorkerPhase
from trainium_contract.wire.recorded_membership import MAX_RECORD_BYTES, MEMBERSHIP_KEY
from trainium_operator.cluster.cache import views
from trainium_operator.cluster.cache.membership_record import read_membership
from trainium_operator.plan.faults.node_signals import PodRequirements, find_node_problems
from trainium_operator.plan.manifests.config_maps import build_membership_map
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import NodeReadiness, PodPhase

CREATED = "2026-01-01T00:00:00Z"


def pod(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "j-w-7",
            "namespace": "ns",
            "uid": "u",
            "creationTimestamp": CREATED,
            "labels": {worker_env.LABEL_JOB: "j"},
            **metadata,
        },
        "spec": {"nodeName": "n", "containers": [{"name": "worker"}, {"name": "aside"}]},
        "status": status or {},
    }


def test_a_running_pod_is_read() -> None:
    view = views.parse_worker_pod(
        pod(
            {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
            }
        )
    )
    assert (view.ordinal, view.phase, view.ip, view.node) == (7, PodPhase.RUNNING, "10.0.0.1", "n")
    assert view.ready
    assert view.scheduled
    assert not view.deleting
    assert view.created == 1767225600.0


def test_a_new_pod_without_any_status_is_pending() -> None:
    assert views.parse_worker_pod(pod()).phase is PodPhase.PENDING


def test_the_worker_container_is_found_by_name() -> None:
    statuses = [
        terminated_status("aside", exitCode=0),
        terminated_status(exitCode=137, reason="OOMKilled", finishedAt=CREATED),
    ]
    view = views.parse_worker_pod(pod({"phase": "Failed", "containerStatuses": statuses}))
    assert (view.exit_code, view.reason, view.finished) == (137, "OOMKilled", 1767225600.0)


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        ({"reason": "Evicted", "message": "disk. ", "containerStatuses": [terminated_status()]}, "Evicted", "disk."),
        ({"containerStatuses": [terminated_status(message="last words")]}, "Error", "last words"),
        (
            {"containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "ImagePullBackOff",
            "",
        ),
        (
            {"initContainerStatuses": [terminated_status("prepare", message="no disk")], "containerStatuses": []},
            "Error",
            "init container prepare ended with exit code 1: no disk",
        ),
    ],
)
def test_the_most_specific_reason_is_reported(status: dict[str, Any], reason: str, message: str) -> None:
    view = views.parse_worker_pod(pod(status))
    assert (view.reason, view.message) == (reason, message)


def state(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}


PROXY = state("mesh-proxy", running={"startedAt": CREATED})


@pytest.mark.parametrize("first", [True, False])
def test_an_injected_container_is_not_the_worker(first: bool) -> None:
    killed = terminated_status(exitCode=137, reason="OOMKilled", finishedAt=CREATED)
    raw = pod({"phase": "Running", "containerStatuses": [PROXY, killed] if first else [killed, PROXY]})
    ours, others = (
        {"name": "worker", "image": "mirror/trainer@sha256:0"},
        {"name": "mesh-proxy", "image": "mesh/proxy:1"},
    )
    raw["spec"]["containers"] = [others, ours] if first else [ours, others]
    raw["metadata"]["annotations"] = {worker_env.ANNOTATION_IMAGE: "trainer:1"}
    view = views.parse_worker_pod(raw)
    assert (view.exit_code, view.reason, view.image) == (137, "OOMKilled", "trainer:1")


SIDECAR = {"initContainers": [{"name": "mesh", "restartPolicy": "Always"}, {"name": "fetch"}]}
RUNS = state("worker", running={"startedAt": CREATED})
WAITS = state("worker", waiting={"reason": "PodInitializing"})


@pytest.mark.parametrize(
    ("inits", "worker", "reason", "held_by", "code"),
    [
        pytest.param(
            [terminated_status("mesh", exitCode=137)],
            terminated_status(reason="OOMKilled"),
            "OOMKilled",
            "",
            None,
            id="both ended",
        ),
        pytest.param(
            [terminated_status("mesh", exitCode=2)], RUNS, "", "", None, id="a sidecar ended, the worker runs"
        ),
        pytest.param(
            [terminated_status("mesh", exitCode=2)], WAITS, "PodInitializing", "", None, id="a sidecar ends first"
        ),
        pytest.param(
            [state("mesh", waiting={"reason": "CrashLoopBackOff"})],
            WAITS,
            "CrashLoopBackOff",
            "mesh",
            None,
            id="loops",
        ),
        pytest.param(
            [terminated_status("fetch", exitCode=7)], WAITS, "Error", "fetch", 7, id="an init container failed"
        ),
        pytest.param(
            [
                {**state("mesh", running={}), "started": True},
                state("fetch", running={"startedAt": CREATED}),
            ],
            WAITS,
            "PodInitializing",
            "fetch",
            None,
            id="an init container hangs",
        ),
        pytest.param([state("mesh", running={})], WAITS, "PodInitializing", "mesh", None, id="a sidecar is not ready"),
    ],
)
def test_a_sidecar_never_hides_the_worker_container(
    inits: list[Any], worker: Any, reason: str, held_by: str, code: int | None
) -> None:
    raw = pod({"phase": "Pending", "initContainerStatuses": inits, "containerStatuses": [PROXY, worker]})
    raw["spec"] |= SIDECAR
    view = views.parse_worker_pod(raw)
    assert (view.reason, view.init_container, view.init_exit_code) == (reason, held_by, code)


def test_a_gated_pod_reports_the_gate_as_its_reason() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked"}
    view = views.parse_worker_pod(pod({"phase": "Pending", "conditions": [gated]}))
    assert (view.reason, view.message, view.unschedulable_message) == ("SchedulingGated", "blocked", "")


def test_disruption_deletion_and_lack_of_capacity_are_seen() -> None:
    conditions = [
        {"type": "DisruptionTarget", "status": "True"},
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"},
    ]
    raw = pod({"phase": "Pending", "conditions": conditions}, deletionTimestamp=CREATED)
    raw["spec"].pop("nodeName")
    view = views.parse_worker_pod(raw)
    assert view.disrupted
    assert view.deleting
    assert not view.scheduled
    assert view.unschedulable_message == "0/3 nodes"


@pytest.mark.parametrize(("length", "kept"), [(253, True), (254, False)])
def test_overlong_node_and_machine_names_are_dropped(length: int, kept: bool) -> None:
    raw = pod({"phase": "Pending"})
    raw["spec"]["nodeName"] = "n" * length
    assert bool(views.parse_worker_pod(raw).node) is kept
    assert views.parse_worker_pod(raw).scheduled is kept
    machine = {"metadata": {"name": "n", "uid": "u"}, "spec": {"providerID": "p" * length}}
    assert bool(views.parse_node(machine).provider_id) is kept


def test_a_pod_with_our_labels_and_a_foreign_name_is_refused() -> None:
    with pytest.raises(ValueError, match="not a worker's name"):
        views.parse_worker_pod(pod(name="other"))


@pytest.mark.parametrize(
    ("conditions", "ready", "since"),
    [
        ([{"type": "Ready", "status": "True", "lastTransitionTime": CREATED}], NodeReadiness.TRUE, None),
        ([{"type": "Ready", "status": "Unknown", "lastTransitionTime": CREATED}], NodeReadiness.UNKNOWN, 1767225600.0),
        ([], NodeReadiness.UNKNOWN, None),
    ],
)
def test_node_readiness_schedulability_and_taints_are_read(
    conditions: list[Any], ready: NodeReadiness, since: float | None
) -> None:
    raw = {
        "metadata": {"name": "n"},
        "spec": {"unschedulable": True, "taints": [{"key": "k"}]},
        "status": {"conditions": conditions},
    }
    view = views.parse_node(raw)
    assert (view.ready, view.unready_since, view.schedulable, [taint.key for taint in view.taints]) == (
        ready,
        since,
        False,
        ["k"],
    )


def test_an_invalid_job_reports_the_place_of_the_error() -> None:
    metadata = {"name": "j", "namespace": "ns", "uid": "u", "resourceVersion": "1"}
    record = views.parse_job({"metadata": metadata, "spec": {"workers": {"replicas": -1}}})
    assert record.view is None
    assert record.error.startswith("workers.replicas: ")
    good = views.parse_job({"metadata": metadata, "spec": {}, "status": {"fieldOfTheFuture": 1}})
    assert good.view is not None


@pytest.mark.parametrize("wrong", [7, 1.5, True, [], {}, ["a"], {"a": "b"}, None])
def test_pod_fields_of_a_wrong_type_are_dropped(wrong: Any) -> None:
    whole = pod(
        {
            "phase": wrong, "podIP": wrong, "reason": wrong, "message": wrong,
            "conditions": [wrong, {"type": wrong, "status": wrong}, {"type": "Ready", "status": "True"}],
            "containerStatuses": [
                wrong, {"name": wrong}, {"name": "worker", "state": {"terminated": {"exitCode": wrong}}},
            ],
            "initContainerStatuses": [{"name": wrong, "state": {"terminated": {"exitCode": 3, "reason": wrong}}}],
        },
        annotations={worker_env.ANNOTATION_TEMPLATE_HASH: wrong, worker_env.ANNOTATION_AVOIDED_NODES: wrong},
    )  # fmt: skip
    whole["spec"] = {"nodeName": wrong, "containers": [{"name": "worker", "image": wrong}]}
    check_type(views.parse_worker_pod(whole))
    assert views.parse_worker_pod(whole).ready
    for part in ("spec", "status"):
        check_type(views.parse_worker_pod({**whole, part: wrong}))


def test_the_reason_and_message_of_a_pod_are_bounded() -> None:
    status = {"phase": "Failed", "reason": "R" * 1_000_000, "message": "m" * 1_000_000}
    view = views.parse_worker_pod(pod(status))
    assert (len(view.reason), len(view.message)) == (
        views.MAX_POD_REASON_CHARACTERS,
        views.MAX_TERMINATION_MESSAGE_CHARACTERS,
    )


def record_membership(membership: Any) -> dict[str, Any]:
    """Return the part of a ConfigMap with this membership."""
    return {"binaryData": {MEMBERSHIP_KEY: base64.b64encode(gzip.compress(json.dumps(membership).encode())).decode()}}


def test_a_membership_beyond_the_latest_generation_is_ignored() -> None:
    member = {"podUid": "u", "podName": "p", "podIp": "10.0.0.1", "nodeName": "n", "nodeRank": 0, "rendezvousPort": 1}
    wire = {"transition": "Immediate", "cause": "Resize", "members": [member], "processesPerNode": 1}
    for generation, is_known in ((MAX_GENERATION, True), (MAX_GENERATION + 1, False)):
        assert (read_membership(record_membership({**wire, "generation": generation})) is not None) is is_known


def test_an_unreadable_membership_is_ignored() -> None:
    raw = {"metadata": {"name": "m", "annotations": {names.ANNOTATION_CONTENT_HASH: "h"}}}
    assert views.parse_child(raw).content_hash == "h"
    assert views.parse_child({"metadata": {"annotations": {names.ANNOTATION_CONTENT_HASH: ["h"]}}}).content_hash == ""
    for record in (None, {}, {"generation": 0}):
        assert views.parse_child({**raw, **record_membership(record)}).membership is None


def test_a_large_membership_round_trips_compressed() -> None:
    many = (
        wire_messages.member(
            f"{'j' * 50}-w-{rank}",
            pod_uid=str(uuid.UUID(int=rank * 7919)),
            pod_ip=f"10.0.{rank // 256}.{rank % 256}",
            node_name=f"ip-10-0-{rank // 256}-{rank % 256}.us-west-2.compute.internal",
        )
        for rank in range(5000)
    )
    membership = wire_messages.membership(3, *many, processes_per_node=32)
    job = views.parse_job(
        {"metadata": {"name": "j", "namespace": "ns", "uid": "u", "resourceVersion": "1"}, "spec": {}}
    )
    assert job.view is not None
    manifest = build_membership_map(job.view, membership)
    assert len(base64.b64decode(manifest["binaryData"][MEMBERSHIP_KEY])) < 400_000
    assert "data" not in manifest
    assert manifest == build_membership_map(job.view, membership)
    assert read_membership(manifest) == membership
    for text in ("!", "aGVsbG8=", manifest["binaryData"][MEMBERSHIP_KEY][:1000]):
        assert read_membership({"binaryData": {MEMBERSHIP_KEY: text}}) is None


def test_decompression_of_a_membership_is_bounded() -> None:
    for blanks in (MAX_RECORD_BYTES + 1, 200 * 2**20):
        packed = base64.b64encode(gzip.compress(b" " * blanks, 1)).decode()
        tracemalloc.start()
        assert read_membership({"binaryData": {MEMBERSHIP_KEY: packed}}) is None
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 4 * MAX_RECORD_BYTES


def test_a_record_with_too_many_values_is_refused_unparsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    monkeypatch.setattr(Membership, "model_validate_json", lambda text: read.append(len(text)))
    for value in ("{}", "[]", "0"):
        text = f'{{"members":[{f"{value}," * 1_000_000}{value}]}}'
        packed = base64.b64encode(gzip.compress(text.encode(), 1)).decode()
        assert read_membership({"binaryData": {MEMBERSHIP_KEY: packed}}) is None
    assert read == []


def test_a_membership_is_decompressed_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"name": "m", "annotations": {names.ANNOTATION_CONTENT_HASH: "h"}}
    record = views.parse_child({"metadata": metadata, "binaryData": {MEMBERSHIP_KEY: "x"}})
    read: list[str] = []
    monkeypatch.setattr(zlib, "decompressobj", lambda *_: read.append("unpacked"))
    assert record.content_hash == "h"
    assert read == []


HEALTHY = {"type": "NetworkingReady", "status": "True", "lastTransitionTime": CREATED, "lastHeartbeatTime": CREATED}
DEVICE = {
    "type": "NeuronHealth",
    "status": "True",
    "reason": "NeuronHasError_DMA_ERROR",
    "message": "x" * 1000,
    "lastTransitionTime": CREATED,
}


def node(**parts: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "metadata": {"name": "n", "labels": {"node.kubernetes.io/instance-type": "trn1.32xlarge", "team": "x"}},
        "spec": {"providerID": "aws:///us-west-2a/i-1"},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}, HEALTHY],
            "allocatable": {"cpu": "127610m", "aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": 8},
        },
    }
    for part, fields in parts.items():
        raw[part] = {**raw[part], **fields}
    return raw


def test_a_node_view_keeps_only_fields_of_the_plan() -> None:
    view = views.parse_node(
        node(status={"conditions": [HEALTHY, DEVICE]}, metadata={"name": "n", "deletionTimestamp": CREATED})
    )
    (condition,) = view.conditions
    assert (condition.type, condition.reason) == ("NeuronHealth", "NeuronHasError_DMA_ERROR")
    assert (condition.since, len(condition.message)) == (1767225600.0, 256)
    assert view.deleting
    whole = views.parse_node(node())
    assert whole.labels == {"node.kubernetes.io/instance-type": "trn1.32xlarge"}
    assert whole.capacity == {"aws.amazon.com/neuron": 16, "vpc.amazonaws.com/efa": 8}
    assert whole.provider_id == "aws:///us-west-2a/i-1"
    assert whole.conditions == ()


def test_kubelet_heartbeats_do_not_change_a_node_view() -> None:
    later = {**HEALTHY, "lastHeartbeatTime": "2026-01-01T00:05:00Z", "message": "still well"}
    images = {"images": [{"names": ["trainer"]}], "conditions": [{"type": "Ready", "status": "True"}, later]}
    raw = node(status=images, metadata={"name": "n", "labels": node()["metadata"]["labels"], "annotations": {"a": "b"}})
    assert views.parse_node(raw) == views.parse_node(node())


@pytest.mark.parametrize(
    ("quantity", "capacity"),
    [("16", 16), (16, 16), ("0", 0), *((value, None) for value in ("16.5", "", None, "-1", "1e400", []))],
)
def test_only_whole_quantities_are_kept(quantity: Any, capacity: int | None) -> None:
    view = views.parse_node(node(status={"allocatable": {"aws.amazon.com/neuron": quantity}}))
    assert view.capacity.get("aws.amazon.com/neuron") == capacity


def test_malformed_parts_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    views.left_out.clear()
    for _ in range(3):
        view = views.parse_node(node(status={"conditions": ["Ready", {**DEVICE, "lastTransitionTime": "yesterday"}]}))
        assert view.conditions[0].since is None
    assert views.left_out == {"condition": 3, "time stamp": 3}
    assert len(caplog.records) == 2


@SLOW_ALLOWED
@given(mutated_values({"data": {"theirs": "{}"}, "binaryData": recorded_object("membership")["binaryData"]}), st.text())
def test_any_config_map_is_read_as_a_membership_or_none(parts: Any, text: str) -> None:
    raw = {**parts, "metadata": {"annotations": {}}}  # which no object is without
    for packed in (None, text, base64.b64encode(gzip.compress(text.encode())).decode()):
        config_map = raw if packed is None else {**raw, "binaryData": {MEMBERSHIP_KEY: packed}}
        read_membership(config_map)
        assert views.parse_child(config_map).content_hash == ""


@SLOW_ALLOWED
@given(mutated_values({**NODE, "metadata": {**NODE["metadata"], "deletionTimestamp": CREATED}}, most=6))
def test_any_malformed_node_is_kept_by_name(raw: dict[str, Any]) -> None:
    metadata = raw["metadata"] if isinstance(raw.get("metadata"), dict) else {}
    view = views.parse_node(as_json({**raw, "metadata": {**metadata, "name": "n"}}))
    assert view.name == "n"
    assert all(
        isinstance(problem.reason, str)
        for problem in find_node_problems(view, PodRequirements({"aws.amazon.com/neuron": 16}))
    )
    assert hash(view.conditions) is not None


@pytest.mark.parametrize("stamp", ["0000-12-31T00:01:00Z", "soon", 7])
def test_an_invalid_time_stamp_does_not_mark_a_pod_as_finished(stamp: Any) -> None:
    raw: Any = copy.deepcopy(POD)
    raw["metadata"]["creationTimestamp"] = stamp
    raw["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = stamp
    view = views.parse_worker_pod(raw)
    assert (view.created, view.finished, view.exit_code) == (0.0, None, 70)


def test_the_last_report_of_an_agent_is_read_only_of_its_pod_and_with_its_exit_code() -> None:
    report = wire_messages.heartbeat("j-w-7", phase=WorkerPhase.FINISHED, pod_uid="u")
    message = encode_last_report(report)

    def read(**state: Any) -> tuple[HeartbeatRequest | None, str]:
        view = views.parse_worker_pod(pod({"phase": "Succeeded", "containerStatuses": [terminated_status(**state)]}))
        return view.last_report, view.message

    assert read(exitCode=0, message=message) == (report, ""), "it is no text for people"
    assert read(exitCode=137, message=message)[0] is None
    assert read(exitCode=0, message=encode_last_report(report.replaced(pod_uid="other")))[0] is None
    assert read(exitCode=0)[0] is None
    assert read(exitCode=0, message=message, name="aside")[0] is None
    yielded = report.replaced(phase=WorkerPhase.YIELDED)
    assert read(exitCode=75, message=encode_last_report(yielded, "asked to end")) == (yielded, "asked to end")
