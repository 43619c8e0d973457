"""A container on a node: command line, environment, exit, messages, restarts, file system."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.testing.cluster.lab import condition, status, terminated

if TYPE_CHECKING:
    from tests.testing.cluster.lab import Json, Lab

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def looping(lab: Lab) -> str:
    """A pod that keeps failing, started before all others: its back-off grows while they are tested."""
    return lab.pod("loops", lab.container("echo again; exit 5"), restartPolicy="OnFailure")


def test_a_failing_container_shows_its_exit_code_reason_and_last_words(lab: Lab) -> None:
    name = lab.pod("fails", lab.container("echo wrong > /dev/termination-log; exit 3"))
    pod = lab.ended(name)
    end = terminated(pod)
    assert pod["status"]["phase"] == "Failed"
    assert (end["exitCode"], end["reason"], end["message"]) == (3, "Error", "wrong\n")
    assert end["startedAt"] <= end["finishedAt"]
    assert condition(pod, "Ready")["reason"] == "PodFailed"
    assert condition(pod, "ContainersReady")["status"] == "False"


def test_a_container_that_ends_well_makes_the_pod_succeed(lab: Lab) -> None:
    pod = lab.ended(lab.pod("ends", lab.container("true"), lab.container("sleep 0.3", "other")))
    assert pod["status"]["phase"] == "Succeeded"
    assert terminated(pod, "other")["reason"] == "Completed"
    assert condition(pod, "Initialized")["reason"] == "PodCompleted"
    assert condition(pod, "Ready") | {"status": "False", "reason": "PodCompleted"} == condition(pod, "Ready")
    assert status(pod)["image"].endswith(lab.image.rsplit("/", maxsplit=1)[-1])


def test_the_end_of_the_log_is_the_message_of_a_failure_that_left_none(lab: Lab) -> None:
    script = "for i in 1 2 3; do echo line $i; done; exit 1"
    name = lab.pod("falls-back", lab.container(script, terminationMessagePolicy="FallbackToLogsOnError"))
    assert terminated(lab.ended(name))["message"] == "line 1\nline 2\nline 3\n"


def test_a_signal_ends_a_container_with_128_and_its_number(lab: Lab) -> None:
    name = lab.pod("killed", lab.container("sh -c 'kill -9 $$$$' ; exit $?"))
    assert terminated(lab.ended(name))["exitCode"] == 137


def test_a_command_that_does_not_exist_is_a_start_error(lab: Lab) -> None:
    pod = lab.ended(lab.pod("nothing", lab.container(["/no/such/program"])))
    end = terminated(pod)
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert "/no/such/program" in end["message"]
    assert pod["status"]["phase"] == "Failed"


def test_variables_come_from_values_fields_resources_config_maps_and_secrets(lab: Lab) -> None:
    settings = lab.name("settings")
    lab.create(
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
        {"name": "MILLIS", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}},
        {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        {"name": "SIZE", "valueFrom": {"configMapKeyRef": {"name": settings, "key": "size"}}},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": settings, "key": "password"}}},
        {"name": "ABSENT", "valueFrom": {"configMapKeyRef": {"name": "no-such", "key": "x", "optional": True}}},
    ]
    name = lab.pod(
        "env",
        lab.python(
            "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))",
            args=["$(FIRST)", "$$(FIRST)", "$(UNKNOWN)"],
            env=env,
            envFrom=[{"prefix": "CM_", "configMapRef": {"name": settings}}, {"secretRef": {"name": settings}}],
            resources={"requests": {"cpu": "10m"}, "limits": {"cpu": "500m", "memory": "64Mi"}},
        ),
        labels={"tier": "gold"},
    )
    found, arguments = json.loads(lab.output(name))
    pod = lab.get(name)
    assert (
        found
        | {
            "FIRST": "one",
            "SECOND": "one-two $(FIRST) $(UNKNOWN)",
            "NAME": name,
            "SPACE": lab.namespace,
            "LABEL": "gold",
            "NODE": pod["spec"]["nodeName"],
            "IP": pod["status"]["podIP"],
            "HOST_IP": pod["status"]["hostIP"],
            "MILLIS": "10",
            "MEMORY": "64",
            "SIZE": "7",
            "PASSWORD": "hush",
            "CM_COLOUR": "blue",
            "password": "hush",
            "HOSTNAME": name,
        }
        == found
    )
    assert "ABSENT" not in found
    assert found["KUBERNETES_SERVICE_PORT"].isdigit()
    assert arguments == ["one", "$(FIRST)", "$(UNKNOWN)"]


def test_a_container_waits_for_a_config_map_that_its_environment_needs(lab: Lab) -> None:
    late = lab.name("late")
    env = [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": late, "key": "x"}}}]
    name = lab.pod("waits", lab.container("echo got $X", env=env))

    def refused(pod: Json) -> bool:
        return bool(status(pod)["state"].get("waiting", {}).get("reason") == "CreateContainerConfigError")

    pod = lab.wait(name, refused, "it waited for the config map")
    assert f'configmap "{late}" not found' in status(pod)["state"]["waiting"]["message"]
    lab.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": late}, "data": {"x": "it"}})
    assert lab.output(name) == "got it\n"


def test_a_process_is_number_one_on_a_machine_with_its_own_name(lab: Lab) -> None:
    name = lab.pod("own", lab.container("echo $$$$; hostname; cat /etc/hostname; pwd", workingDir="/made/up"))
    assert lab.output(name).splitlines() == ["1", name, name, "/made/up"]


def test_what_a_container_writes_outside_volumes_is_missing_after_a_restart(lab: Lab) -> None:
    script = "ls /opt/mark /keep/mark 2>/dev/null; touch /opt/mark /keep/mark; sleep 0.2; exit 1"
    name = lab.pod(
        "restarts",
        lab.container(script, volumeMounts=[{"name": "keep", "mountPath": "/keep"}]),
        restartPolicy="OnFailure",
        volumes=[{"name": "keep", "emptyDir": {}}],
    )
    lab.wait(name, lambda p: status(p)["restartCount"] >= 1, "it was restarted")
    assert lab.logged(name, "mark") == "/keep/mark\n"
    lab.delete(name)


def test_restart_policy_always_starts_a_container_that_ended_well_again(lab: Lab) -> None:
    name = lab.pod("again", lab.container("echo run"), restartPolicy="Always")
    pod = lab.wait(name, lambda p: status(p)["restartCount"] >= 1, "it was started again")
    assert status(pod)["lastState"]["terminated"]["reason"] == "Completed" or status(pod)["state"].get("terminated")
    lab.delete(name)


def test_a_read_only_root_keeps_volumes_writable(lab: Lab) -> None:
    name = lab.pod(
        "locked",
        lab.container(
            "touch /opt/x 2>/dev/null && echo bad; touch /data/x /tmp/x && echo good",
            securityContext={"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False},
            volumeMounts=[{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
        ),
        volumes=[{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
    )
    assert lab.output(name) == "good\n"


def test_root_is_refused_where_the_pod_forbids_it(lab: Lab) -> None:
    name = lab.pod("root", lab.container("true", securityContext={"runAsNonRoot": True, "runAsUser": 0}))
    pod = lab.wait(name, lambda p: status(p)["state"].get("waiting", {}).get("message"), "it was refused")
    waiting = status(pod)["state"]["waiting"]
    assert waiting["reason"] == "CreateContainerConfigError"
    assert "breaks non-root policy" in waiting["message"]
    lab.delete(name)


def test_events_report_containers(lab: Lab) -> None:
    name = lab.pod("told", lab.container("true"))
    assert lab.event(name, "Created")["involvedObject"]["fieldPath"] == "spec.containers{main}"
    assert lab.event(name, "Started")["type"] == "Normal"
    assert lab.event(name, "Scheduled")


def test_a_pod_that_is_too_big_for_the_node_it_names_fails_at_once(lab: Lab) -> None:
    node = lab.site.worker_nodes()[-1]
    big = lab.container("true", resources={"requests": {"cpu": "4000"}})
    pod = lab.ended(lab.pod("big", big, nodeName=node))
    assert (pod["status"]["phase"], pod["status"]["reason"]) == ("Failed", "OutOfcpu")
    assert "enough resource: cpu" in pod["status"]["message"]


def test_containers_that_keep_failing_wait_longer_and_longer(lab: Lab, looping: str) -> None:
    def waits(pod: Json) -> bool:
        return bool(status(pod)["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff")

    pod = lab.wait(looping, waits, "it was in back-off", 150)
    found = status(pod)
    assert pod["status"]["phase"] == "Running"
    # It doubles each time, and other tests have run meanwhile.
    message = found["state"]["waiting"]["message"]
    assert re.match(r"back-off (10s|20s|40s|1m20s|2m40s) restarting failed container=main pod=", message)
    assert found["lastState"]["terminated"]["exitCode"] == 5
    assert found["restartCount"] >= 1
    assert lab.event(looping, "BackOff")["type"] == "Warning"
    assert lab.logs(looping, "--previous") == "again\n"
    lab.delete(looping)
