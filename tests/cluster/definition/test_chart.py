"""The chart as the real helm renders and installs it, the plain install, and the examples."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import generate
from tests.cluster.definition.conftest import Api
from tests.testing.cluster.installed import make_namespace
from tests.testing.cluster.marks import SELECTOR
from tests.testing.operator.rbac import RIGHTS, NamedAfter, Scope
from tests.testing.suite.timeouts import until
from trainium_contract.accelerators import INSTANCES
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_operator.coordinator.certificates import list_server_names
from trainium_operator.plan.features.network_policy import build_network_policy
from trainium_operator.plan.model.observed import JobView, WorkerIngress
from trainium_operator.settings import Settings, parse_settings

pytestmark = pytest.mark.cluster

RELEASE = "checked"
NAME = f"{RELEASE}-trainium-operator"
ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/trainium-operator"
EXAMPLES = sorted(path.name for path in (ROOT / "manifests/examples").glob("*.yaml"))
EVERYTHING = (
    "replicas=3,lease.durationSeconds=6,lease.renewDeadlineSeconds=4,lease.retrySeconds=1,networkPolicy.create=true,metrics.serviceMonitor.create=true,metrics.podMonitor.create=true,"
    "metrics.prometheusRule.create=true,metrics.dashboards.create=true,metrics.namedJobs=50,"
    "metrics.secure=true,metrics.tokenSecret.name=scraper,https.issuer.name=ca,ui.enabled=true,"
    "watchNamespaces={training,research},trainerImagePullSecrets={one,two},image.tag=v7,extraArgs={--log-level=debug},"
    "quarantine.keepMemory=true,workerLogFormat=json"
)


JOB_SCOPES = (Scope.WATCHED, Scope.NETWORK_POLICIES)
"""Rights in each served namespace, with the default values."""
_templates: dict[tuple[str, str], str] = {}


def render_chart(api: Api, settings: str = "replicas=2") -> list[dict[str, Any]]:
    key = (api.chart, settings)
    if key not in _templates:
        _templates[key] = api.helm("template", RELEASE, api.chart, "--namespace", "system", "--set", settings)
    return [document for document in yaml.load_all(_templates[key], yaml.CSafeLoader) if document]


def find(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (match,) = [document for document in documents if document["kind"] == kind and document["metadata"]["name"] == name]
    return match


def settings_of(documents: list[dict[str, Any]]) -> Settings:
    """Return the settings of the operator as the Deployment starts it."""
    (container,) = find(documents, "Deployment", NAME)["spec"]["template"]["spec"]["containers"]
    return parse_settings(container["args"])


def granted_rights(role: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    """Return each (group, resource, verb, name) of a role; an empty name stands for all names."""
    return {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule.get("apiGroups", [""])
        for resource in rule.get("resources") or rule["nonResourceURLs"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


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
    documents = render_chart(api)
    assert granted_rights(find(documents, "ClusterRole", NAME)) == needed_rights(Scope.CLUSTER, *JOB_SCOPES)
    assert granted_rights(find(documents, "Role", NAME)) == needed_rights(Scope.OWN)
    registration = find(documents, "Role", f"{NAME}-releases")
    assert registration["metadata"]["namespace"] == "kube-system"
    assert granted_rights(registration) == needed_rights(Scope.RELEASES)
    assert find(documents, "Role", NAME)["metadata"]["namespace"] == "system"


@pytest.mark.parametrize(
    ("settings", "served"),
    [
        ("watchNamespace=training", ["training"]),
        ("watchNamespaces={training,research}", ["training", "research"]),
        ("watchNamespaces={training},watchNamespace=training", ["training"]),
    ],
)
def test_rights_to_jobs_are_limited_to_listed_namespaces(api: Api, settings: str, served: list[str]) -> None:
    documents = render_chart(api, settings)
    assert granted_rights(find(documents, "ClusterRole", NAME)) == needed_rights(Scope.CLUSTER)
    roles = [
        document
        for document in documents
        if document["kind"] == "Role" and document["metadata"]["name"] == f"{NAME}-jobs"
    ]
    assert [role["metadata"]["namespace"] for role in roles] == served
    assert all(granted_rights(role) == needed_rights(*JOB_SCOPES) for role in roles)
    bindings = [
        document
        for document in documents
        if document["kind"] == "RoleBinding" and document["metadata"]["name"] == f"{NAME}-jobs"
    ]
    assert [binding["metadata"]["namespace"] for binding in bindings] == served
    assert all(binding["subjects"][0]["namespace"] == "system" for binding in bindings)
    assert list(settings_of(documents).namespaces) == served


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
    assert f"{NAME}-{role}" not in [
        document["metadata"]["name"] for document in render_chart(api) if document["kind"] == "ClusterRole"
    ]
    documents = render_chart(api, setting)
    assert granted_rights(find(documents, "ClusterRole", f"{NAME}-{role}")) == needed_rights(*rights)
    assert find(documents, "ClusterRoleBinding", f"{NAME}-{role}")["subjects"][0]["namespace"] == "system"
    assert getattr(settings_of(documents), switch)


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
    documents = render_chart(api, settings)
    assert granted_rights(find(documents, "ClusterRole", f"{NAME}-{role}")) == needed_rights(cluster_scope)
    assert granted_rights(find(documents, "Role", f"{NAME}-jobs")) == needed_rights(*JOB_SCOPES, job_scope)


def test_network_policies_of_jobs_admit_pods_of_the_chart_and_values(api: Api) -> None:
    first = "networkPolicy.jobs.ingress[0]"
    documents = render_chart(api, f"{first}.from[0].podSelector.matchLabels.app=a b,{first}.ports[0].port=6006")
    pods = find(documents, "Deployment", NAME)["spec"]["template"]
    ingress = parse_settings(pods["spec"]["containers"][0]["args"]).build_worker_ingress("system")
    assert ingress is not None
    assert len(ingress.operator_labels) == 3
    assert ingress.operator_labels.items() <= pods["metadata"]["labels"].items()
    rule = {"from": [{"podSelector": {"matchLabels": {"app": "a b"}}}], "ports": [{"port": 6006}]}
    assert ingress.rules == (rule,)


def test_rights_to_network_policies_are_granted_only_when_enabled(api: Api) -> None:
    documents = render_chart(api, "networkPolicy.jobs.create=false")
    assert granted_rights(find(documents, "ClusterRole", NAME)) == needed_rights(Scope.CLUSTER, Scope.WATCHED)
    assert settings_of(documents).build_worker_ingress("system") is None
    served = render_chart(api, "networkPolicy.jobs.create=false,watchNamespaces={training}")
    assert granted_rights(find(served, "Role", f"{NAME}-jobs")) == needed_rights(Scope.WATCHED)


def test_access_reviews_are_granted_only_for_https(api: Api) -> None:
    names = [document["metadata"]["name"] for document in render_chart(api)]
    assert not {f"{NAME}-readers", f"{NAME}-metrics-reader", f"{NAME}-https"} & set(names)
    documents = render_chart(api, "metrics.secure=true")
    assert granted_rights(find(documents, "ClusterRole", f"{NAME}-readers")) == needed_rights(Scope.READERS)
    assert find(documents, "ClusterRoleBinding", f"{NAME}-readers")["subjects"][0]["namespace"] == "system"
    assert find(documents, "ClusterRole", f"{NAME}-metrics-reader")["rules"] == [
        {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}
    ]
    assert f"{NAME}-metrics-reader" not in [
        document["metadata"]["name"] for document in documents if "Binding" in document["kind"]
    ]
    named = render_chart(api, "metrics.secure=true,metrics.readers[0].kind=User,metrics.readers[0].name=ann")
    assert find(named, "ClusterRoleBinding", f"{NAME}-metrics-reader")["subjects"] == [{"kind": "User", "name": "ann"}]


def test_pages_of_jobs_add_a_service_and_no_right_to_metrics(api: Api) -> None:
    documents = render_chart(api, "ui.enabled=true,networkPolicy.create=true,networkPolicy.uiFrom[0].podSelector.a=b")
    assert granted_rights(find(documents, "ClusterRole", f"{NAME}-readers")) == needed_rights(Scope.READERS)
    assert f"{NAME}-metrics-reader" not in [document["metadata"]["name"] for document in documents]
    parsed = settings_of(documents)
    assert (parsed.ui, parsed.secure_metrics) == (True, False)
    (port,) = find(documents, "Service", parsed.ui_service)["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (443, "https")
    rules = find(documents, "NetworkPolicy", NAME)["spec"]["ingress"]
    opened = [({port["port"] for port in rule["ports"]}, rule.get("from")) for rule in rules[2:]]
    assert opened == [({"metrics"}, None), ({"https"}, [{"podSelector": {"a": "b"}}])]

    few = render_chart(api, "ui.enabled=true,watchNamespaces={training},https.issuer.name=ca")
    assert granted_rights(find(few, "Role", f"{NAME}-jobs")) == needed_rights(*JOB_SCOPES)
    assert f"{NAME}-ui.system.svc" in find(few, "Certificate", f"{NAME}-https")["spec"]["dnsNames"]


def endpoint(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    spec = find(documents, kind, NAME)["spec"]
    (scraped,) = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    return dict(scraped)


def test_a_monitor_scrapes_over_https_with_certificate_and_token(api: Api) -> None:
    monitors = "metrics.serviceMonitor.create=true,metrics.podMonitor.create=true"
    plain = render_chart(api, monitors)
    assert endpoint(plain, "ServiceMonitor") == {"port": "metrics", "path": "/metrics", "interval": "30s"}
    (port,) = find(plain, "Service", f"{NAME}-metrics")["spec"]["ports"]
    assert port["targetPort"] == "metrics"

    self_signed = render_chart(api, "metrics.secure=true,metrics.serviceMonitor.create=true")
    endpoint_spec = endpoint(self_signed, "ServiceMonitor")
    assert (endpoint_spec["port"], endpoint_spec["scheme"]) == ("https", "https")
    assert endpoint_spec["bearerTokenFile"] == "/var/run/secrets/kubernetes.io/serviceaccount/token"
    assert endpoint_spec["tlsConfig"]["serverName"] in list_server_names(f"{NAME}-coordinator", "system")
    assert endpoint_spec["tlsConfig"]["ca"]["secret"] == {"name": f"{NAME}-coordinator-tls", "key": "ca.crt"}
    (port,) = find(self_signed, "Service", f"{NAME}-metrics")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (8444, "https")

    issued = render_chart(api, f"metrics.secure=true,{monitors},metrics.tokenSecret.name=scraper,https.issuer.name=ca")
    certificate = find(issued, "Certificate", f"{NAME}-https")["spec"]
    for kind in ("ServiceMonitor", "PodMonitor"):
        endpoint_spec = endpoint(issued, kind)
        assert "bearerTokenFile" not in endpoint_spec
        assert endpoint_spec["authorization"] == {"credentials": {"name": "scraper", "key": "token"}}
        assert endpoint_spec["tlsConfig"]["serverName"] in certificate["dnsNames"]
        assert endpoint_spec["tlsConfig"]["ca"]["secret"]["name"] == certificate["secretName"]
    template = find(issued, "Deployment", NAME)["spec"]["template"]["spec"]
    (container,) = template["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "https"]
    (volume,) = [volume for volume in template["volumes"] if volume["name"] == "https"]
    assert parse_settings(container["args"]).https_certificate == mount["mountPath"]
    assert volume["secret"]["secretName"] == certificate["secretName"]


def test_a_pod_monitor_without_a_token_is_refused(api: Api) -> None:
    settings = "metrics.secure=true,metrics.podMonitor.create=true"
    done = api.run("helm", "template", RELEASE, api.chart, "--set", settings)
    assert done.returncode != 0
    assert "needs metrics.tokenSecret.name" in done.stderr


def test_no_role_of_the_chart_has_a_wildcard(api: Api) -> None:
    roles = [document for document in render_chart(api, EVERYTHING) if document["kind"] in {"Role", "ClusterRole"}]
    assert {role["kind"] for role in roles} == {"Role", "ClusterRole"}
    for role in roles:
        assert not [right for right in granted_rights(role) if "*" in right]
        assert not [rule for rule in role["rules"] if "*" in rule.get("nonResourceURLs", ())]


def test_alerts_and_dashboards_equal_their_files(api: Api) -> None:
    assert not [document for document in render_chart(api) if document["apiVersion"].startswith("monitoring.")]
    documents = render_chart(api, f"{EVERYTHING},metrics.prometheusRule.runbook=https://wiki.example/runbook")
    spec = find(documents, "PrometheusRule", NAME)["spec"]
    written = (CHART / "files/alerts.yaml").read_text().replace("RUNBOOK#", "https://wiki.example/runbook#")
    assert spec == yaml.safe_load(written)
    for path in (CHART / "files/dashboards").iterdir():
        board = find(documents, "ConfigMap", f"{NAME}-dashboard-{path.stem}")
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(board["data"][f"trainium-{path.name}"]) == json.loads(path.read_text())
    selector = find(documents, "Deployment", NAME)["spec"]["selector"]
    for kind in ("PodMonitor", "ServiceMonitor"):
        assert find(documents, kind, NAME)["spec"]["selector"] == selector


@pytest.mark.parametrize("settings", ["replicas=1", EVERYTHING])
def test_the_operator_accepts_the_arguments_of_the_chart(api: Api, settings: str) -> None:
    deployment = find(render_chart(api, settings), "Deployment", NAME)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    parsed = parse_settings(container["args"])
    assert parsed.lease_name == NAME
    assert parsed.lease_duration == (6 if settings == EVERYTHING else 4)
    assert parsed.lease_renew_deadline == (4 if settings == EVERYTHING else 3)
    assert parsed.lease_retry == 1
    assert parsed.coordinator_service == f"{NAME}-coordinator"
    assert parsed.secret_name == f"{NAME}-coordinator-tls"
    assert parsed.memory_name == f"{NAME}-quarantine"
    assert parsed.deployment == NAME
    assert parsed.keep_memory == (settings == EVERYTHING)
    assert parsed.worker_log_format == ("json" if settings == EVERYTHING else "text")
    assert not parsed.taint_nodes
    assert parsed.trainer_image == "trainium-trainer:0.1.0"
    assert parsed.namespaces == (("training", "research") if settings == EVERYTHING else ())
    assert parsed.named_jobs == (50 if settings == EVERYTHING else 0)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert parsed.secure_metrics == (settings == EVERYTHING)
    https = {"https": parsed.https_port} if parsed.secure_metrics else {}
    assert ports == {"coordinator": parsed.coordinator_port, "metrics": parsed.metrics_port, **https}


def test_the_coordinator_service_selects_all_replicas(api: Api) -> None:
    documents = render_chart(api)
    service = find(documents, "Service", f"{NAME}-coordinator")["spec"]
    labels = find(documents, "Deployment", NAME)["spec"]["template"]["metadata"]["labels"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"].items() <= labels.items()


def test_optional_objects_are_rendered_when_enabled(api: Api) -> None:
    optional = {"NetworkPolicy", "ServiceMonitor"}
    assert not optional & {document["kind"] for document in render_chart(api)}
    assert optional <= {document["kind"] for document in render_chart(api, EVERYTHING)}


def test_the_budget_keeps_one_of_several_replicas_and_never_blocks_a_drain_of_one(api: Api) -> None:
    budget = find(render_chart(api), "PodDisruptionBudget", NAME)
    assert budget["spec"]["minAvailable"] == 1
    assert "PodDisruptionBudget" not in {document["kind"] for document in render_chart(api, "replicas=1")}


def test_operator_pods_prefer_other_nodes_and_tolerate_lost_nodes_briefly(api: Api) -> None:
    pod = find(render_chart(api), "Deployment", NAME)["spec"]["template"]
    (machines,) = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (rule,) = machines["preference"]["matchExpressions"]
    assert (rule["operator"], set(rule["values"])) == ("NotIn", set(INSTANCES))
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {toleration["key"]: toleration["tolerationSeconds"] for toleration in pod["spec"]["tolerations"]} == {
        "node.kubernetes.io/not-ready": 10,
        "node.kubernetes.io/unreachable": 10,
    }
    customized = find(render_chart(api, "affinity.podAffinity.x=y,tolerations[0].key=mine"), "Deployment", NAME)
    assert customized["spec"]["template"]["spec"]["affinity"] == {"podAffinity": {"x": "y"}}
    assert customized["spec"]["template"]["spec"]["tolerations"] == [*pod["spec"]["tolerations"], {"key": "mine"}]


def selectors(document: Any) -> Iterator[dict[str, str]]:
    """Yield every label selector of an object, at any depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in {"matchLabels", "selector"} and isinstance(value, dict):
                yield {name: each for name, each in value.items() if isinstance(each, str)}
            yield from selectors(value)
    elif isinstance(document, list):
        for item in document:
            yield from selectors(item)


