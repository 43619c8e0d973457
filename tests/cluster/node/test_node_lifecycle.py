"""Start and end of pods: init containers, sidecars, probes, grace periods, deadlines, deletion."""

import time

import pytest

from tests.testing.cluster.pod_client import PodClient, condition, status, terminated_state
from trainium_devcluster.node.api.objects import is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(240)]

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
POLITE = """
import signal, sys, time
def end(*_):
    print("ending"); sys.exit(7)
signal.signal(signal.SIGTERM, end)
print("up")
time.sleep(600)
"""


def test_init_containers_run_one_after_the_other_and_before_all_others(client: PodClient) -> None:
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    name = client.create_pod(
        "init",
        client.container("cat /shared/order", volumeMounts=mounts),
        initContainers=[
            client.container("sleep 0.3; echo first >> /shared/order", "one", volumeMounts=mounts),
            client.container("echo second >> /shared/order", "two", volumeMounts=mounts),
        ],
        volumes=[{"name": "shared", "emptyDir": {}}],
    )
    assert client.output(name) == "first\nsecond\n"
    pod = client.get(name)
    assert terminated_state(pod, "one")["reason"] == "Completed"
    assert status(pod, "two")["ready"] is True


def test_a_failed_init_container_fails_the_pod(client: PodClient) -> None:
    name = client.create_pod("init-fails", client.container("true"), initContainers=[client.container("exit 4", "one")])
    pod = client.wait_ended(name)
    assert pod["status"]["phase"] == "Failed"
    assert terminated_state(pod, "one")["exitCode"] == 4
    assert status(pod)["state"]["waiting"]["reason"] == "PodInitializing"
    assert condition(pod, "Initialized")["reason"] == "ContainersNotInitialized"


def test_a_sidecar_starts_before_the_main_container_and_ends_after_it(client: PodClient) -> None:
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    sidecar = client.python(
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
    name = client.create_pod(
        "sidecar",
        client.container("ls /shared/up && touch /shared/end", volumeMounts=mounts),
        initContainers=[sidecar],
        volumes=[{"name": "shared", "emptyDir": {}}],
    )
    pod = client.wait_ended(name)
    assert pod["status"]["phase"] == "Succeeded"
    assert client.logs(name, "-c", "side") == "main was True\n"


def test_a_failing_liveness_probe_restarts_the_container(client: PodClient) -> None:
    name = client.create_pod(
        "liveness",
        client.container(
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
    pod = client.wait(name, lambda pod: status(pod)["restartCount"] >= 1, "its container was restarted")
    assert status(pod)["lastState"]["terminated"]["exitCode"] == 137
    assert "Liveness probe failed" in client.event(name, "Unhealthy")["message"]
    assert "will be restarted" in client.event(name, "Killing")["message"]
    client.delete(name, "--grace-period=1")


def test_readiness_follows_its_probe_both_ways(client: PodClient) -> None:
    server = (
        "import http.server, os, pathlib\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200 if pathlib.Path('/tmp/ready').exists() else 503); self.end_headers()\n"
        "    def log_message(self, *_): pass\n"
        "http.server.HTTPServer((os.environ['IP'], 8080), Handler).serve_forever()\n"
    )
    name = client.create_pod(
        "readiness",
        client.python(
            server,
            env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            ports=[{"name": "web", "containerPort": 8080}],
            readinessProbe={"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 1, "failureThreshold": 1},
        ),
    )
    pod = client.wait(name, lambda pod: status(pod)["state"].get("running"), "it ran")
    assert not is_ready(pod)
    assert condition(pod, "Ready")["message"] == "containers with unready status: [main]"
    client.kubectl("exec", name, "--", "touch", "/tmp/ready")
    client.wait(name, is_ready, "it was ready")
    client.kubectl("exec", name, "--", "rm", "/tmp/ready")
    client.wait(name, lambda pod: not is_ready(pod), "it was not ready any more")
    client.delete(name, "--grace-period=1")


def test_a_startup_probe_holds_the_other_probes_back(client: PodClient) -> None:
    name = client.create_pod(
        "startup",
        client.container(
            "sleep 2; touch /tmp/up; exec sleep 600",
            startupProbe={"exec": {"command": ["ls", "/tmp/up"]}, "periodSeconds": 1, "failureThreshold": 60},
            livenessProbe={"exec": {"command": ["ls", "/tmp/up"]}, "periodSeconds": 1, "failureThreshold": 1},
            readinessProbe={"tcpSocket": {"port": 1}, "periodSeconds": 1},
        ),
    )
    pod = client.wait(name, lambda pod: status(pod)["state"].get("running"), "it ran")
    assert status(pod)["started"] is False
    pod = client.wait(name, lambda pod: status(pod).get("started"), "it had started")
    assert status(pod)["restartCount"] == 0
    assert not is_ready(pod)
    client.delete(name, "--grace-period=1")


def test_a_container_that_handles_sigterm_has_its_exit_code(client: PodClient) -> None:
    name = client.create_pod("polite", client.python(POLITE), hold=True, terminationGracePeriodSeconds=20)
    client.wait_for_log(name, "up")
    client.delete(name)
    pod = client.wait_ended(name)
    assert terminated_state(pod)["exitCode"] == 7
    assert pod["status"]["phase"] == "Failed"
    client.release(name)
    client.wait_deleted(name)


def test_a_container_that_ignores_sigterm_is_killed(client: PodClient) -> None:
    name = client.create_pod("stubborn", client.python(STUBBORN), hold=True, terminationGracePeriodSeconds=2)
    client.wait_for_log(name, "up")
    started_at = time.monotonic()
    client.delete(name)
    pod = client.wait_ended(name)
    assert time.monotonic() - started_at >= 2
    assert terminated_state(pod)["exitCode"] == 137
    client.release(name)


def test_a_later_shorter_grace_period_is_ignored(client: PodClient) -> None:
    name = client.create_pod("hastened", client.python(STUBBORN), terminationGracePeriodSeconds=4)
    client.wait_for_log(name, "up")
    started_at = time.monotonic()
    client.delete(name)
    client.delete(name, "--grace-period=1")
    client.wait_deleted(name)
    assert time.monotonic() - started_at >= 4


def test_a_pod_that_outlives_its_deadline_fails(client: PodClient) -> None:
    name = client.create_pod(
        "deadline", client.container("exec sleep 600"), activeDeadlineSeconds=2, terminationGracePeriodSeconds=1
    )
    pod = client.wait_ended(name)
    assert (pod["status"]["phase"], pod["status"]["reason"]) == ("Failed", "DeadlineExceeded")


def test_a_forced_deletion_frees_the_name(client: PodClient) -> None:
    name = client.create_pod("forced", client.python(STUBBORN), terminationGracePeriodSeconds=2)
    client.wait_for_log(name, "up")
    client.delete(name, "--force", "--grace-period=0")
    client.wait_deleted(name, 20)


def test_a_deleted_pod_that_waits_for_a_volume_never_runs(client: PodClient) -> None:
    volumes = [{"name": "v", "configMap": {"name": "never"}}]
    name = client.create_pod(
        "pending", client.container("true", volumeMounts=[{"name": "v", "mountPath": "/v"}]), volumes=volumes
    )
    client.event(name, "FailedMount")
    client.delete(name)
    client.wait_deleted(name)
