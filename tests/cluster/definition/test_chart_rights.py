"""Roles, bindings and Services of the chart: exactly the rights that the operator uses, in the namespaces it serves."""

import pytest

from tests.cluster.definition.conftest import Api
from tests.cluster.definition.rendered_chart import EVERYTHING, NAME, granted_rights, render_chart
from tests.testing.operator.rbac import RIGHTS, NamedAfter, Scope

pytestmark = pytest.mark.cluster

JOB_SCOPES = (Scope.WATCHED, Scope.NETWORK_POLICIES)
"""Rights in each served namespace, with the default values."""


def needed_rights(*scopes: Scope) -> set[tuple[str, str, str, str]]:
    names = {
        NamedAfter.ANY: "",
        NamedAfter.LEASE: NAME,
        NamedAfter.TLS_SECRET: f"{NAME}-coordinator-tls",
        NamedAfter.MEMORY: f"{NAME}-quarantine",
        NamedAfter.DEPLOYMENT: NAME,
        NamedAfter.CLUSTER: "kube-system",
        NamedAfter.RELEASES: "trainium-operators",
    }
    return {
        (right.group, right.resource, verb, names[right.named_after])
        for right in RIGHTS
        if right.scope in scopes
        for verb in right.verbs
    }


def test_the_chart_grants_exactly_the_rights_that_the_operator_uses(api: Api) -> None:
    chart = render_chart(api)
    assert chart.rights("ClusterRole") == needed_rights(Scope.CLUSTER, *JOB_SCOPES)
    assert chart.rights("Role") == needed_rights(Scope.OWN)
    registration = chart.find("Role", "releases")
    assert registration["metadata"]["namespace"] == "kube-system"
    assert granted_rights(registration) == needed_rights(Scope.RELEASES)
    assert chart.find("Role")["metadata"]["namespace"] == "system"


@pytest.mark.parametrize(
    ("settings", "served"),
    [
        ("watchNamespace=training", ["training"]),
        ("watchNamespaces={training,research}", ["training", "research"]),
        ("watchNamespaces={training},watchNamespace=training", ["training"]),
    ],
)
def test_rights_to_jobs_are_limited_to_listed_namespaces(api: Api, settings: str, served: list[str]) -> None:
    chart = render_chart(api, settings)
    assert chart.rights("ClusterRole") == needed_rights(Scope.CLUSTER)
    roles = chart.list_named("Role", "jobs")
    assert [role["metadata"]["namespace"] for role in roles] == served
    assert all(granted_rights(role) == needed_rights(*JOB_SCOPES) for role in roles)
    bindings = chart.list_named("RoleBinding", "jobs")
    assert [binding["metadata"]["namespace"] for binding in bindings] == served
    assert all(binding["subjects"][0]["namespace"] == "system" for binding in bindings)
    assert list(chart.settings.namespaces) == served


@pytest.mark.parametrize(
    ("role", "setting", "rights", "switch"),
    [
        ("kueue", "kueue.enabled=true", (Scope.KUEUE, Scope.KUEUE_CLUSTER), "kueue"),
        ("dra", "dra.enabled=true", (Scope.DRA, Scope.DRA_CLUSTER), "dra"),
        ("taints", "quarantine.taintNodes=true", (Scope.TAINTS,), "taint_nodes"),
    ],
)
def test_optional_rights_are_granted_only_when_enabled(
    api: Api, role: str, setting: str, rights: tuple[Scope, ...], switch: str
) -> None:
    assert not render_chart(api).has("ClusterRole", role)
    chart = render_chart(api, setting)
    assert chart.rights("ClusterRole", role) == needed_rights(*rights)
    assert chart.find("ClusterRoleBinding", role)["subjects"][0]["namespace"] == "system"
    assert getattr(chart.settings, switch)


