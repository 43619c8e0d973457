"""Volumes, hosts files, logs, addresses and refused fields of a process node."""

import asyncio
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from trainium_devcluster.node.network import addresses, hosts
from trainium_devcluster.node.pods import logs
from trainium_devcluster.node.pods.pod_setup import list_capabilities
from trainium_devcluster.node.spec import mounts, unsupported_fields
from trainium_devcluster.node.spec.config_data import MissingKeyError, ProjectedFile, project_keys
from trainium_devcluster.node.spec.environment import ConfigError
from trainium_devcluster.node.volumes import atomic_writer


def contents(**files: str) -> dict[str, ProjectedFile]:
    return {name.replace("__", "/"): ProjectedFile(text.encode()) for name, text in files.items()}


def test_a_volume_is_replaced_atomically_and_only_when_its_content_changed(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    assert atomic_writer.write(folder, contents(a="1", deep__b="1"))
    first_data = (folder / "..data").resolve()
    assert not atomic_writer.write(folder, contents(a="1", deep__b="1"))
    assert (folder / "..data").resolve() == first_data
    descriptor = os.open(folder / "..data", os.O_RDONLY)
    assert atomic_writer.write(folder, contents(a="2", c="2"))
    os.close(descriptor)
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("..")) == ["a", "c"]
    assert (folder / "a").read_text() == "2"
    assert not first_data.exists()


def test_a_volume_has_the_selected_keys_with_their_modes(tmp_path: Path) -> None:
    values = {"a": b"1", "b": b"2"}
    files = project_keys(
        values, [{"key": "a", "path": "x/y", "mode": 0o400}], 0o644, optional=False, what="configmap n/c"
    )
    atomic_writer.write(tmp_path / "v", files)
    assert (tmp_path / "v/x/y").stat().st_mode & 0o777 == 0o400
    with pytest.raises(MissingKeyError, match="references non-existent config key: z"):
        project_keys(values, [{"key": "z", "path": "z"}], 0o644, optional=False, what="configmap n/c")
    assert project_keys(values, [{"key": "z", "path": "z"}], 0o644, optional=True, what="") == {}


def test_a_sub_path_cannot_lead_out_of_its_volume(tmp_path: Path) -> None:
    volume = tmp_path / "v"
    volume.mkdir()
    (volume / "link").symlink_to("/etc")
    for sub in ("../x", "/etc", "link/passwd"):
        with pytest.raises(ConfigError, match="subPath"):
            mounts.build_volume_mounts(
                {"volumeMounts": [{"name": "v", "mountPath": "/m", "subPath": sub}]}, {"v": volume}
            )


def build_service(**spec: Any) -> dict[str, Any]:
    body = {"selector": {"app": "a"}, "ports": [{"port": 80}], "clusterIP": "10.0.0.9", **spec}
    return {"metadata": {"name": "s", "namespace": "n"}, "spec": body}


