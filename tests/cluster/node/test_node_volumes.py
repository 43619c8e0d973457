"""Volumes on a node: mounts, updates from their source, limits, refusals."""

import json
import sys
from pathlib import Path

import pytest

from tests.testing.cluster.pod_client import PodClient, status

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(300)]


def config_map(name: str, **data: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_config_maps_and_secrets_are_mounted_with_modes_and_keys(client: PodClient) -> None:
    name = client.name("files")
    client.create(
        config_map(name, a="one", b="two"),
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"key": "hush"}},
    )
    pod = client.create_pod(
        "files",
        client.container(
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
    assert client.output(pod) == "onetwoonehushdeep\n440\n400\n/etc/passwd\n0\n"


def test_a_config_map_volume_is_updated_atomically(client: PodClient) -> None:
    name = client.name("live")
    client.create(config_map(name, a="1", b="1"))
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
    pod = client.create_pod(
        "live",
        client.python(
            script,
            volumeMounts=[
                {"name": "v", "mountPath": "/live"},
                {"name": "v", "mountPath": "/sub", "subPath": "a"},
            ],
        ),
        volumes=[{"name": "v", "configMap": {"name": name}}],
    )
    client.wait_for_log(pod, "up")
    client.kubectl("patch", "configmap", name, "-p", '{"data":{"a":"2","b":"2"}}')
    # A subPath is not updated.
    assert client.output(pod).splitlines()[-1] == "['a', 'b'] 1"


def test_a_pod_waits_for_a_volume_s_config_map(client: PodClient) -> None:
    name = client.name("volume-late")
    pod = client.create_pod(
        "volume-late",
        client.container("cat /v/a", volumeMounts=[{"name": "v", "mountPath": "/v"}]),
        volumes=[{"name": "v", "configMap": {"name": name}}],
    )
    assert f'configmap "{name}" not found' in client.event(pod, "FailedMount")["message"]
    pending = client.wait(pod, lambda pod: status(pod)["state"].get("waiting"), "its status is waiting")
    assert pending["status"]["phase"] == "Pending"
    assert status(pending)["state"]["waiting"]["reason"] == "ContainerCreating"
    client.create(config_map(name, a="there"))
    assert client.output(pod) == "there"


def test_a_downward_api_volume_follows_labels(client: PodClient) -> None:
    items = [
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
    ]
    pod = client.create_pod(
        "downward",
        client.container(
            "cat /me/name; echo; cat /me/labels; echo; until grep -q blue /me/labels; do sleep 0.1; done",
            volumeMounts=[{"name": "me", "mountPath": "/me"}],
        ),
        volumes=[{"name": "me", "downwardAPI": {"items": items}}],
        labels={"colour": "red"},
    )
    client.wait_for_log(pod, "red")
    client.kubectl("label", "pod", pod, "--overwrite", "colour=blue")
    assert client.output(pod) == f'{pod}\ncolour="red"\n'


def test_a_projected_token_has_its_audience_and_pod(client: PodClient) -> None:
    token = {"serviceAccountToken": {"path": "token", "audience": "example.com/test", "expirationSeconds": 600}}
    pod = client.create_pod(
        "token",
        client.container(
            "cat /tokens/token; echo; stat -L -c %a /tokens/token; "
            "ls /var/run/secrets/kubernetes.io/serviceaccount | tr '\\n' ' '",
            volumeMounts=[{"name": "tokens", "mountPath": "/tokens"}],
        ),
        volumes=[{"name": "tokens", "projected": {"sources": [token]}}],
        as_root=False,  # a kubelet gives a pod whose user it knows a token that only that user can read
    )
    text, mode, automounted = client.output(pod).splitlines()
    assert (mode, automounted.split()) == ("644", ["ca.crt", "namespace", "token"])
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": text, "audiences": ["example.com/test"]},
    }
    review_status = json.loads(client.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))["status"]
    # A token of a pod that has ended stays valid until the pod is deleted.
    assert review_status["user"]["extra"]["authentication.kubernetes.io/pod-name"] == [pod]
    assert review_status["user"]["username"] == f"system:serviceaccount:{client.namespace}:default"
    review["spec"] = {"token": text}
    other = json.loads(client.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))["status"]
    assert not other.get("authenticated")