@pytest.mark.parametrize("more", ["replicas=2", EVERYTHING, "kueue.enabled=true,dra.enabled=true,ui.enabled=true"])
def test_common_labels_are_on_all_objects_and_in_no_selector(api: Api, more: str) -> None:
    common_labels = {"cost": "centre", "team.example/name": "ml"}
    documents = render_chart(api, rf"{more},commonLabels.cost=centre,commonLabels.team\.example/name=ml")
    assert len(documents) == len(render_chart(api, more))
    for document in documents:
        assert common_labels.items() <= document["metadata"]["labels"].items(), document["metadata"]["name"]
        if "template" in document.get("spec", {}):
            assert common_labels.items() <= document["spec"]["template"]["metadata"]["labels"].items()
    all_selectors = [selector for document in documents for selector in selectors(document.get("spec", {}))]
    assert len(all_selectors) >= 4
    assert not [selector for selector in all_selectors if common_labels.keys() & selector.keys()]


def test_a_label_of_an_object_overrides_a_common_label(api: Api) -> None:
    monitor = "metrics.podMonitor.create=true,metrics.podMonitor.labels.team=monitoring"
    documents = render_chart(api, f"commonLabels.team=ml,podLabels.team=operators,{monitor}")
    assert find(documents, "Deployment", NAME)["metadata"]["labels"]["team"] == "ml"
    assert find(documents, "Deployment", NAME)["spec"]["template"]["metadata"]["labels"]["team"] == "operators"
    assert find(documents, "PodMonitor", NAME)["metadata"]["labels"]["team"] == "monitoring"


