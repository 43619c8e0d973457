"""The second demo's job and base, held to what the demo does with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainium_contract.job import TrainingJobSpec
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.trainer.examples import DataFormat
from trainium_contract.trainer.tuning import TuningMethod
from trainium_devcluster import tune
from trainium_devcluster.tune.base import CONFIGURATION, identity
from trainium_devcluster.tune.demo import with_pairs


@pytest.fixture
def spec() -> TrainingJobSpec:
    document = yaml.safe_load(Path(tune.__file__).with_name("job.yaml").read_text())
    return TrainingJobSpec.model_validate(document["spec"])


def test_the_job_starts_on_three_workers_and_a_spare_and_may_go_on_with_two(spec: TrainingJobSpec) -> None:
    assert (spec.workers.replicas, spec.workers.spares) == (3, 1)
    assert {2, 3} <= set(spec.batch_shape().legal_sizes(spec.workers.min_replicas or 3, 3))


def test_the_job_tunes_adapters_on_instructions_for_whole_epochs_and_measures_the_result(spec: TrainingJobSpec) -> None:
    config = spec.training_config()
    assert config.tuning.method is TuningMethod.LORA
    assert config.data.format is DataFormat.INSTRUCTION
    assert config.epochs >= 2
    assert config.epochs == int(config.epochs)
    assert config.monitor.record_samples
    assert config.artifacts.kinds == (ArtifactKind.ADAPTER, ArtifactKind.MODEL)
    assert config.evaluate.enabled
    assert config.evaluate.before


def test_what_the_job_reads_is_below_the_one_folder_that_the_demo_mounts(spec: TrainingJobSpec) -> None:
    (volume,) = spec.workers.template["spec"]["volumes"]
    (container,) = spec.workers.template["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert spec.trainer is not None
    data = spec.trainer.data
    assert data.validation is not None
    read = {spec.trainer.model.weights, data.source, data.validation.source}
    assert read == {f"{mount['mountPath']}/{name}" for name in ("base", "train.jsonl", "held-out.jsonl")}


def test_the_job_of_pairs_reads_what_the_demo_writes_and_compares_with_the_base() -> None:
    document = yaml.safe_load(Path(tune.__file__).with_name("job.yaml").read_text())
    config = TrainingJobSpec.model_validate(with_pairs(document)["spec"]).training_config()
    assert config.data.format is DataFormat.PREFERENCE
    assert config.tuning.objective is not None
    assert config.tuning.objective.compares_with_reference
    assert config.data.validation is not None
    assert (config.data.source, config.data.validation.source) == (
        "/material/pairs.jsonl",
        "/material/held-out-pairs.jsonl",
    )
    assert not config.evaluate.enabled
    assert document["spec"]["trainer"]["data"]["format"] == "Instruction"


def test_the_base_is_trained_by_a_configuration_that_the_trainer_takes() -> None:
    TrainingConfig.model_validate(CONFIGURATION)


def test_another_text_or_setting_is_another_base() -> None:
    known = identity("text", CONFIGURATION)
    assert identity("text", CONFIGURATION) == known
    assert identity("texts", CONFIGURATION) != known
    assert identity("text", {**CONFIGURATION, "steps": 1}) != known
