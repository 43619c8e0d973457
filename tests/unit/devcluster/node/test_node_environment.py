"""A container's environment, command line, fields of the pod, and quantities."""

import base64
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_devcluster.node.api import quantities
from trainium_devcluster.node.spec import downward_api, environment
from trainium_devcluster.node.spec.environment import ConfigError

POD = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"b": "2", "a": 'x"y'}, "annotations": {}},
    "spec": {
        "nodeName": "node-1",
        "serviceAccountName": "sa",
        "containers": [{"name": "c"}],
    },
}
FACTS = downward_api.PodFacts(POD, "127.20.0.2", "127.20.0.1")
CONFIG = {"data": {"k": "v"}, "binaryData": {"raw": base64.b64encode(b"\x01").decode()}}
SECRET = {"data": {"s": base64.b64encode(b"hush").decode()}}


def lookup(plural: str, name: str) -> dict[str, Any] | None:
    return {("configmaps", "cm"): CONFIG, ("secrets", "sec"): SECRET}.get((plural, name))


def build_environment(**container: Any) -> dict[str, str]:
    return environment.build_environment({"name": "c", **container}, FACTS, lookup)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("$$(A)", "$(A)"),
        ("$(B)", "$(B)"),
        ("x$(A)y$(A)", "x1y1"),
        ("$$", "$"),
        ("$", "$"),
        ("$(A", "$(A"),
        ("$$$(A)", "$1"),
    ],
)
def test_references_are_expanded_and_dollars_escaped(text: str, expected: str) -> None:
    assert environment.expand(text, {"A": "1"}) == expected


@given(st.text(alphabet=st.characters(blacklist_characters="$")))
def test_text_without_dollars_is_unchanged(text: str) -> None:
    assert environment.expand(text, {"A": "1"}) == text


def test_a_variable_refers_only_to_earlier_ones() -> None:
    env = build_environment(
        env=[{"name": "A", "value": "$(B)"}, {"name": "B", "value": "2"}, {"name": "C", "value": "$(B)"}]
    )
    assert env == {"A": "$(B)", "B": "2", "C": "2"}


def test_env_overrides_env_from_and_prefixes_apply() -> None:
    env = build_environment(
        envFrom=[{"prefix": "P_", "configMapRef": {"name": "cm"}}, {"secretRef": {"name": "sec"}}],
        env=[{"name": "s", "value": "mine"}],
    )
    assert env == {"P_k": "v", "P_raw": "\x01", "s": "mine"}


def test_a_missing_reference_is_an_error_unless_it_is_optional() -> None:
    with pytest.raises(ConfigError, match='configmap "none" not found'):
        build_environment(envFrom=[{"configMapRef": {"name": "none"}}])
    with pytest.raises(ConfigError, match="couldn't find key x in secret n/sec"):
        build_environment(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "sec", "key": "x"}}}])
    optional = {"secretKeyRef": {"name": "sec", "key": "x", "optional": True}}
    sources = [{"secretRef": {"name": "no", "optional": True}}]
    assert build_environment(env=[{"name": "A", "valueFrom": optional}], envFrom=sources) == {}


def test_references_are_listed_once() -> None:
    container = {
        "envFrom": [{"configMapRef": {"name": "cm"}}],
        "env": [
            {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "k"}}},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "sec", "key": "s"}}},
        ],
    }
    assert environment.find_references(container) == [("configmaps", "cm"), ("secrets", "sec")]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("metadata.name", "p"),
        ("metadata.uid", "u"),
        ("metadata.labels", 'a="x\\"y"\nb="2"'),
        ("metadata.labels['b']", "2"),
        ("metadata.annotations['none']", ""),
        ("spec.nodeName", "node-1"),
        ("spec.serviceAccountName", "sa"),
        ("status.podIP", "127.20.0.2"),
        ("status.podIPs", "127.20.0.2"),
        ("status.hostIP", "127.20.0.1"),
    ],
)
def test_fields_of_the_pod_are_resolved(path: str, expected: str) -> None:
    assert downward_api.resolve_field(FACTS, path) == expected


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(downward_api.UnknownFieldError, match=r"status\.phase"):
        downward_api.resolve_field(FACTS, "status.phase")


@pytest.mark.parametrize(("text", "value"), [("500m", "0.5"), ("32Gi", str(32 << 30)), ("1e3", "1000"), ("2k", "2000")])
def test_a_quantity_is_parsed(text: str, value: str) -> None:
    assert quantities.parse(text) == Decimal(value)


def test_an_invalid_quantity_is_an_error() -> None:
    with pytest.raises(ValueError, match="'8 GB' is not a quantity"):
        quantities.parse("8 GB")


def test_a_pod_requests_the_sum_of_its_containers_or_its_largest_init_container() -> None:
    def container_requesting(name: str, cpu: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "resources": {"requests": {"cpu": cpu}}, **more}

    pod = {
        "spec": {
            "initContainers": [container_requesting("s", "1", restartPolicy="Always"), container_requesting("i", "5")],
            "containers": [container_requesting("a", "2"), {"name": "b", "resources": {"limits": {"cpu": "500m"}}}],
        }
    }
    assert quantities.sum_pod_requests(pod) == {"pods": Decimal(1), "cpu": Decimal(6)}