def test_the_definition_is_kept_and_can_be_left_out(api: Api) -> None:
    definition = find(render_chart(api), "CustomResourceDefinition", "trainingjobs.trainium.dev")
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    kinds = {document["kind"] for document in render_chart(api, "crds.install=false")}
    assert "CustomResourceDefinition" not in kinds
    assert (
        "annotations"
        not in find(render_chart(api, "crds.keep=false"), "CustomResourceDefinition", definition["metadata"]["name"])[
            "metadata"
        ]
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("repliccas=2", "additional properties 'repliccas' not allowed"),
        ("metrics.prot=9", "additional properties 'prot' not allowed"),
        ("image.pullPolicy=Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
        ("replicas=-1", "minimum: got -1, want 0"),
        ("watchNamespace=Training", "does not match pattern"),
        ("watchNamespaces={a,B}", "does not match pattern"),
        ("commonLabels.cost=a b", "does not match pattern"),
        ("lease.durationSeconds=2", "minimum: got 2, want 3"),
        ("quarantine.taintNodes=true,watchNodes=false", "quarantine.taintNodes needs watchNodes"),
        ("lease.durationSeconds=3", "lease.renewDeadlineSeconds must be at most four fifths of lease.durationSeconds"),
        (
            "lease.retrySeconds=6",
            "lease.retrySeconds must be at most half of lease.renewDeadlineSeconds (1.5), not 6",
        ),
        (r"commonLabels.app\.kubernetes\.io/name=mine", "invalid propertyName 'app.kubernetes.io/name'"),
    ],
)
def test_an_invalid_value_is_refused(api: Api, settings: str, sentence: str) -> None:
    done = api.run("helm", "template", RELEASE, api.chart, "--set", settings)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_a_parent_chart_installs_it_on_a_condition(api: Api, tmp_path: Path) -> None:
    dependency = {"name": "trainium-operator", "version": "0.1.0", "condition": "trainium-operator.enabled"}
    parent = {"apiVersion": "v2", "name": "platform", "version": "0.1.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(json.dumps(parent))
    shutil.copytree(CHART, tmp_path / "charts/trainium-operator")

    def render(*settings: str) -> str:
        given = ",".join(f"trainium-operator.{each}" for each in settings)
        return api.helm("template", "platform", str(tmp_path), "--set", given)

    assert "kind: Deployment" in render("enabled=true", "trainerUser=null")
    assert "--worker-user=1000" not in render("enabled=true", "trainerUser=null")
    assert "kind: Deployment" not in render("enabled=false")


def paths_of_values(required: bool, values: Any = None, schema: Any = None, path: str = "") -> Iterator[str]:
    """Return the paths of the values that the schema requires, or of the others, each below required ones only."""
    values = yaml.safe_load((CHART / "values.yaml").read_text()) if values is None else values
    schema = json.loads((CHART / "values.schema.json").read_text()) if schema is None else schema
    for name, value in values.items():
        if (name in schema.get("required", ())) == required:
            yield path + name
        if isinstance(value, dict) and "properties" in schema["properties"].get(name, {}):
            yield from paths_of_values(required, value, schema["properties"][name], f"{path}{name}.")


@pytest.mark.parametrize("settings", ["replicas=2", EVERYTHING])
def test_a_value_that_may_be_null_leaves_out_what_it_sets(crd_api: Api, settings: str) -> None:
    paths = [path for path in paths_of_values(required=False) if f"{path}=" not in settings]
    documents = render_chart(crd_api, ",".join((settings, *(f"{path}=null" for path in paths))))
    settings_of(documents)
    checked = [
        document | {"metadata": document["metadata"] | {"namespace": crd_api.namespace}}
        for document in documents
        if "namespace" in document["metadata"] and not document["apiVersion"].startswith(("monitoring", "cert-manager"))
    ]
    apply = ("kubectl", "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    done = crd_api.run(*apply, "-f", "-", stdin=yaml.dump_all(checked))
    assert done.stderr == ""


@pytest.mark.parametrize("path", list(paths_of_values(required=True)))
def test_a_value_that_is_needed_is_refused_where_it_is_null(api: Api, path: str) -> None:
    done = api.run("helm", "template", RELEASE, api.chart, "--set", f"{path}=null")
    assert done.returncode != 0
    assert f"missing property '{path.rpartition('.')[2]}'" in done.stderr


def test_no_user_is_set_where_the_platform_assigns_it(api: Api) -> None:
    assert settings_of(render_chart(api, "trainerUser=null")).worker_user is None
    assert settings_of(render_chart(api, "trainerUser=1000680000")).worker_user == 1000680000


def test_the_chart_passes_a_strict_lint(api: Api) -> None:
    api.helm("lint", "--strict", api.chart)


def test_the_plain_install_is_up_to_date(api: Api) -> None:
    helm = shutil.which("helm", path=api.variables.get("PATH"))
    assert helm
    assert generate.find_stale(ROOT, helm) == [], "run `make generate`"


def test_all_pods_satisfy_the_restricted_standard(crd_api: Api) -> None:
    template = find(render_chart(crd_api), "Deployment", NAME)["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "labels": template["metadata"]["labels"]},
        "spec": template["spec"] | {"serviceAccountName": "default", "automountServiceAccountToken": False},
    }
    test_pod = find(render_chart(crd_api), "Pod", f"{NAME}-test")
    helm_test_pod = test_pod | {"metadata": {"name": "test", "labels": test_pod["metadata"]["labels"]}}
    make_namespace(crd_api.access, f"{RELEASE}-restricted", **{"pod-security.kubernetes.io/enforce": "restricted"})
    try:
        create = ("kubectl", "-n", f"{RELEASE}-restricted", "create", "--dry-run=server", "-f", "-")
        for manifest in (pod, helm_test_pod):
            done = crd_api.run(*create, stdin=json.dumps(manifest))
            assert "violates PodSecurity" not in done.stderr
            assert done.returncode == 0, done.stderr
    finally:
        crd_api.delete_namespaces(f"{RELEASE}-restricted")


@pytest.mark.parametrize("settings", ["replicas=2", EVERYTHING])
def test_the_pod_of_helm_test_needs_no_rights(api: Api, settings: str) -> None:
    documents = render_chart(api, settings)
    pod = find(documents, "Pod", f"{NAME}-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod["spec"]
    deployment = find(documents, "Deployment", NAME)["spec"]
    (container,), (running,) = pod["spec"]["containers"], deployment["template"]["spec"]["containers"]
    assert (container["image"], container["command"]) == (running["image"], running["command"])
    parsed = parse_settings(running["args"])
    assert dict(argument.removeprefix("--").split("=") for argument in container["args"][1:]) == {
        "service": f"{parsed.coordinator_service}.system.svc",
        "authority": "/etc/trainium-operator/coordinator/ca.crt",
        "replicas": str(deployment["replicas"]),
        "coordinator-port": str(parsed.coordinator_port),
        "probe-port": str(parsed.metrics_port),
    }
    assert f"{parsed.coordinator_service}.system.svc" in list_server_names(parsed.coordinator_service, "system")
    (secret,) = [volume["secret"] for volume in pod["spec"]["volumes"]]
    assert (secret["secretName"], secret["items"]) == (parsed.secret_name, [{"key": "ca.crt", "path": "ca.crt"}])


@pytest.mark.parametrize("settings", ["replicas=2", EVERYTHING])
def test_the_pod_of_helm_test_matches_only_its_network_policy(api: Api, settings: str) -> None:
    documents = render_chart(api, settings)
    labels = find(documents, "Pod", f"{NAME}-test")["metadata"]["labels"].items()
    specs = {
        document["kind"]: document["spec"]
        for document in documents
        if document["kind"] != "NetworkPolicy" and "spec" in document
    }
    operator_selectors = [selector for spec in specs.values() for selector in selectors(spec) if selector]
    assert len(operator_selectors) >= 3
    assert not [selector for selector in operator_selectors if selector.items() <= labels]
    for policy in (document["spec"] for document in documents if document["kind"] == "NetworkPolicy"):
        assert not policy["podSelector"]["matchLabels"].items() <= labels
        (peer,) = policy["ingress"][1]["from"]
        assert peer["podSelector"]["matchLabels"].items() <= labels
        assert [port["port"] for port in policy["ingress"][1]["ports"]] == ["coordinator", "metrics"]


def test_helm_test_is_not_rendered_without_replicas(api: Api) -> None:
    assert "Pod" not in {document["kind"] for document in render_chart(api, "replicas=0")}


def test_an_upgrade_keeps_the_certificates_of_the_operator(crd_api: Api) -> None:
    settings = ["--namespace", crd_api.namespace, "--set", "crds.install=false"]
    secret = f"{NAME}-coordinator-tls"
    crd_api.helm("install", RELEASE, crd_api.chart, *settings, "--set", "replicas=0")
    try:
        written = json.loads(crd_api.kubectl("get", "secret", secret, "-o", "json"))
        assert "data" not in written
        crd_api.kubectl("replace", "-f", "-", stdin=json.dumps(written | {"data": {"ca.crt": "b3Vycw=="}}))
        crd_api.helm("upgrade", RELEASE, crd_api.chart, *settings, "--set", "replicas=0,logFormat=text")
        assert crd_api.kubectl("get", "secret", secret, "-o", "jsonpath={.data}") == '{"ca.crt":"b3Vycw=="}'
    finally:
        crd_api.helm("uninstall", RELEASE, "--namespace", crd_api.namespace)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_accepted(crd_api: Api, example: str) -> None:
    crd_api.kubectl("apply", "--dry-run=server", "-f", str(ROOT / "manifests/examples" / example))


def test_the_plain_install_applies(crd_api: Api) -> None:
    crd_api.make_namespaces("trainium-system")  # with the mark by which an interrupted session's leftovers are removed
    install = str(ROOT / generate.INSTALL)
    applied = crd_api.run("kubectl", "apply", "--server-side", "--force-conflicts", "-f", install)
    assert (applied.returncode, applied.stderr) == (0, "")
    documents = [document for document in yaml.load_all(Path(install).read_text(), yaml.CSafeLoader) if document]
    others = [item for item in documents if item["kind"] != "CustomResourceDefinition"]
    crd_api.access.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=yaml.safe_dump_all(others))


SERVICE_ACCOUNT = f"system:serviceaccount:system:{NAME}"
NAMESPACES = (f"{RELEASE}-tenant", "kube-system")


def owned_object(kind: str, name: str, namespace: str, **owner: Any) -> dict[str, Any]:
    """Return an object that a job owns, or one whose reference differs from that by `owner`."""
    reference = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "name": "llama", "uid": "u"}
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": {"trainium.dev/job-name": "llama"},
        "ownerReferences": [{**reference, "controller": True, **owner}],
    }
    if kind == "Pod":
        return {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": metadata,
            "spec": {"automountServiceAccountToken": False, "containers": [{"name": "c", "image": "i"}]},
        }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "data": {"a": "b"}}


