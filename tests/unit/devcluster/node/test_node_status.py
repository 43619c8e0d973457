"""The status of a pod from its containers, and the back-off between restarts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_devcluster.node.api.objects import get_grace_seconds
from trainium_devcluster.node.pods.container import Backoff
from trainium_devcluster.node.pods.status import (
    ContainerKind,
    ContainerSnapshot,
    PodSnapshot,
    Running,
    State,
    Terminated,
    Waiting,
    build_pod_status,
    compute_phase,
    should_restart,
)

NOW = "2026-01-01T00:00:00Z"
UP, CREATING = Running(10.0), Waiting("ContainerCreating")


def build_terminated(code: int) -> Terminated:
    return Terminated(code, "Completed" if code == 0 else "Error", "", 1.0, 2.0, "process://x")


def pod(policy: str = "Never", *, init: str | None = None, main: int = 1, **metadata: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "restartPolicy": policy,
        "containers": [{"name": f"m{number}", "image": "i"} for number in range(main)],
    }
    if init is not None:
        spec["initContainers"] = [{"name": "i0", **({"restartPolicy": init} if init else {})}]
    return {"metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": 1, **metadata}, "spec": spec}


def container(name: str, state: State, kind: ContainerKind = ContainerKind.MAIN, **more: Any) -> ContainerSnapshot:
    return ContainerSnapshot(name, "i", kind, state, **more)


@pytest.mark.parametrize(
    ("policy", "states", "expected"),
    [
        ("Never", [CREATING], "Pending"),
        ("Never", [UP], "Running"),
        ("Never", [UP, CREATING], "Pending"),
        ("Never", [UP, build_terminated(1)], "Running"),
        ("Never", [build_terminated(0), build_terminated(0)], "Succeeded"),
        ("Never", [build_terminated(0), build_terminated(1)], "Failed"),
        ("OnFailure", [build_terminated(1)], "Running"),
        ("OnFailure", [build_terminated(0)], "Succeeded"),
        ("Always", [build_terminated(0)], "Running"),
    ],
)
def test_the_phase_is_computed_from_the_main_containers(policy: str, states: list[State], expected: str) -> None:
    views = [container(f"m{number}", state) for number, state in enumerate(states)]
    assert compute_phase(pod(policy, main=len(states)), views, terminal=False) == expected


def test_a_container_in_back_off_counts_as_having_run() -> None:
    waiting = container("m0", Waiting("CrashLoopBackOff"), last_termination=build_terminated(1))
    assert compute_phase(pod("Always"), [waiting], terminal=False) == "Running"


@pytest.mark.parametrize(
    ("policy", "state", "expected"),
    [
        ("Never", UP, "Pending"),
        ("Never", build_terminated(1), "Failed"),
        ("OnFailure", build_terminated(1), "Pending"),
        ("Always", build_terminated(1), "Pending"),
    ],
)
def test_a_pod_is_pending_until_its_init_containers_are_done(policy: str, state: State, expected: str) -> None:
    views = [container("i0", state, ContainerKind.INIT), container("m0", Waiting("PodInitializing"))]
    assert compute_phase(pod(policy, init=""), views, terminal=False) == expected


def test_a_running_sidecar_keeps_the_pod_running() -> None:
    views = [container("i0", UP, ContainerKind.SIDECAR, started=True), container("m0", build_terminated(0))]
    assert compute_phase(pod(init="Always"), views, terminal=False) == "Running"
    views[0] = container("i0", build_terminated(143), ContainerKind.SIDECAR)
    assert compute_phase(pod(init="Always"), views, terminal=False) == "Succeeded"


def test_a_successful_init_container_is_never_run_again() -> None:
    spec = pod("Always", init="")
    assert not should_restart(spec, spec["spec"]["initContainers"][0], 0)
    assert should_restart(spec, spec["spec"]["initContainers"][0], 1)
    assert should_restart(spec, spec["spec"]["containers"][0], 0)


def render(spec: dict[str, Any], views: list[ContainerSnapshot], **more: Any) -> dict[str, Any]:
    fields = {"terminal": False, "failure": None, "sandbox_ready": True} | more
    return build_pod_status(PodSnapshot(spec, views, "127.1.0.1", "127.1.0.2", start_time=NOW, **fields), NOW)


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
    return {condition["type"]: (condition["status"], condition["reason"]) for condition in status["conditions"]}


def test_an_unready_container_is_named() -> None:
    status = render(pod(main=2), [container("m0", UP, ready=True), container("m1", UP)])
    assert conditions(status)["Ready"] == ("False", "ContainersNotReady")
    assert next(condition for condition in status["conditions"] if condition["type"] == "Ready")["message"] == (
        "containers with unready status: [m1]"
    )


def test_a_transition_time_changes_only_with_the_status_of_its_condition() -> None:
    spec = pod()
    old = {"type": "Ready", "status": "True", "lastTransitionTime": "2025-01-01T00:00:00Z"}
    spec["status"] = {"conditions": [old]}
    status = render(spec, [container("m0", UP, ready=True)])
    times = {condition["type"]: condition["lastTransitionTime"] for condition in status["conditions"]}
    assert times["Ready"] == "2025-01-01T00:00:00Z"
    assert times["ContainersReady"] == NOW


def test_a_pod_never_leaves_a_final_phase() -> None:
    spec = pod(generation=5)
    spec["status"] = {"phase": "Failed", "reason": "Evicted", "message": "why", "observedGeneration": 1}
    status = render(spec, [container("m0", UP)])
    assert (status["phase"], status["reason"], status["observedGeneration"]) == ("Failed", "Evicted", 1)


def test_a_failure_sets_phase_and_reason() -> None:
    status = render(pod(), [container("m0", CREATING)], terminal=True, failure=("NotSupported", "because"))
    assert (status["phase"], status["reason"], status["message"]) == ("Failed", "NotSupported", "because")


def test_a_container_that_never_ran_shows_the_epoch() -> None:
    state = Terminated(128, "StartError", "no", 0.0, 2.0, "process://x")
    terminated = render(pod(), [container("m0", state)], terminal=True)["containerStatuses"][0]["state"]["terminated"]
    assert (terminated["startedAt"], terminated["finishedAt"]) == ("1970-01-01T00:00:00Z", "1970-01-01T00:00:02Z")


def test_the_first_restart_is_immediate_and_later_ones_wait_twice_as_long() -> None:
    backoff, now, delays = Backoff(), 1000.0, []
    for _ in range(8):
        delays.append(backoff.compute_remaining(now, now))
        now += delays[-1]
        backoff.record_restart(now)
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300]
    assert backoff.compute_remaining(now + 700, now + 700) == 0


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_back_off_is_never_negative_nor_longer_than_five_minutes(finished: float, later: float) -> None:
    backoff = Backoff()
    backoff.record_restart(finished)
    assert 0 <= backoff.compute_remaining(finished, finished + later) <= 300


@pytest.mark.parametrize(
    ("deletion_seconds", "pod_seconds", "expected"), [(None, 30, 30), (5, 30, 5), (0, 7, 7), (None, 0, 1), (60, 30, 60)]
)
def test_the_grace_period_is_set_by_the_deletion_or_by_the_pod(
    deletion_seconds: int | None, pod_seconds: int, expected: int
) -> None:
    metadata = {} if deletion_seconds is None else {"deletionGracePeriodSeconds": deletion_seconds}
    assert get_grace_seconds({"metadata": metadata, "spec": {"terminationGracePeriodSeconds": pod_seconds}}) == expected
