"""Namespaces served by name, on a real API server: the chart's rights, and a namespace that goes and comes back."""

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.definition.conftest import Api
from tests.testing.suite.timeouts import async_until
from trainium_operator.cluster.api.client import Api as OperatorApi
from trainium_operator.cluster.api.transport import connect
from trainium_operator.cluster.cache.namespaces import ListState
from trainium_operator.runtime import make_caches
from trainium_operator.settings import Settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SYSTEM, SERVED, GOING, OTHER = "ns-system", "ns-served", "ns-going", "ns-other"
RELEASE = "listed"
ACCOUNT = f"{RELEASE}-trainium-operator"


def role_objects(api: Api, *namespaces: str) -> str:
    """Return ServiceAccount, roles and bindings of the chart; if `namespaces` are given, only those in them."""
    settings = f"watchNamespaces={{{SERVED},{GOING}}}"
    text = api.helm("template", RELEASE, api.chart, "--namespace", SYSTEM, "--set", settings)
    kinds = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    found = [one for one in yaml.load_all(text, yaml.CSafeLoader) if one and one["kind"] in kinds]
    selected = [one for one in found if not namespaces or one["metadata"].get("namespace") in namespaces]
    return yaml.safe_dump_all(selected)


@pytest.fixture(scope="module")
def rights(defined: Api) -> Iterator[Api]:
    defined.make_namespaces(SYSTEM, SERVED, GOING, OTHER)
    defined.run("kubectl", "apply", "-f", "-", stdin=role_objects(defined))
    yield defined
    defined.delete_namespaces(SYSTEM, SERVED, GOING, OTHER)
    for kind in ("clusterrole", "clusterrolebinding"):
        defined.run("kubectl", "delete", kind, ACCOUNT, "--ignore-not-found")


def test_the_operator_has_rights_only_in_listed_namespaces(rights: Api) -> None:
    kinds = {"create": "pods", "watch": "pods", "patch": "configmaps", "list": "trainingjobs"}
    asked = [(verb, namespace) for verb in kinds for namespace in (SERVED, GOING, OTHER, "kube-system", "")]
    reviews = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{SYSTEM}:{ACCOUNT}",
                "resourceAttributes": {
                    "verb": verb,
                    "group": "trainium.dev" if verb == "list" else "",
                    "resource": kinds[verb],
                    "namespace": namespace,
                },
            },
        }
        for verb, namespace in asked
    ]
    answers = rights.kubectl(
        "create", "-f", "-", '-o=jsonpath={.status.allowed}{"\\n"}',
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews}),
    )  # fmt: skip
    assert dict(zip(asked, answers.split(), strict=True)) == {
        (verb, namespace): str(namespace in (SERVED, GOING)).lower() for verb, namespace in asked
    }


def credentials(api: Api, folder: Path) -> str:
    """Return a kubeconfig with the operator's own token."""
    whole = json.loads(api.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    token = api.run("kubectl", "create", "token", ACCOUNT, "-n", SYSTEM).stdout.strip()
    whole["users"] = [{"name": whole["users"][0]["name"], "user": {"token": token}}]
    cluster = whole["clusters"][0]["cluster"]
    if "certificate-authority" in cluster:
        authority = Path(cluster.pop("certificate-authority"))
        cluster["certificate-authority-data"] = base64.b64encode(authority.read_bytes()).decode()
    path = folder / "kubeconfig"
    path.write_text(json.dumps(whole))
    return str(path)


def job(name: str, namespace: str) -> str:
    spec = {"workers": {"accelerator": {"device": "cpu"}}, "trainer": {}}
    body: dict[str, Any] = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "spec": spec}
    return json.dumps({**body, "metadata": {"name": name, "namespace": namespace}})


def open_sockets() -> int:
    """Return the warnings of this process."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found += str(entry.readlink()).startswith("socket:")
    return found


def test_a_deleted_namespace_is_closed_until_it_is_recreated(rights: Api, tmp_path: Path) -> None:
    rights.run("kubectl", "apply", "-f", "-", stdin=job("stays", SERVED))
    rights.run("kubectl", "apply", "-f", "-", stdin=job("elsewhere", OTHER))

    async def seen() -> None:
        before = open_sockets()
        transport = await connect(credentials(rights, tmp_path))
        settings = Settings(watch_namespaces=f"{SERVED},{GOING}")
        caches = make_caches(OperatorApi(transport), settings)
        namespaces = caches.namespaces
        namespaces.listen(lambda _: None)
        watches = [asyncio.create_task(each.run()) for each in caches.reflectors()]

        async def until(condition: Callable[[], bool], what: str) -> None:
            await async_until(condition, lambda: f"{what}: {namespaces.counts()}")

        await until(lambda: namespaces.is_open(SERVED) and namespaces.is_open(GOING), "both are listed")
        await asyncio.to_thread(rights.run, "kubectl", "delete", "namespace", GOING)
        for each in caches.reflectors():  # as when the watches end by themselves, up to five minutes later
            await each.refresh()
        assert (namespaces.state(GOING), namespaces.is_open(SERVED)) == (ListState.FORBIDDEN, True)
        await asyncio.to_thread(rights.make_namespaces, GOING)
        await asyncio.to_thread(rights.run, "kubectl", "apply", "-f", "-", stdin=role_objects(rights, GOING))
        await asyncio.to_thread(rights.run, "kubectl", "apply", "-f", "-", stdin=job("again", GOING))
        for each in caches.reflectors():
            await each.refresh()
        await until(lambda: namespaces.is_open(GOING), "it is listed again")
        await until(
            lambda: set(caches.jobs.store.snapshot()) == {(SERVED, "stays"), (GOING, "again")}, "the jobs are known"
        )
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await transport.close()
        # Streams of cancelled watches close over TLS, which ends after they do.
        await async_until(lambda: open_sockets() <= before, lambda: f"{open_sockets()} sockets, {before} before")

    asyncio.run(seen())