@pytest.fixture(scope="module")
def restricted_api(crd_api: Api) -> Iterator[Api]:
    """Apply the chart's admission policy, and give its ServiceAccount all rights that roles can give."""
    crd_api.make_namespaces(NAMESPACES[0])
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    policy = [document for document in render_chart(crd_api) if document["kind"] in kinds]
    assert [item["kind"] for item in policy] == list(kinds)
    crd_api.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(policy))
    name = f"{RELEASE}-everything"
    crd_api.kubectl("create", "clusterrolebinding", name, "--clusterrole=cluster-admin", f"--user={SERVICE_ACCOUNT}")
    crd_api.kubectl("label", "clusterrolebinding", name, SELECTOR)
    # The API server applies a policy after a delay.
    probe = owned_object("ConfigMap", "probe", "kube-system")
    until(lambda: refusal_of_write(crd_api, probe, "create"), "the policy comes into force", 40, pause=0.5)
    yield crd_api
    for document in policy:
        crd_api.kubectl("delete", document["kind"], document["metadata"]["name"])
    crd_api.kubectl("delete", "clusterrolebinding", name)
    crd_api.delete_namespaces(NAMESPACES[0])


def refusal_of_write(api: Api, document: dict[str, Any], verb: str, *arguments: str) -> str:
    """Return the API server's refusal of a write as the operator; empty when it is accepted."""
    options = ("--as", SERVICE_ACCOUNT, "-n", document["metadata"]["namespace"])
    done = api.run("kubectl", verb, *options, *arguments, "-f", "-", stdin=json.dumps(document))
    return done.stderr if done.returncode else ""


