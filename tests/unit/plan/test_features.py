"""Optional features: each can be deleted with its line of the registry, and is not called for jobs without it."""

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import trainium_operator
from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import make_plan
from trainium_contract.status.conditions import Phase
from trainium_operator.plan.features import registry
from trainium_operator.plan.view.context import Feature

ROOT = Path(trainium_operator.__file__).parent
MODULES = sorted(path.stem for path in (ROOT / "plan/features").iterdir() if not path.name.startswith("__"))
NAMES = [name for name in MODULES if name != "registry"]


def test_each_feature_is_registered_once() -> None:
    assert len(registry.FEATURES) == len(NAMES) == len({feature.name for feature in registry.FEATURES})


@pytest.mark.parametrize("feature_name", NAMES)
def test_nothing_outside_a_feature_imports_it_but_the_registry(feature_name: str) -> None:
    name = f"trainium_operator.plan.features.{feature_name}"
    importers = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = (
                [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            )
            if any(module.startswith(name) for module in imported):
                importers.add(path.relative_to(ROOT).as_posix())
    importers.discard("plan/features/registry.py")
    assert all(importer.startswith(f"plan/features/{feature_name}") for importer in importers), importers


@pytest.mark.parametrize("missing", registry.FEATURES, ids=lambda feature: feature.name)
def test_a_job_without_features_runs_without_any_of_them(missing: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = tuple(feature for feature in registry.FEATURES if feature is not missing)
    monkeypatch.setattr(registry, "FEATURES", rest)
    cluster = FakeCluster(build.spec(workers={"spares": 1, "minReplicas": 2}, trainer={"steps": 10**6}), 6)
    cluster.run(15)
    cluster.kill_pod(cluster.members()[1].view.name)
    cluster.run(30)
    cluster.change(replicas=3)
    cluster.run(30)
    cluster.suspend(value=True)
    cluster.run(15)
    assert (cluster.status.phase, cluster.pods) == (Phase.SUSPENDED, {})
    cluster.suspend(value=False)
    cluster.run(40)
    assert (cluster.status.phase, cluster.status.replicas, len(cluster.pods)) == (Phase.RUNNING, 3, 4)


def test_no_hook_of_a_feature_that_a_job_does_not_use_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("this job does not use the feature")

    hooks = [field.name for field in fields(Feature) if field.name not in ("name", "is_used")]
    closed = tuple(replace(feature, **dict.fromkeys(hooks, refuse)) for feature in registry.FEATURES)
    monkeypatch.setattr(registry, "FEATURES", closed)
    for observed in (build.running_job(4), build.running_job(4, pods=()), build.running_job(2, spares=1)):
        assert make_plan(observed).status.phase is not Phase.FAILED