def test_a_token_is_readable_only_by_the_group_of_the_pod(client: PodClient) -> None:
    pod = client.create_pod(
        "group",
        client.container("stat -L -c %a /var/run/secrets/kubernetes.io/serviceaccount/token"),
        securityContext={"fsGroup": 2000},
    )
    assert client.output(pod) == "640\n"


def test_a_memory_volume_is_a_tmpfs_of_its_size(client: PodClient) -> None:
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
    pod = client.create_pod(
        "memory",
        client.python(script, volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}]),
        volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}}],
    )
    assert client.output(pod).splitlines() == [str(4 << 20), "ENOSPC", "tmpfs"]


def test_dev_shm_is_shared_within_a_pod(client: PodClient) -> None:
    writer = client.container("echo secret > /dev/shm/note; exec sleep 600", "writer")
    reader = client.container("until cat /dev/shm/note 2>/dev/null; do sleep 0.1; done; exec sleep 600")
    pod = client.create_pod("shm", writer, reader)
    client.wait_for_log(pod, "secret", "-c", "main")
    other = client.create_pod("shm", client.container("ls /dev/shm | wc -l"))
    assert client.output(other) == "0\n"
    client.delete(pod, "--grace-period=1")


def test_mounts_can_be_read_only_or_a_sub_path(client: PodClient) -> None:
    pod = client.create_pod(
        "parts",
        client.container(
            "touch /ro/x 2>&1 | grep -o 'Read-only file system'; echo $NAME > /part/file; cat /ro/sub/file",
            env=[{"name": "NAME", "value": "sub"}],
            volumeMounts=[
                {"name": "v", "mountPath": "/ro", "readOnly": True},
                {"name": "v", "mountPath": "/part", "subPath": "sub"},
            ],
        ),
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    assert client.output(pod) == "Read-only file system\nsub\n"


def test_a_host_path_is_shared_and_its_type_checked(client: PodClient) -> None:
    folder = client.cluster.shared / client.name("host")
    mounts = [{"name": "h", "mountPath": "/data/host"}]
    writer = client.create_pod(
        "host",
        client.container("echo hello > /data/host/file", volumeMounts=mounts),
        volumes=[{"name": "h", "hostPath": {"path": str(folder), "type": "DirectoryOrCreate"}}],
    )
    assert client.wait_ended(writer)["status"]["phase"] == "Succeeded"
    assert (folder / "file").read_text() == "hello\n"
    refused = client.create_pod(
        "host",
        client.container("true", volumeMounts=mounts),
        volumes=[{"name": "h", "hostPath": {"path": str(folder / "file"), "type": "Directory"}}],
    )
    assert "hostPath type check failed" in client.event(refused, "FailedMount")["message"]
    client.delete(refused)


def test_a_persistent_volume_outlives_its_pod(client: PodClient) -> None:
    if not json.loads(client.kubectl("get", "storageclasses", "-o", "json"))["items"]:
        pytest.skip("the cluster has no storage class")
    claim = client.name("claim")
    client.create(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Mi"}}},
        }
    )
    volumes = [{"name": "c", "persistentVolumeClaim": {"claimName": claim}}]
    mounts = [{"name": "c", "mountPath": "/claim"}]
    first = client.create_pod(
        "claims", client.container("echo kept > /claim/file", volumeMounts=mounts), volumes=volumes
    )
    assert client.wait_ended(first)["status"]["phase"] == "Succeeded"
    client.delete(first)
    second = client.create_pod("claims", client.container("cat /claim/file", volumeMounts=mounts), volumes=volumes)
    assert client.output(second) == "kept\n"
    client.delete(second)
    client.kubectl("delete", "pvc", claim, "--wait=false")


def test_programs_below_a_volume_can_be_started(client: PodClient) -> None:
    if client.cluster.kind != "local":
        pytest.skip("elsewhere programs come from the image")
    folder = f"/{Path(sys.prefix).parts[1]}"
    pod = client.create_pod(
        "covered",
        client.container(
            f"touch {folder}/mine && python -c 'import trainium_contract, yaml; print(\"alive\")'",
            volumeMounts=[{"name": "cover", "mountPath": folder}],
        ),
        volumes=[{"name": "cover", "emptyDir": {}}],
    )
    client.wait_ended(pod)
    assert client.logs(pod) == "alive\n"
