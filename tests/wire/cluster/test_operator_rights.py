"""Every request of a job's life against the table of rights that the chart renders."""

import asyncio

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.api.objects import training_job
from tests.testing.api.token_issuer import ISSUER
from tests.testing.operator.rbac import RIGHTS, NamedAfter, Scope
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import Workers
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from trainium_operator.cluster.api.resources import ALL, CLAIMING, DEPLOYMENTS, GANGS, JOBS, QUEUEING, SECRETS
from trainium_operator.settings import Settings

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "WATCH": "watch"}


def used_rights(cluster: FakeApiServer) -> set[tuple[str, str, str]]:
    """Return group, resource and verb of each request."""
    rights = set()
    for method, path in cluster.requests:
        if path in cluster.issuer.documents():
            rights.add(("", path, "get"))
            continue
        parts = path.strip("/").split("/")
        group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
        rest = rest[2:] if rest[0] == "namespaces" else rest
        verb = VERBS.get(method) or ("get" if len(rest) > 1 else "list")
        resource = rest[0] if len(rest) < 3 else f"{rest[0]}/{rest[2]}"
        rights.add((group, resource, verb))
        if method == "PATCH" and "/" not in resource and resource == "configmaps":
            rights.add((group, resource, "create"))  # an apply creates missing objects
    return rights


@in_virtual_time
async def test_the_operator_uses_only_the_listed_rights() -> None:
    cluster = FakeApiServer(wall_clock)
    cluster.add(SECRETS, {"metadata": {"name": "trainium-operator-coordinator-tls", "namespace": "system"}})
    cluster.add(DEPLOYMENTS, {"metadata": {"name": "trainium-operator", "namespace": "system"}})
    cluster.add(JOBS, training_job(spares=1))
    process = OperatorProcess(cluster, settings=Settings(deployment="trainium-operator"))
    workers = Workers(cluster, nodes=4, total_steps=20)
    workers.operator = process
    await process.runtime.elector.acquire()
    holding = asyncio.create_task(process.runtime.hold())
    await process.runtime.certificate_keeper.refresh(write=True)
    await process.runtime.token_verifier.refresh()
    await process.start()
    running = asyncio.create_task(workers.run())
    done = lambda: cluster.get(JOBS, "default", "llama").get("status", {}).get("phase") == "Completed"  # noqa: E731
    await until(done, "completed", 300)
    cluster.change(JOBS, "default", "llama", lambda raw: raw["metadata"].update(labels={"a": "b"}))
    await asyncio.sleep(5)
    for task in (running, holding):
        task.cancel()
    await process.kill()
    granted = {(right.group, right.resource, verb) for right in RIGHTS for verb in right.verbs}
    assert used_rights(cluster) <= granted
    assert ("", "secrets", "update") in used_rights(cluster)
    assert ("", "/openid/v1/jwks", "get") in used_rights(cluster)
    assert ("apps", "deployments", "get") in used_rights(cluster)
    assert ("trainium.dev", "trainingjobs/status", "patch") in used_rights(cluster)


def test_the_listed_rights_are_narrow() -> None:
    known = GANGS | {(resource.group, resource.plural) for resource in (*ALL, *QUEUEING, *CLAIMING)}
    for right in RIGHTS:
        assert "*" not in (right.group, right.resource, *right.verbs)
        assert right.resource in ISSUER.documents() or (right.group, right.resource.partition("/")[0]) in known
        assert right.reason
        if right.resource in ("secrets", "leases"):
            assert right.scope is Scope.OWN or right.named_after is NamedAfter.RELEASES or right.verbs == ("create",)
        if right.resource == "secrets":
            assert right.named_after
        if right.resource == "nodes" and right.scope is Scope.TAINTS:
            assert right.verbs == ("patch",)
        elif right.resource == "nodes":
            assert set(right.verbs) == {"get", "list", "watch"}
    assert not any(right.resource.startswith("pods/") for right in RIGHTS)