def service_pod(ip: str, *, ready: bool = True, phase: str = "Running", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "namespace": "n", "uid": ip, "labels": {"app": "a", "more": "x"}},
        "spec": spec,
        "status": {"podIP": ip, "phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def test_endpoints_of_a_service_are_its_ready_pods_by_address() -> None:
    pods = [
        service_pod("127.1.0.10"),
        service_pod("127.1.0.9"),
        service_pod("127.1.0.11", ready=False),
        service_pod("127.1.0.12", phase="Failed"),
    ]
    pods[0]["metadata"]["deletionTimestamp"] = None
    assert [endpoint.address for endpoint in hosts.select_endpoints(build_service(), pods)] == ["127.1.0.9"]
    all_endpoints = hosts.select_endpoints(build_service(publishNotReadyAddresses=True), pods)
    assert [endpoint.address for endpoint in all_endpoints] == ["127.1.0.9", "127.1.0.10", "127.1.0.11"]
    assert hosts.select_endpoints(build_service(selector=None), pods) == ()


def test_short_names_resolve_only_in_their_namespace() -> None:
    named = service_pod("127.1.0.9", hostname="h", subdomain="s")
    names = [hosts.ServiceNames("n", "s", hosts.select_endpoints(build_service(), [named, service_pod("127.1.0.10")]))]
    text = hosts.render("127.1.0.2", "me", {"metadata": {"namespace": "n"}, "spec": {}}, names)
    assert "127.1.0.2\tme\n" in text
    assert "127.1.0.9\ts.n.svc.cluster.local s.n.svc s.n s\n127.1.0.10\ts.n" in text
    assert "127.1.0.9\th.s.n.svc.cluster.local h.s.n.svc h.s.n h.s\n" in text
    other = hosts.render("127.1.0.2", "me", {"metadata": {"namespace": "o"}, "spec": {}}, names)
    assert "127.1.0.9\ts.n.svc.cluster.local s.n.svc s.n\n" in other


def test_a_hosts_file_keeps_its_inode_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    hosts.write(path, "long text\n")
    inode = path.stat().st_ino
    hosts.write(path, "short\n")
    assert (path.read_text(), path.stat().st_ino) == ("short\n", inode)


def test_addresses_are_allocated_in_turn_and_kept_by_their_owner() -> None:
    pods = addresses.PodAddresses(ipaddress.IPv4Network("127.1.2.0/29"))
    assert [pods.allocate(owner) for owner in "abab"] == ["127.1.2.2", "127.1.2.3", "127.1.2.2", "127.1.2.3"]
    pods.release("a")
    assert pods.allocate("c") == "127.1.2.4"
    assert pods.allocate("d", previous="127.1.2.2") == "127.1.2.2"
    assert pods.allocate("e", previous="127.1.2.2") == "127.1.2.5"
    assert pods.allocate("f") == "127.1.2.6"
    with pytest.raises(addresses.NoFreeAddressError, match="all 5"):
        pods.allocate("g")


def test_two_nodes_claim_different_networks() -> None:
    def networks() -> Any:
        return iter([ipaddress.IPv4Network("127.213.7.0/24"), ipaddress.IPv4Network("127.213.8.0/24")])

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first_network, first_socket = addresses.reserve_network(networks(), port)
    second_network, second_socket = addresses.reserve_network(networks(), port)
    with first_socket, second_socket:
        assert (str(first_network), str(second_network)) == ("127.213.7.0/24", "127.213.8.0/24")
        with pytest.raises(addresses.NoFreeAddressError):
            addresses.reserve_network(networks(), port)


def find_refusals(container: dict[str, Any], **spec: Any) -> list[str]:
    body = {"containers": [{"name": "c", "command": ["x"], **container}], **spec}
    return unsupported_fields.find_unsupported({"metadata": {}, "spec": body})


def test_a_supported_pod_is_not_refused() -> None:
    context = {
        "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert find_refusals({"securityContext": context}, volumes=[{"name": "e", "emptyDir": {}}]) == []


@pytest.mark.parametrize(
    ("container", "spec", "field"),
    [
        ({"securityContext": {"privileged": True}}, {}, "securityContext.privileged"),
        ({}, {"hostPID": True}, "spec.hostPID"),
        ({}, {"shareProcessNamespace": True}, "spec.shareProcessNamespace"),
        ({"livenessProbe": {"grpc": {"port": 1}}}, {}, "livenessProbe.grpc"),
        ({"ports": [{"containerPort": 1, "hostPort": 1}]}, {}, "ports.hostPort"),
        ({"stdin": True}, {}, "containers[c].stdin"),
        ({"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}, {}, "containers[c].lifecycle"),
        ({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}, {}, "capabilities.add SYS_ADMIN"),
        ({"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {}}}]}, {}, "env[A].valueFrom.resourceFieldRef"),
        ({}, {"dnsConfig": {"nameservers": ["1.1.1.1"]}}, "spec.dnsConfig.nameservers"),
        ({}, {"readinessGates": [{"conditionType": "x/y"}]}, "spec.readinessGates"),
        ({"command": []}, {}, "command must be given"),
        ({}, {"volumes": [{"name": "n", "nfs": {"server": "s", "path": "/"}}]}, "volume n of kind nfs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_field_is_refused_by_name(container: dict[str, Any], spec: dict[str, Any], field: str) -> None:
    (refusal,) = find_refusals(container, **spec)
    assert field in refusal


def test_a_refusal_names_the_container_and_the_field() -> None:
    refusals = find_refusals({"readinessProbe": {"grpc": {"port": 1}}}, hostIPC=True)
    assert refusals[0].startswith("spec.hostIPC is not supported")
    assert refusals[1].startswith("spec.containers[c].readinessProbe.grpc is not supported")


def test_capabilities_are_dropped_and_added() -> None:
    assert list_capabilities({"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}) == (14,)
    assert 13 in list_capabilities({})
    assert 13 not in list_capabilities({"capabilities": {"drop": ["NET_RAW"]}})


async def read_log(path: Path, ended: Any = lambda: True, **query: Any) -> str:
    return b"".join([piece async for piece in logs.read(path, logs.LogOptions(**query), ended)]).decode()


async def test_a_log_is_read_by_stream_tail_limit_and_time(tmp_path: Path) -> None:
    writer = logs.LogWriter(tmp_path / "1.log")
    out, err = writer.open_pipe("stdout"), writer.open_pipe("stderr")
    os.write(out, b"one\ntwo\nhalf")
    os.write(err, b"bad\n")
    await asyncio.sleep(0.05)
    os.close(out)
    os.close(err)
    await writer.close()
    path = writer.path
    assert sorted((await read_log(path)).splitlines()) == ["bad", "half", "one", "two"]
    assert await read_log(path, stream="Stderr") == "bad\n"
    assert await read_log(path, stream="Stdout", tail=1) == "half"
    assert await read_log(path, stream="Stdout", limit=5) == "one\nt"
    assert await read_log(path, since=4e9) == ""
    assert (await read_log(path, stream="Stdout", timestamps=True)).startswith("20")
    assert logs.read_last_lines(path, max_lines=1) in {"half", "bad\n"}


async def test_following_a_log_continues_after_its_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_LIMIT", 200)
    writer = logs.LogWriter(tmp_path / "1.log")
    out = writer.open_pipe("stdout")
    ended = False

    async def write() -> None:
        nonlocal ended
        for number in range(12):
            os.write(out, f"line {number}\n".encode())
            await asyncio.sleep(0.06)
        os.close(out)
        await writer.close()
        ended = True

    os.write(out, b"begin\n")
    await asyncio.sleep(0.05)
    task = asyncio.create_task(write())
    text = await read_log(writer.path, lambda: ended, follow=True)
    await task
    assert text.splitlines() == ["begin", *(f"line {number}" for number in range(12))]
    assert writer.path.with_suffix(".old").exists()


async def test_a_very_long_line_is_read_complete(tmp_path: Path) -> None:
    writer = logs.LogWriter(tmp_path / "1.log")
    out = writer.open_pipe("stdout")
    os.write(out, b"x" * 40000 + b"\n")
    os.close(out)
    await writer.close()
    assert await read_log(writer.path) == "x" * 40000 + "\n"