def test_the_operator_cannot_adopt_foreign_objects(restricted_api: Api) -> None:
    tenant = NAMESPACES[0]
    foreign = owned_object("ConfigMap", "foreign", tenant)
    reference = foreign["metadata"].pop("ownerReferences")
    restricted_api.kubectl("-n", tenant, "create", "-f", "-", stdin=json.dumps(foreign))
    foreign["metadata"]["ownerReferences"] = reference
    assert "changes and deletes only" in refusal_of_write(restricted_api, foreign, "replace")


def test_the_operator_can_adopt_only_what_a_job_left(restricted_api: Api) -> None:
    tenant = NAMESPACES[0]
    left = owned_object("ConfigMap", "left", tenant)
    left["metadata"]["annotations"] = {"trainium.dev/job-uid": "earlier"}
    reference = left["metadata"].pop("ownerReferences")
    restricted_api.kubectl("-n", tenant, "create", "-f", "-", stdin=json.dumps(left))
    assert "writes only objects" in refusal_of_write(restricted_api, left, "replace")
    left["metadata"]["ownerReferences"] = reference
    assert refusal_of_write(restricted_api, left, "replace") == ""


def test_the_admission_policy_binds_only_the_operator(restricted_api: Api) -> None:
    restricted_api.make_namespaces("system")
    memory = owned_object("ConfigMap", f"{NAME}-quarantine", "system")
    memory["metadata"].pop("ownerReferences")
    assert refusal_of_write(restricted_api, memory, "create") == ""
    assert refusal_of_write(restricted_api, memory, "replace") == ""
    restricted_api.delete_namespaces("system")
    restricted_api.kubectl("-n", "kube-system", "create", "configmap", f"{RELEASE}-by-another-user", "--dry-run=server")


