"""A pod template of the wrong shape is refused with its place: nobody who merges templates ever meets one."""

from __future__ import annotations

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
def test_what_has_another_shape_is_reported_with_its_place(template: dict[str, Any], sentence: str) -> None:
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
def test_what_has_the_shape_of_a_template_is_taken_as_it_is(template: dict[str, Any]) -> None:
    assert WorkersSpec(template=copy.deepcopy(template)).template == template