@pytest.mark.parametrize(
    ("role", "settings", "job_scope", "cluster_scope"),
    [
        ("kueue", "kueue.enabled=true,watchNamespace=training", Scope.KUEUE, Scope.KUEUE_CLUSTER),
        ("kueue", "kueue.enabled=true,watchNamespaces={training}", Scope.KUEUE, Scope.KUEUE_CLUSTER),
        ("dra", "dra.enabled=true,watchNamespaces={training}", Scope.DRA, Scope.DRA_CLUSTER),
    ],
)
def test_optional_rights_are_limited_to_listed_namespaces(
    api: Api, role: str, settings: str, job_scope: Scope, cluster_scope: Scope
) -> None:
    chart = render_chart(api, settings)
    assert chart.rights("ClusterRole", role) == needed_rights(cluster_scope)
    assert chart.rights("Role", "jobs") == needed_rights(*JOB_SCOPES, job_scope)


def test_network_policies_of_jobs_admit_pods_of_the_chart_and_values(api: Api) -> None:
    first = "networkPolicy.jobs.ingress[0]"
    chart = render_chart(api, f"{first}.from[0].podSelector.matchLabels.app=a b,{first}.ports[0].port=6006")
    ingress = chart.settings.build_worker_ingress("system")
    assert ingress is not None
    assert len(ingress.operator_labels) == 3
    assert ingress.operator_labels.items() <= chart.pod["metadata"]["labels"].items()
    rule = {"from": [{"podSelector": {"matchLabels": {"app": "a b"}}}], "ports": [{"port": 6006}]}
    assert ingress.rules == (rule,)


def test_rights_to_network_policies_are_granted_only_when_enabled(api: Api) -> None:
    chart = render_chart(api, "networkPolicy.jobs.create=false")
    assert chart.rights("ClusterRole") == needed_rights(Scope.CLUSTER, Scope.WATCHED)
    assert chart.settings.build_worker_ingress("system") is None
    served = render_chart(api, "networkPolicy.jobs.create=false,watchNamespaces={training}")
    assert served.rights("Role", "jobs") == needed_rights(Scope.WATCHED)


def test_access_reviews_are_granted_only_for_https(api: Api) -> None:
    names = {document["metadata"]["name"] for document in render_chart(api).objects}
    assert not {f"{NAME}-readers", f"{NAME}-metrics-reader", f"{NAME}-https"} & names
    chart = render_chart(api, "metrics.secure=true")
    assert chart.rights("ClusterRole", "readers") == needed_rights(Scope.READERS)
    assert chart.find("ClusterRoleBinding", "readers")["subjects"][0]["namespace"] == "system"
    assert chart.find("ClusterRole", "metrics-reader")["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    assert not chart.has("ClusterRoleBinding", "metrics-reader")
    named = render_chart(api, "metrics.secure=true,metrics.readers[0].kind=User,metrics.readers[0].name=ann")
    assert named.find("ClusterRoleBinding", "metrics-reader")["subjects"] == [{"kind": "User", "name": "ann"}]


def test_pages_of_jobs_add_a_service_and_no_right_to_metrics(api: Api) -> None:
    chart = render_chart(api, "ui.enabled=true,networkPolicy.create=true,networkPolicy.uiFrom[0].podSelector.a=b")
    assert chart.rights("ClusterRole", "readers") == needed_rights(Scope.READERS)
    assert not chart.has("ClusterRole", "metrics-reader")
    assert (chart.settings.ui, chart.settings.secure_metrics) == (True, False)
    service = chart.find("Service", "ui")
    assert service["metadata"]["name"] == chart.settings.ui_service
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (443, "https")
    rules = chart.find("NetworkPolicy")["spec"]["ingress"]
    opened = [({port["port"] for port in rule["ports"]}, rule.get("from")) for rule in rules[2:]]
    assert opened == [({"metrics"}, None), ({"https"}, [{"podSelector": {"a": "b"}}])]

    few = render_chart(api, "ui.enabled=true,watchNamespaces={training},https.issuer.name=ca")
    assert few.rights("Role", "jobs") == needed_rights(*JOB_SCOPES)
    assert f"{NAME}-ui.system.svc" in few.find("Certificate", "https")["spec"]["dnsNames"]


def test_no_role_of_the_chart_has_a_wildcard(api: Api) -> None:
    roles = render_chart(api, EVERYTHING).list_kind("Role", "ClusterRole")
    assert {role["kind"] for role in roles} == {"Role", "ClusterRole"}
    for role in roles:
        assert not [right for right in granted_rights(role) if "*" in right]
        assert not [rule for rule in role["rules"] if "*" in rule.get("nonResourceURLs", ())]
