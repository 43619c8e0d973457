"""Malformed pod templates are refused with the path, so that no code that merges templates sees one."""

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from tests.testing.fuzz.objects import TEMPLATE
from trainium_contract.spec.pod_template import describe_shape_error
from trainium_contract.spec.workers import WorkersSpec


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ({"metadata": []}, "metadata is a list where an object belongs"),
        ({"metadata": {"labels": ["a"]}}, "metadata.labels is a list where an object belongs"),
        ({"spec": {"containers": {}}}, "spec.containers is an object where a list belongs"),
        ({"spec": {"containers": [None]}}, "spec.containers[0] is nothing where an object belongs"),
        ({"spec": {"containers": [{"name": 7}]}}, "spec.containers[0].name is 7 where a text belongs"),
        (
            {"spec": {"containers": [{"resources": {"requests": "1"}}]}},
            "spec.containers[0].resources.requests is a text where an object belongs",
        ),
        ({"spec": {"affinity": "near"}}, "spec.affinity is a text where an object belongs"),
    ],
)
def test_a_malformed_template_is_reported_with_its_path(template: dict[str, Any], sentence: str) -> None:
    assert describe_shape_error(template) == sentence
    with pytest.raises(ValidationError, match="write it as in the template of a Deployment"):
        WorkersSpec(template=template)


@pytest.mark.parametrize(
    "template",
    [
        {},
        TEMPLATE,
        {"metadata": None, "spec": None},
        {"spec": {"containers": None, "unknownField": 7, "affinity": None}},
    ],
)
def test_a_valid_template_is_kept_unchanged(template: dict[str, Any]) -> None:
    assert WorkersSpec(template=copy.deepcopy(template)).template == template
