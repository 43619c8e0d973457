"""Volumes on a node: what is mounted where, what follows its source, what is limited or forbidden."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testing.cluster.lab import status

if TYPE_CHECKING:
    from tests.testing.cluster.lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def config_map(name: str, **data: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_config_maps_and_secrets_are_files_with_modes_and_chosen_keys(lab: Lab) -> None:
    name = lab.name("files")
    lab.create(
        config_map(name, a="one", b="two"),
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"key": "hush"}},
    )
    pod = lab.pod(
        "files",
        lab.container(
            "cat /etc/trainium/a /etc/trainium/b /chosen/deep/x /var/run/keys/key; ls /chosen; "
            "stat -L -c %a /chosen/deep/x /var/run/keys/key; ls /etc/passwd; ls /absent | wc -l",
            volumeMounts=[
                {"name": "all", "mountPath": "/etc/trainium", "readOnly": True},
                {"name": "some", "mountPath": "/chosen"},
                {"name": "keys", "mountPath": "/var/run/keys"},
                {"name": "absent", "mountPath": "/absent"},
            ],
        ),
        volumes=[
            {"name": "all", "configMap": {"name": name}},
            {"name": "some", "configMap": {"name": name, "items": [{"key": "a", "path": "deep/x", "mode": 0o440}]}},
            {"name": "keys", "secret": {"secretName": name, "defaultMode": 0o400}},
            {"name": "absent", "secret": {"secretName": "no-such", "optional": True}},
        ],
    )
    assert lab.output(pod) == "onetwoonehushdeep\n440\n400\n/etc/passwd\n0\n"


def test_a_config_map_volume_follows_its_object_all_files_at_once(lab: Lab) -> None:
    name = lab.name("live")
    lab.create(config_map(name, a="1", b="1"))
    script = (
        "import os, pathlib, time\n"
        "print('up')\n"
        "while True:\n"
        "    folder = pathlib.Path('/live/..data').resolve()\n"
        "    a, b = ((folder / n).read_text() for n in 'ab')\n"
        "    assert a == b, (a, b)\n"
        "    if a == '2': break\n"
        "    time.sleep(0.05)\n"
        "print(sorted(p for p in os.listdir('/live') if not p.startswith('..')), open('/sub').read())\n"
    )
    pod = lab.pod(
        "live",
        lab.python(
            script,
            volumeMounts=[
                {"name": "v", "mountPath": "/live"},
                {"name": "v", "mountPath": "/sub", "subPath": "a"},
            ],
        ),
        volumes=[{"name": "v", "configMap": {"name": name}}],
    )
    lab.logged(pod, "up")
    lab.kubectl("patch", "configmap", name, "-p", '{"data":{"a":"2","b":"2"}}')
    began = time.monotonic()
    # A subPath keeps what it was at the start.
    assert lab.output(pod).splitlines()[-1] == "['a', 'b'] 1"
    if lab.site.kind == "local":
        assert time.monotonic() - began < 5


def test_a_pod_waits_for_a_volume_s_config_map(lab: Lab) -> None:
    name = lab.name("volume-late")
    pod = lab.pod(
        "volume-late",
        lab.container("cat /v/a", volumeMounts=[{"name": "v", "mountPath": "/v"}]),
        volumes=[{"name": "v", "configMap": {"name": name}}],
    )
    assert f'configmap "{name}" not found' in lab.event(pod, "FailedMount")["message"]
    found = lab.wait(pod, lambda p: status(p)["state"].get("waiting"), "its status said that it waits")
    assert found["status"]["phase"] == "Pending"
    assert status(found)["state"]["waiting"]["reason"] == "ContainerCreating"
    lab.create(config_map(name, a="there"))
    assert lab.output(pod) == "there"


def test_a_pod_learns_about_itself_from_files_that_follow_its_labels(lab: Lab) -> None:
    items = [
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
        {"path": "cpu", "resourceFieldRef": {"containerName": "main", "resource": "requests.cpu", "divisor": "1m"}},
    ]
    pod = lab.pod(
        "downward",
        lab.container(
            "cat /me/name /me/cpu; echo; cat /me/labels; echo; until grep -q blue /me/labels; do sleep 0.1; done",
            volumeMounts=[{"name": "me", "mountPath": "/me"}],
            resources={"requests": {"cpu": "20m"}},
        ),
        volumes=[{"name": "me", "downwardAPI": {"items": items}}],
        labels={"colour": "red"},
    )
    lab.logged(pod, "red")
    lab.kubectl("label", "pod", pod, "--overwrite", "colour=blue")
    assert lab.output(pod) == f'{pod}20\ncolour="red"\n'


def test_a_projected_token_is_bound_to_its_audience_and_its_pod(lab: Lab) -> None:
    token = {"serviceAccountToken": {"path": "token", "audience": "example.com/test", "expirationSeconds": 600}}
    pod = lab.pod(
        "token",
        lab.container(
            "cat /tokens/token; echo; stat -L -c %a /tokens/token; "
            "ls /var/run/secrets/kubernetes.io/serviceaccount | tr '\\n' ' '",
            volumeMounts=[{"name": "tokens", "mountPath": "/tokens"}],
        ),
        volumes=[{"name": "tokens", "projected": {"sources": [token]}}],
        as_root=False,  # a kubelet gives a pod whose user it knows a token that only that user can read
    )
    text, mode, automounted = lab.output(pod).splitlines()
    assert (mode, automounted.split()) == ("644", ["ca.crt", "namespace", "token"])
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": text, "audiences": ["example.com/test"]},
    }
    found = json.loads(lab.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))["status"]
    # A token of a pod that has ended stays valid until the pod is deleted.
    assert found["user"]["extra"]["authentication.kubernetes.io/pod-name"] == [pod]
    assert found["user"]["username"] == f"system:serviceaccount:{lab.namespace}:default"
    review["spec"] = {"token": text}
    other = json.loads(lab.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))["status"]
    assert not other.get("authenticated")


def test_a_token_is_readable_by_the_group_of_the_pod_only(lab: Lab) -> None:
    pod = lab.pod(
        "group",
        lab.container("stat -L -c %a /var/run/secrets/kubernetes.io/serviceaccount/token"),
        securityContext={"fsGroup": 2000},
    )
    assert lab.output(pod) == "640\n"


def test_a_memory_volume_is_a_tmpfs_of_the_size_asked_for(lab: Lab) -> None:
    script = (
        "import errno, os\n"
        "stat = os.statvfs('/dev/shm')\n"
        "print(stat.f_blocks * stat.f_frsize)\n"
        "try:\n"
        "    open('/dev/shm/x', 'wb').write(bytes(8 << 20))\n"
        "except OSError as error:\n"
        "    print(errno.errorcode[error.errno])\n"
        "print(next(l.split()[0] for l in open('/proc/mounts') if l.split()[1] == '/dev/shm'))\n"
    )
    pod = lab.pod(
        "memory",
        lab.python(script, volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}]),
        volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}}],
    )
    assert lab.output(pod).splitlines() == [str(4 << 20), "ENOSPC", "tmpfs"]


def test_containers_of_a_pod_share_dev_shm_and_other_pods_do_not_see_it(lab: Lab) -> None:
    writer = lab.container("echo secret > /dev/shm/note; exec sleep 600", "writer")
    reader = lab.container("until cat /dev/shm/note 2>/dev/null; do sleep 0.1; done; exec sleep 600")
    pod = lab.pod("shm", writer, reader)
    lab.logged(pod, "secret", "-c", "main")
    other = lab.pod("shm", lab.container("ls /dev/shm | wc -l"))
    assert lab.output(other) == "0\n"
    lab.delete(pod, "--grace-period=1")


def test_a_read_only_mount_cannot_be_written_and_a_sub_path_shows_a_part(lab: Lab) -> None:
    pod = lab.pod(
        "parts",
        lab.container(
            "touch /ro/x 2>&1 | grep -o 'Read-only file system'; echo $NAME > /part/file; cat /ro/sub/file /expr/file",
            env=[{"name": "NAME", "value": "sub"}],
            volumeMounts=[
                {"name": "v", "mountPath": "/ro", "readOnly": True},
                {"name": "v", "mountPath": "/part", "subPath": "sub"},
                {"name": "v", "mountPath": "/expr", "subPathExpr": "$(NAME)"},
            ],
        ),
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    assert lab.output(pod) == "Read-only file system\nsub\nsub\n"


def test_a_host_path_is_shared_with_the_machine_and_checked_against_its_type(lab: Lab) -> None:
    folder = lab.site.shared / lab.name("host")
    mounts = [{"name": "h", "mountPath": "/data/host"}]
    made = lab.pod(
        "host",
        lab.container("echo hello > /data/host/file", volumeMounts=mounts),
        volumes=[{"name": "h", "hostPath": {"path": str(folder), "type": "DirectoryOrCreate"}}],
    )
    assert lab.ended(made)["status"]["phase"] == "Succeeded"
    assert (folder / "file").read_text() == "hello\n"
    refused = lab.pod(
        "host",
        lab.container("true", volumeMounts=mounts),
        volumes=[{"name": "h", "hostPath": {"path": str(folder / "file"), "type": "Directory"}}],
    )
    assert "hostPath type check failed" in lab.event(refused, "FailedMount")["message"]
    lab.delete(refused)


def test_a_claim_outlives_the_pod_that_wrote_to_it(lab: Lab) -> None:
    if not json.loads(lab.kubectl("get", "storageclasses", "-o", "json"))["items"]:
        pytest.skip("the cluster has no storage class")
    claim = lab.name("claim")
    lab.create(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Mi"}}},
        }
    )
    volumes = [{"name": "c", "persistentVolumeClaim": {"claimName": claim}}]
    mounts = [{"name": "c", "mountPath": "/claim"}]
    first = lab.pod("claims", lab.container("echo kept > /claim/file", volumeMounts=mounts), volumes=volumes)
    assert lab.ended(first)["status"]["phase"] == "Succeeded"
    lab.delete(first)
    second = lab.pod("claims", lab.container("cat /claim/file", volumeMounts=mounts), volumes=volumes)
    assert lab.output(second) == "kept\n"
    lab.delete(second)
    lab.kubectl("delete", "pvc", claim, "--wait=false")


def test_programs_stay_in_reach_below_a_volume(lab: Lab) -> None:
    if lab.site.kind != "local":
        pytest.skip("elsewhere programs come from the image")
    folder = f"/{Path(sys.prefix).parts[1]}"
    pod = lab.pod(
        "covered",
        lab.container(
            f"touch {folder}/mine && python -c 'import trainium_contract, yaml; print(\"alive\")'",
            volumeMounts=[{"name": "cover", "mountPath": folder}],
        ),
        volumes=[{"name": "cover", "emptyDir": {}}],
    )
    lab.ended(pod)
    assert lab.logs(pod) == "alive\n"
