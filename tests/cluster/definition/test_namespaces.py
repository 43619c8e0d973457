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
from trainium_operator.cluster.cache.caches import make_caches
from trainium_operator.cluster.cache.namespaces import ListState
from trainium_operator.settings import Settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SYSTEM, SERVED, DELETED, OTHER = "ns-system", "ns-served", "ns-deleted", "ns-other"
RELEASE = "listed"
ACCOUNT = f"{RELEASE}-trainium-operator"


def role_objects(api: Api, *namespaces: str) -> str:
    """Return ServiceAccount, roles and bindings of the chart; if `namespaces` are given, only those in them."""
    settings = f"watchNamespaces={{{SERVED},{DELETED}}}"
    text = api.helm("template", RELEASE, api.chart, "--namespace", SYSTEM, "--set", settings)
    kinds = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    roles = [document for document in yaml.load_all(text, yaml.CSafeLoader) if document and document["kind"] in kinds]
    selected = [role for role in roles if not namespaces or role["metadata"].get("namespace") in namespaces]
    return yaml.safe_dump_all(selected)


@pytest.fixture(scope="module")
def rights(crd_api: Api) -> Iterator[Api]:
    crd_api.make_namespaces(SYSTEM, SERVED, DELETED, OTHER)
    crd_api.run("kubectl", "apply", "-f", "-", stdin=role_objects(crd_api))
    yield crd_api
    crd_api.delete_namespaces(SYSTEM, SERVED, DELETED, OTHER)
    for kind in ("clusterrole", "clusterrolebinding"):
        crd_api.run("kubectl", "delete", kind, ACCOUNT, "--ignore-not-found")


def test_the_operator_has_rights_only_in_listed_namespaces(rights: Api) -> None:
    kinds = {"create": "pods", "watch": "pods", "patch": "configmaps", "list": "trainingjobs"}
    questions = [(verb, namespace) for verb in kinds for namespace in (SERVED, DELETED, OTHER, "kube-system", "")]
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
        for verb, namespace in questions
    ]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
    answers = rights.kubectl("create", "-f", "-", '-o=jsonpath={.status.allowed}{"\\n"}', stdin=listed)
    assert dict(zip(questions, answers.split(), strict=True)) == {
        (verb, namespace): str(namespace in (SERVED, DELETED)).lower() for verb, namespace in questions
    }


def credentials(api: Api, folder: Path) -> str:
    """Return a kubeconfig with the operator's own token."""
    config = json.loads(api.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    token = api.run("kubectl", "create", "token", ACCOUNT, "-n", SYSTEM).stdout.strip()
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    cluster = config["clusters"][0]["cluster"]
    if "certificate-authority" in cluster:
        authority = Path(cluster.pop("certificate-authority"))
        cluster["certificate-authority-data"] = base64.b64encode(authority.read_bytes()).decode()
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return str(path)


def build_job_json(name: str, namespace: str) -> str:
    spec = {"workers": {"accelerator": {"device": "cpu"}}, "trainer": {"data": {"source": "python-docs"}}}
    body: dict[str, Any] = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "spec": spec}
    return json.dumps({**body, "metadata": {"name": name, "namespace": namespace}})


def open_sockets() -> int:
    """Return the number of open sockets of this process."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            count += str(entry.readlink()).startswith("socket:")
    return count


def test_a_deleted_namespace_is_closed_until_it_is_recreated(rights: Api, tmp_path: Path) -> None:
    rights.run("kubectl", "apply", "-f", "-", stdin=build_job_json("stays", SERVED))
    rights.run("kubectl", "apply", "-f", "-", stdin=build_job_json("elsewhere", OTHER))

    async def observe() -> None:
        before = open_sockets()
        transport = await connect(credentials(rights, tmp_path))
        settings = Settings(watch_namespaces=f"{SERVED},{DELETED}")
        caches = make_caches(OperatorApi(transport), settings)
        namespaces = caches.namespaces
        namespaces.listen(lambda _: None)
        watches = [asyncio.create_task(reflector.run()) for reflector in caches.list_reflectors()]

        async def until(condition: Callable[[], bool], description: str) -> None:
            await async_until(condition, lambda: f"{description}: {namespaces.count_by_state()}")

        await until(lambda: namespaces.is_synced(SERVED) and namespaces.is_synced(DELETED), "both are listed")
        await asyncio.to_thread(rights.run, "kubectl", "delete", "namespace", DELETED)
        for reflector in caches.list_reflectors():  # as at the end of the watches, after five minutes
            await reflector.refresh()
        assert (namespaces.get_state(DELETED), namespaces.is_synced(SERVED)) == (ListState.FORBIDDEN, True)
        await asyncio.to_thread(rights.make_namespaces, DELETED)
        await asyncio.to_thread(rights.run, "kubectl", "apply", "-f", "-", stdin=role_objects(rights, DELETED))
        await asyncio.to_thread(rights.run, "kubectl", "apply", "-f", "-", stdin=build_job_json("again", DELETED))
        for reflector in caches.list_reflectors():
            await reflector.refresh()
        await until(lambda: namespaces.is_synced(DELETED), "it is listed again")
        await until(
            lambda: set(caches.jobs.store.snapshot()) == {(SERVED, "stays"), (DELETED, "again")}, "the jobs are known"
        )
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await transport.close()
        # Streams of cancelled watches close over TLS, which ends after they do.
        await async_until(lambda: open_sockets() <= before, lambda: f"{open_sockets()} sockets, {before} before")

    asyncio.run(observe())
