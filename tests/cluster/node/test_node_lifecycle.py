"""Start and end of pods: init containers, sidecars, probes, hooks, grace periods, deadlines, deletion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.cluster.lab import condition, is_ready, status, terminated

if TYPE_CHECKING:
    from tests.testing.cluster.lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
POLITE = """
import signal, sys, time
def end(*_):
    print("ending"); sys.exit(7)
signal.signal(signal.SIGTERM, end)
print("up")
time.sleep(600)
"""


def test_init_containers_run_one_after_the_other_and_before_all_others(lab: Lab) -> None:
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    name = lab.pod(
        "init",
        lab.container("cat /shared/order", volumeMounts=mounts),
        initContainers=[
            lab.container("sleep 0.3; echo first >> /shared/order", "one", volumeMounts=mounts),
            lab.container("echo second >> /shared/order", "two", volumeMounts=mounts),
        ],
        volumes=[{"name": "shared", "emptyDir": {}}],
    )
    assert lab.output(name) == "first\nsecond\n"
    pod = lab.get(name)
    assert terminated(pod, "one")["reason"] == "Completed"
    assert status(pod, "two")["ready"] is True


def test_a_failed_init_container_fails_the_pod_before_it_began(lab: Lab) -> None:
    name = lab.pod("init-fails", lab.container("true"), initContainers=[lab.container("exit 4", "one")])
    pod = lab.ended(name)
    assert pod["status"]["phase"] == "Failed"
    assert terminated(pod, "one")["exitCode"] == 4
    assert status(pod)["state"]["waiting"]["reason"] == "PodInitializing"
    assert condition(pod, "Initialized")["reason"] == "ContainersNotInitialized"


def test_a_sidecar_starts_before_the_main_container_and_ends_after_it(lab: Lab) -> None:
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    sidecar = lab.python(
        "import pathlib, signal, sys, time\n"
        "def end(*_): print('main was', pathlib.Path('/shared/end').exists()); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path('/shared/up').touch()\n"
        "time.sleep(600)",
        "side",
        restartPolicy="Always",
        volumeMounts=mounts,
        startupProbe={"exec": {"command": ["ls", "/shared/up"]}, "periodSeconds": 1, "failureThreshold": 30},
    )
    name = lab.pod(
        "sidecar",
        lab.container("ls /shared/up && touch /shared/end", volumeMounts=mounts),
        initContainers=[sidecar],
        volumes=[{"name": "shared", "emptyDir": {}}],
    )
    pod = lab.ended(name)
    assert pod["status"]["phase"] == "Succeeded"
    assert lab.logs(name, "-c", "side") == "main was True\n"


def test_a_failing_liveness_probe_restarts_the_container(lab: Lab) -> None:
    name = lab.pod(
        "liveness",
        lab.container(
            "touch /tmp/alive; sleep 1; rm /tmp/alive; exec sleep 600",
            livenessProbe={
                "exec": {"command": ["cat", "/tmp/alive"]},
                "periodSeconds": 1,
                "failureThreshold": 2,
                "terminationGracePeriodSeconds": 1,
            },
        ),
        restartPolicy="Always",
    )
    pod = lab.wait(name, lambda p: status(p)["restartCount"] >= 1, "its container was restarted")
    assert status(pod)["lastState"]["terminated"]["exitCode"] == 137
    assert "Liveness probe failed" in lab.event(name, "Unhealthy")["message"]
    assert "will be restarted" in lab.event(name, "Killing")["message"]
    lab.delete(name, "--grace-period=1")


def test_readiness_follows_its_probe_both_ways(lab: Lab) -> None:
    server = (
        "import http.server, os, pathlib\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200 if pathlib.Path('/tmp/ready').exists() else 503); self.end_headers()\n"
        "    def log_message(self, *_): pass\n"
        "http.server.HTTPServer((os.environ['IP'], 8080), Handler).serve_forever()\n"
    )
    name = lab.pod(
        "readiness",
        lab.python(
            server,
            env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            ports=[{"name": "web", "containerPort": 8080}],
            readinessProbe={"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 1, "failureThreshold": 1},
        ),
    )
    pod = lab.wait(name, lambda p: status(p)["state"].get("running"), "it ran")
    assert not is_ready(pod)
    assert condition(pod, "Ready")["message"] == "containers with unready status: [main]"
    lab.kubectl("exec", name, "--", "touch", "/tmp/ready")
    lab.wait(name, is_ready, "it was ready")
    lab.kubectl("exec", name, "--", "rm", "/tmp/ready")
    lab.wait(name, lambda p: not is_ready(p), "it was not ready any more")
    lab.delete(name, "--grace-period=1")


def test_a_startup_probe_holds_the_other_probes_back(lab: Lab) -> None:
    name = lab.pod(
        "startup",
        lab.container(
            "sleep 2; touch /tmp/up; exec sleep 600",
            startupProbe={"exec": {"command": ["ls", "/tmp/up"]}, "periodSeconds": 1, "failureThreshold": 60},
            livenessProbe={"exec": {"command": ["ls", "/tmp/up"]}, "periodSeconds": 1, "failureThreshold": 1},
            readinessProbe={"tcpSocket": {"port": 1}, "periodSeconds": 1},
        ),
    )
    pod = lab.wait(name, lambda p: status(p)["state"].get("running"), "it ran")
    assert status(pod)["started"] is False
    pod = lab.wait(name, lambda p: status(p).get("started"), "it had started")
    assert status(pod)["restartCount"] == 0
    assert not is_ready(pod)
    lab.delete(name, "--grace-period=1")


def test_a_container_that_handles_sigterm_ends_with_its_own_exit_code(lab: Lab) -> None:
    name = lab.pod("polite", lab.python(POLITE), hold=True, terminationGracePeriodSeconds=20)
    lab.logged(name, "up")
    lab.delete(name)
    pod = lab.ended(name)
    assert terminated(pod)["exitCode"] == 7
    assert pod["status"]["phase"] == "Failed"
    lab.release(name)
    lab.missing(name)


def test_a_container_that_ignores_sigterm_is_killed_when_its_grace_is_over(lab: Lab) -> None:
    name = lab.pod("stubborn", lab.python(STUBBORN), hold=True, terminationGracePeriodSeconds=2)
    lab.logged(name, "up")
    began = time.monotonic()
    lab.delete(name)
    pod = lab.ended(name)
    assert time.monotonic() - began >= 2
    assert terminated(pod)["exitCode"] == 137
    lab.release(name)


def test_a_deletion_that_is_under_way_is_not_hastened_by_a_shorter_grace_period(lab: Lab) -> None:
    name = lab.pod("hastened", lab.python(STUBBORN), terminationGracePeriodSeconds=4)
    lab.logged(name, "up")
    began = time.monotonic()
    lab.delete(name)
    lab.delete(name, "--grace-period=1")
    lab.missing(name)
    assert time.monotonic() - began >= 4


def test_the_pre_stop_hook_runs_before_the_signal(lab: Lab) -> None:
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    script = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(30 + pathlib.Path('/shared/hook').exists()))\n"
        "print('up'); time.sleep(600)"
    )
    name = lab.pod(
        "pre-stop",
        lab.python(
            script,
            volumeMounts=mounts,
            lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "sleep 0.5; touch /shared/hook"]}}},
        ),
        volumes=[{"name": "shared", "emptyDir": {}}],
        hold=True,
        terminationGracePeriodSeconds=20,
    )
    lab.logged(name, "up")
    lab.delete(name)
    assert terminated(lab.ended(name))["exitCode"] == 31
    lab.release(name)


def test_the_post_start_hook_runs_and_its_failure_ends_the_container(lab: Lab) -> None:
    good = lab.pod(
        "post-start",
        lab.container(
            "while ! ls /tmp/hook 2>/dev/null; do sleep 0.05; done",
            lifecycle={"postStart": {"exec": {"command": ["touch", "/tmp/hook"]}}},
        ),
    )
    assert lab.output(good) == "/tmp/hook\n"
    bad = lab.pod(
        "post-start", lab.container("exec sleep 600", lifecycle={"postStart": {"exec": {"command": ["false"]}}})
    )
    assert terminated(lab.ended(bad))["exitCode"] == 137
    assert lab.event(bad, "FailedPostStartHook")["type"] == "Warning"


def test_a_pod_that_outlives_its_deadline_fails(lab: Lab) -> None:
    name = lab.pod(
        "deadline", lab.container("exec sleep 600"), activeDeadlineSeconds=2, terminationGracePeriodSeconds=1
    )
    pod = lab.ended(name)
    assert (pod["status"]["phase"], pod["status"]["reason"]) == ("Failed", "DeadlineExceeded")


def test_a_forced_deletion_frees_the_name_at_once(lab: Lab) -> None:
    name = lab.pod("forced", lab.python(STUBBORN), terminationGracePeriodSeconds=2)
    lab.logged(name, "up")
    lab.delete(name, "--force", "--grace-period=0")
    lab.missing(name, 20)


def test_a_deleted_pod_that_waits_for_a_volume_goes_without_having_run(lab: Lab) -> None:
    volumes = [{"name": "v", "configMap": {"name": "never"}}]
    name = lab.pod("pending", lab.container("true", volumeMounts=[{"name": "v", "mountPath": "/v"}]), volumes=volumes)
    lab.event(name, "FailedMount")
    lab.delete(name)
    lab.missing(name)


def test_conditions_of_others_stay_when_the_node_writes_status(lab: Lab) -> None:
    gates = [{"conditionType": "example.com/gate"}]
    name = lab.pod("gated", lab.container("exec sleep 600"), readinessGates=gates)
    pod = lab.wait(name, lambda p: condition_or_none(p, "ContainersReady") == "True", "its containers were ready")
    assert condition(pod, "Ready")["reason"] == "ReadinessGatesNotReady"
    patch = '{"status":{"conditions":[{"type":"example.com/gate","status":"True"}]}}'
    lab.kubectl("patch", "pod", name, "--subresource=status", "--type=strategic", "-p", patch)
    pod = lab.wait(name, is_ready, "the gate let it be ready")
    assert condition(pod, "example.com/gate")["status"] == "True"
    lab.delete(name, "--grace-period=1")


def condition_or_none(pod: dict[str, Any], kind: str) -> str | None:
    return next((c["status"] for c in pod["status"].get("conditions", []) if c["type"] == kind), None)
