"""A container on a node: command line, environment, exit, messages, restarts, file system."""

import json
import re

import pytest

from tests.testing.cluster.pod_client import Json, PodClient, condition, status, terminated_state

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def failing_pod(client: PodClient) -> str:
    """Start a pod that keeps failing, before all others: its back-off grows while they are tested."""
    return client.create_pod("loops", client.container("echo again; exit 5"), restartPolicy="OnFailure")


def test_a_failed_container_has_exit_code_reason_and_message(client: PodClient) -> None:
    name = client.create_pod("fails", client.container("echo wrong > /dev/termination-log; exit 3"))
    pod = client.wait_ended(name)
    end = terminated_state(pod)
    assert pod["status"]["phase"] == "Failed"
    assert (end["exitCode"], end["reason"], end["message"]) == (3, "Error", "wrong\n")
    assert end["startedAt"] <= end["finishedAt"]
    assert condition(pod, "Ready")["reason"] == "PodFailed"
    assert condition(pod, "ContainersReady")["status"] == "False"


def test_a_pod_succeeds_with_its_containers(client: PodClient) -> None:
    pod = client.wait_ended(client.create_pod("ends", client.container("true"), client.container("sleep 0.3", "other")))
    assert pod["status"]["phase"] == "Succeeded"
    assert terminated_state(pod, "other")["reason"] == "Completed"
    assert condition(pod, "Initialized")["reason"] == "PodCompleted"
    assert condition(pod, "Ready") | {"status": "False", "reason": "PodCompleted"} == condition(pod, "Ready")
    assert status(pod)["image"].endswith(client.image.rsplit("/", maxsplit=1)[-1])


def test_the_end_of_the_log_is_the_fallback_message(client: PodClient) -> None:
    script = "for i in 1 2 3; do echo line $i; done; exit 1"
    name = client.create_pod("falls-back", client.container(script, terminationMessagePolicy="FallbackToLogsOnError"))
    assert terminated_state(client.wait_ended(name))["message"] == "line 1\nline 2\nline 3\n"


def test_a_signalled_container_exits_with_128_plus_the_signal(client: PodClient) -> None:
    name = client.create_pod("killed", client.container("sh -c 'kill -9 $$$$' ; exit $?"))
    assert terminated_state(client.wait_ended(name))["exitCode"] == 137


def test_a_missing_command_is_a_start_error(client: PodClient) -> None:
    pod = client.wait_ended(client.create_pod("nothing", client.container(["/no/such/program"])))
    end = terminated_state(pod)
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert "/no/such/program" in end["message"]
    assert pod["status"]["phase"] == "Failed"