def test_the_operator_can_write_network_policies_only_for_jobs(restricted_api: Api) -> None:
    ingress = WorkerIngress(
        operator_namespace="system",
        operator_labels={"app.kubernetes.io/instance": RELEASE},
        rules=({"from": [{"namespaceSelector": {}}], "ports": [{"port": 6006}]},),
    )
    spec = TrainingJobSpec.model_validate({"workers": {"replicas": 2}, "trainer": {"steps": 4}})
    status = TrainingJobStatus()
    job = JobView(
        namespace=NAMESPACES[0],
        name="llama",
        uid="u",
        generation=1,
        deleting=False,
        spec=spec,
        status=status,
        created=0.0,
    )
    policy = build_network_policy(job, ingress)
    assert refusal_of_write(restricted_api, policy, "create", "--dry-run=server") == ""
    policy["metadata"].pop("ownerReferences")
    assert "only objects that a TrainingJob controls" in refusal_of_write(
        restricted_api, policy, "create", "--dry-run=server"
    )


def test_the_admission_policy_can_be_disabled(api: Api) -> None:
    kinds = {document["kind"] for document in render_chart(api, "admissionPolicy.create=false")}
    assert not [kind for kind in kinds if kind.startswith("ValidatingAdmission")]


def test_the_worker_template_reaches_the_operator_unchanged(api: Api) -> None:
    documents = render_chart(api, "workerTemplate.spec.priorityClassName=low,workerTemplate.metadata.labels.team=a\\,b")
    (container,) = find(documents, "Deployment", NAME)["spec"]["template"]["spec"]["containers"]
    (template,) = [
        variable["value"] for variable in container["env"] if variable["name"] == "TRAINIUM_OPERATOR_WORKER_TEMPLATE"
    ]
    assert json.loads(template) == {"metadata": {"labels": {"team": "a,b"}}, "spec": {"priorityClassName": "low"}}
    (plain,) = find(render_chart(api), "Deployment", NAME)["spec"]["template"]["spec"]["containers"]
    assert "TRAINIUM_OPERATOR_WORKER_TEMPLATE" not in [variable["name"] for variable in plain["env"]]
