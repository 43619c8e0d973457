"""Objects and values of the chart as the real helm renders and installs it, the plain install, and the examples."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import generate
from tests.cluster.definition.conftest import Api
from tests.cluster.definition.rendered_chart import (
    CHART,
    EVERYTHING,
    NAME,
    RELEASE,
    ROOT,
    RenderedChart,
    list_selectors,
    refuse_values,
    render_chart,
)
from tests.testing.cluster.installed import make_namespace
from trainium_contract.accelerators import INSTANCES
from trainium_operator.coordinator.certificates import list_server_names

pytestmark = pytest.mark.cluster

EXAMPLES = sorted(path.name for path in (ROOT / "manifests/examples").glob("*.yaml"))


def endpoint(chart: RenderedChart, kind: str) -> dict[str, Any]:
    spec = chart.find(kind)["spec"]
    (scraped,) = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    return dict(scraped)


def test_a_monitor_scrapes_over_https_with_certificate_and_token(api: Api) -> None:
    monitors = "metrics.serviceMonitor.create=true,metrics.podMonitor.create=true"
    plain = render_chart(api, monitors)
    assert endpoint(plain, "ServiceMonitor") == {"port": "metrics", "path": "/metrics", "interval": "30s"}
    (port,) = plain.find("Service", "metrics")["spec"]["ports"]
    assert port["targetPort"] == "metrics"

    self_signed = render_chart(api, "metrics.secure=true,metrics.serviceMonitor.create=true")
    endpoint_spec = endpoint(self_signed, "ServiceMonitor")
    assert (endpoint_spec["port"], endpoint_spec["scheme"]) == ("https", "https")
    assert endpoint_spec["bearerTokenFile"] == "/var/run/secrets/kubernetes.io/serviceaccount/token"
    assert endpoint_spec["tlsConfig"]["serverName"] in list_server_names(f"{NAME}-coordinator", "system")
    assert endpoint_spec["tlsConfig"]["ca"]["secret"] == {"name": f"{NAME}-coordinator-tls", "key": "ca.crt"}
    (port,) = self_signed.find("Service", "metrics")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (8444, "https")

    issued = render_chart(api, f"metrics.secure=true,{monitors},metrics.tokenSecret.name=scraper,https.issuer.name=ca")
    certificate = issued.find("Certificate", "https")["spec"]
    for kind in ("ServiceMonitor", "PodMonitor"):
        endpoint_spec = endpoint(issued, kind)
        assert "bearerTokenFile" not in endpoint_spec
        assert endpoint_spec["authorization"] == {"credentials": {"name": "scraper", "key": "token"}}
        assert endpoint_spec["tlsConfig"]["serverName"] in certificate["dnsNames"]
        assert endpoint_spec["tlsConfig"]["ca"]["secret"]["name"] == certificate["secretName"]
    (mount,) = [mount for mount in issued.container["volumeMounts"] if mount["name"] == "https"]
    (volume,) = [volume for volume in issued.pod["spec"]["volumes"] if volume["name"] == "https"]
    assert issued.settings.https_certificate == mount["mountPath"]
    assert volume["secret"]["secretName"] == certificate["secretName"]


def test_a_pod_monitor_without_a_token_is_refused(api: Api) -> None:
    settings = "metrics.secure=true,metrics.podMonitor.create=true"
    assert "needs metrics.tokenSecret.name" in refuse_values(api, settings)


def test_alerts_and_dashboards_equal_their_files(api: Api) -> None:
    assert not [document for document in render_chart(api).objects if document["apiVersion"].startswith("monitoring.")]
    chart = render_chart(api, f"{EVERYTHING},metrics.prometheusRule.runbook=https://wiki.example/runbook")
    spec = chart.find("PrometheusRule")["spec"]
    written = (CHART / "files/alerts.yaml").read_text().replace("RUNBOOK#", "https://wiki.example/runbook#")
    assert spec == yaml.safe_load(written)
    for path in (CHART / "files/dashboards").iterdir():
        board = chart.find("ConfigMap", f"dashboard-{path.stem}")
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(board["data"][f"trainium-{path.name}"]) == json.loads(path.read_text())
    selector = chart.find("Deployment")["spec"]["selector"]
    for kind in ("PodMonitor", "ServiceMonitor"):
        assert chart.find(kind)["spec"]["selector"] == selector


@pytest.mark.parametrize("settings", ["replicas=1", EVERYTHING])
def test_the_operator_accepts_the_arguments_of_the_chart(api: Api, settings: str) -> None:
    chart = render_chart(api, settings)
    parsed = chart.settings
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
    ports = {port["name"]: port["containerPort"] for port in chart.container["ports"]}
    assert parsed.secure_metrics == (settings == EVERYTHING)
    https = {"https": parsed.https_port} if parsed.secure_metrics else {}
    assert ports == {"coordinator": parsed.coordinator_port, "metrics": parsed.metrics_port, **https}


def test_the_coordinator_service_selects_all_replicas(api: Api) -> None:
    chart = render_chart(api)
    service = chart.find("Service", "coordinator")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"].items() <= chart.pod["metadata"]["labels"].items()


def test_optional_objects_are_rendered_when_enabled(api: Api) -> None:
    optional = {"NetworkPolicy", "ServiceMonitor"}
    assert not optional & render_chart(api).kinds
    assert optional <= render_chart(api, EVERYTHING).kinds


def test_the_budget_keeps_one_of_several_replicas_and_never_blocks_a_drain_of_one(api: Api) -> None:
    budget = render_chart(api).find("PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == 1
    assert "PodDisruptionBudget" not in render_chart(api, "replicas=1").kinds


def test_operator_pods_prefer_other_nodes_and_tolerate_lost_nodes_briefly(api: Api) -> None:
    pod = render_chart(api).pod
    (machines,) = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (rule,) = machines["preference"]["matchExpressions"]
    assert (rule["operator"], set(rule["values"])) == ("NotIn", set(INSTANCES))
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {toleration["key"]: toleration["tolerationSeconds"] for toleration in pod["spec"]["tolerations"]} == {
        "node.kubernetes.io/not-ready": 10,
        "node.kubernetes.io/unreachable": 10,
    }
    customized = render_chart(api, "affinity.podAffinity.x=y,tolerations[0].key=mine").pod["spec"]
    assert customized["affinity"] == {"podAffinity": {"x": "y"}}
    assert customized["tolerations"] == [*pod["spec"]["tolerations"], {"key": "mine"}]


@pytest.mark.parametrize("more", ["replicas=2", EVERYTHING, "kueue.enabled=true,dra.enabled=true,ui.enabled=true"])
def test_common_labels_are_on_all_objects_and_in_no_selector(api: Api, more: str) -> None:
    common_labels = {"cost": "centre", "team.example/name": "ml"}
    chart = render_chart(api, rf"{more},commonLabels.cost=centre,commonLabels.team\.example/name=ml")
    assert len(chart.objects) == len(render_chart(api, more).objects)
    for document in chart.objects:
        assert common_labels.items() <= document["metadata"]["labels"].items(), document["metadata"]["name"]
        if "template" in document.get("spec", {}):
            assert common_labels.items() <= document["spec"]["template"]["metadata"]["labels"].items()
    all_selectors = [selector for document in chart.objects for selector in list_selectors(document.get("spec", {}))]
    assert len(all_selectors) >= 4
    assert not [selector for selector in all_selectors if common_labels.keys() & selector.keys()]


def test_a_label_of_an_object_overrides_a_common_label(api: Api) -> None:
    monitor = "metrics.podMonitor.create=true,metrics.podMonitor.labels.team=monitoring"
    chart = render_chart(api, f"commonLabels.team=ml,podLabels.team=operators,{monitor}")
    assert chart.find("Deployment")["metadata"]["labels"]["team"] == "ml"
    assert chart.pod["metadata"]["labels"]["team"] == "operators"
    assert chart.find("PodMonitor")["metadata"]["labels"]["team"] == "monitoring"


def test_the_definition_is_kept_and_can_be_left_out(api: Api) -> None:
    (definition,) = render_chart(api).list_kind("CustomResourceDefinition")
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "CustomResourceDefinition" not in render_chart(api, "crds.install=false").kinds
    (not_kept,) = render_chart(api, "crds.keep=false").list_kind("CustomResourceDefinition")
    assert "annotations" not in not_kept["metadata"]


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
    assert sentence in refuse_values(api, settings)


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
    chart = render_chart(crd_api, ",".join((settings, *(f"{path}=null" for path in paths))))
    assert chart.settings
    checked = [
        document | {"metadata": document["metadata"] | {"namespace": crd_api.namespace}}
        for document in chart.objects
        if "namespace" in document["metadata"] and not document["apiVersion"].startswith(("monitoring", "cert-manager"))
    ]
    apply = ("kubectl", "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    done = crd_api.run(*apply, "-f", "-", stdin=yaml.dump_all(checked))
    assert done.stderr == ""


@pytest.mark.parametrize("path", list(paths_of_values(required=True)))
def test_a_value_that_is_needed_is_refused_where_it_is_null(api: Api, path: str) -> None:
    assert f"missing property '{path.rpartition('.')[2]}'" in refuse_values(api, f"{path}=null")


def test_no_user_is_set_where_the_platform_assigns_it(api: Api) -> None:
    assert render_chart(api, "trainerUser=null").settings.worker_user is None
    assert render_chart(api, "trainerUser=1000680000").settings.worker_user == 1000680000


def test_the_chart_passes_a_strict_lint(api: Api) -> None:
    api.helm("lint", "--strict", api.chart)


def test_the_plain_install_is_up_to_date(api: Api) -> None:
    helm = shutil.which("helm", path=api.variables.get("PATH"))
    assert helm
    assert generate.find_stale(ROOT, helm) == [], "run `make generate`"


def test_all_pods_satisfy_the_restricted_standard(crd_api: Api) -> None:
    template = render_chart(crd_api).pod
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "labels": template["metadata"]["labels"]},
        "spec": template["spec"] | {"serviceAccountName": "default", "automountServiceAccountToken": False},
    }
    test_pod = render_chart(crd_api).find("Pod", "test")
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
    chart = render_chart(api, settings)
    pod = chart.find("Pod", "test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod["spec"]
    deployment = chart.find("Deployment")["spec"]
    (container,), parsed = pod["spec"]["containers"], chart.settings
    assert (container["image"], container["command"]) == (chart.container["image"], chart.container["command"])
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
    chart = render_chart(api, settings)
    labels = chart.find("Pod", "test")["metadata"]["labels"].items()
    specs = {
        document["kind"]: document["spec"]
        for document in chart.objects
        if document["kind"] != "NetworkPolicy" and "spec" in document
    }
    operator_selectors = [selector for spec in specs.values() for selector in list_selectors(spec) if selector]
    assert len(operator_selectors) >= 3
    assert not [selector for selector in operator_selectors if selector.items() <= labels]
    for policy in (document["spec"] for document in chart.list_kind("NetworkPolicy")):
        assert not policy["podSelector"]["matchLabels"].items() <= labels
        (peer,) = policy["ingress"][1]["from"]
        assert peer["podSelector"]["matchLabels"].items() <= labels
        assert [port["port"] for port in policy["ingress"][1]["ports"]] == ["coordinator", "metrics"]


def test_helm_test_is_not_rendered_without_replicas(api: Api) -> None:
    assert "Pod" not in render_chart(api, "replicas=0").kinds


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


def test_the_worker_template_reaches_the_operator_unchanged(api: Api) -> None:
    chart = render_chart(api, "workerTemplate.spec.priorityClassName=low,workerTemplate.metadata.labels.team=a\\,b")
    variables = {variable["name"]: variable.get("value") for variable in chart.container["env"]}
    template = variables["TRAINIUM_OPERATOR_WORKER_TEMPLATE"]
    assert json.loads(template) == {"metadata": {"labels": {"team": "a,b"}}, "spec": {"priorityClassName": "low"}}
    default = render_chart(api).container["env"]
    assert "TRAINIUM_OPERATOR_WORKER_TEMPLATE" not in [variable["name"] for variable in default]