def test_variables_come_from_values_fields_config_maps_and_secrets(client: PodClient) -> None:
    settings = client.name("settings")
    client.create(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": settings},
            "data": {"COLOUR": "blue", "size": "7"},
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": settings}, "stringData": {"password": "hush"}},
    )
    env = [
        {"name": "FIRST", "value": "one"},
        {"name": "SECOND", "value": "$(FIRST)-two $$(FIRST) $(UNKNOWN)"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "SPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['tier']"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        {"name": "SIZE", "valueFrom": {"configMapKeyRef": {"name": settings, "key": "size"}}},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": settings, "key": "password"}}},
        {"name": "ABSENT", "valueFrom": {"configMapKeyRef": {"name": "no-such", "key": "x", "optional": True}}},
    ]
    name = client.create_pod(
        "env",
        client.python(
            "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))",
            args=["$(FIRST)", "$$(FIRST)", "$(UNKNOWN)"],
            env=env,
            envFrom=[{"prefix": "CM_", "configMapRef": {"name": settings}}, {"secretRef": {"name": settings}}],
        ),
        labels={"tier": "gold"},
    )
    variables, arguments = json.loads(client.output(name))
    pod = client.get(name)
    assert (
        variables
        | {
            "FIRST": "one",
            "SECOND": "one-two $(FIRST) $(UNKNOWN)",
            "NAME": name,
            "SPACE": client.namespace,
            "LABEL": "gold",
            "NODE": pod["spec"]["nodeName"],
            "IP": pod["status"]["podIP"],
            "HOST_IP": pod["status"]["hostIP"],
            "SIZE": "7",
            "PASSWORD": "hush",
            "CM_COLOUR": "blue",
            "password": "hush",
            "HOSTNAME": name,
        }
        == variables
    )
    assert "ABSENT" not in variables
    assert variables["KUBERNETES_SERVICE_PORT"].isdigit()
    assert arguments == ["one", "$(FIRST)", "$(UNKNOWN)"]


def test_a_container_waits_for_a_config_map_that_its_environment_needs(client: PodClient) -> None:
    late = client.name("late")
    env = [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": late, "key": "x"}}}]
    name = client.create_pod("waits", client.container("echo got $X", env=env))

    def is_refused(pod: Json) -> bool:
        return bool(status(pod)["state"].get("waiting", {}).get("reason") == "CreateContainerConfigError")

    pod = client.wait(name, is_refused, "it waited for the config map")
    assert f'configmap "{late}" not found' in status(pod)["state"]["waiting"]["message"]
    client.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": late}, "data": {"x": "it"}})
    assert client.output(name) == "got it\n"


def test_a_container_has_pid_1_and_its_hostname(client: PodClient) -> None:
    name = client.create_pod(
        "own", client.container("echo $$$$; hostname; cat /etc/hostname; pwd", workingDir="/made/up")
    )
    assert client.output(name).splitlines() == ["1", name, name, "/made/up"]


def test_files_outside_volumes_are_lost_in_a_restart(client: PodClient) -> None:
    script = "ls /opt/mark /keep/mark 2>/dev/null; touch /opt/mark /keep/mark; sleep 0.2; exit 1"
    name = client.create_pod(
        "restarts",
        client.container(script, volumeMounts=[{"name": "keep", "mountPath": "/keep"}]),
        restartPolicy="OnFailure",
        volumes=[{"name": "keep", "emptyDir": {}}],
    )
    client.wait(name, lambda pod: status(pod)["restartCount"] >= 1, "it was restarted")
    assert client.wait_for_log(name, "mark") == "/keep/mark\n"
    client.delete(name)


def test_restart_policy_always_restarts_a_successful_container(client: PodClient) -> None:
    name = client.create_pod("again", client.container("echo run"), restartPolicy="Always")
    pod = client.wait(name, lambda pod: status(pod)["restartCount"] >= 1, "it was started again")
    assert status(pod)["lastState"]["terminated"]["reason"] == "Completed" or status(pod)["state"].get("terminated")
    client.delete(name)


def test_a_read_only_root_keeps_volumes_writable(client: PodClient) -> None:
    name = client.create_pod(
        "locked",
        client.container(
            "touch /opt/x 2>/dev/null && echo bad; touch /data/x /tmp/x && echo good",
            securityContext={"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False},
            volumeMounts=[{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
        ),
        volumes=[{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
    )
    assert client.output(name) == "good\n"


def test_run_as_non_root_refuses_root(client: PodClient) -> None:
    name = client.create_pod("root", client.container("true", securityContext={"runAsNonRoot": True, "runAsUser": 0}))
    pod = client.wait(name, lambda pod: status(pod)["state"].get("waiting", {}).get("message"), "it was refused")
    waiting = status(pod)["state"]["waiting"]
    assert waiting["reason"] == "CreateContainerConfigError"
    assert "breaks non-root policy" in waiting["message"]
    client.delete(name)


def test_events_report_containers(client: PodClient) -> None:
    name = client.create_pod("reporting", client.container("true"))
    assert client.event(name, "Created")["involvedObject"]["fieldPath"] == "spec.containers{main}"
    assert client.event(name, "Started")["type"] == "Normal"
    assert client.event(name, "Scheduled")


def test_a_pod_too_large_for_its_node_fails(client: PodClient) -> None:
    node = client.cluster.worker_nodes()[-1]
    big = client.container("true", resources={"requests": {"cpu": "4000"}})
    pod = client.wait_ended(client.create_pod("big", big, nodeName=node))
    assert (pod["status"]["phase"], pod["status"]["reason"]) == ("Failed", "OutOfcpu")
    assert "enough resource: cpu" in pod["status"]["message"]


def test_a_failing_container_is_restarted_with_back_off(client: PodClient, failing_pod: str) -> None:
    def is_in_back_off(pod: Json) -> bool:
        return bool(status(pod)["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff")

    pod = client.wait(failing_pod, is_in_back_off, "it was in back-off", 150)
    container = status(pod)
    assert pod["status"]["phase"] == "Running"
    # The back-off doubles, and other tests ran meanwhile.
    message = container["state"]["waiting"]["message"]
    assert re.match(r"back-off (10s|20s|40s|1m20s|2m40s) restarting failed container=main pod=", message)
    assert container["lastState"]["terminated"]["exitCode"] == 5
    assert container["restartCount"] >= 1
    assert client.event(failing_pod, "BackOff")["type"] == "Warning"
    assert client.logs(failing_pod, "--previous") == "again\n"
    client.delete(failing_pod)
