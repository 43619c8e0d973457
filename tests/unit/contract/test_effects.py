"""A field that is given and without effect is refused by name, whichever field switches it off."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from tests.testing.fields_without_effect import SPEC_CASES, TRAINER_CASES, Case
from trainium_contract.effects import find_model
from trainium_contract.job import JOB_REQUIREMENTS, TrainingJobSpec
from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.trainer.effects import TRAINER_REQUIREMENTS

CASES = [*((TrainingConfig, case) for case in TRAINER_CASES), *((TrainingJobSpec, case) for case in SPEC_CASES)]
CONDITIONAL = [requirement.field for requirement in (*TRAINER_REQUIREMENTS, *JOB_REQUIREMENTS)]
EVERYWHERE = (
    "batch",
    "epochs",
    "seed",
    "device",
    "precision",
    "recompute",
    "torchCompile",
    "dataParallel",
    "nonFiniteTolerance",
    "backend",
    "image",
    "suspend",
    "optimizer.kind",
    "optimizer.learningRate",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weightDecay",
    "optimizer.clipNorm",
    "schedule.kind",
    "schedule.warmupRatio",
    "parallelism.tensor",
    "parallelism.pipeline",
    "parallelism.context",
    "model.weights",
    "model.vocabSize",
    "model.hiddenSize",
    "model.intermediateSize",
    "model.numLayers",
    "model.numAttentionHeads",
    "model.numKeyValueHeads",
    "model.headDim",
    "model.ropeTheta",
    "model.ropeScaling.kind",
    "model.maxPositions",
    "model.normEps",
    "model.tieEmbeddings",
    "tuning.method",
    "tuning.trainable",
    "tuning.objective",
    "data.hub",
    "data.format",
    "data.tokenizer",
    "data.bos",
    "data.sequenceLength",
    "data.validation.fraction",
    "data.validation.source",
    "data.validation.hubSplit",
    "data.validation.everySteps",
    "data.validation.samples",
    "data.seed",
    "data.tokenization",
    "data.workers",
    "data.prefetchSteps",
    "data.maxBadLines",
    "data.cacheDirectory",
    "artifacts.kinds",
    "artifacts.path",
    "artifacts.atMilestones",
    "artifacts.push",
    "evaluate",
    "monitor",
    "neuron",
    "checkpoint",
    "workers",
    "elasticity",
    "program",
    "roles",
    "precompile.enabled",
    "recovery.heartbeatTimeoutSeconds",
    "recovery.maxInPlaceRestarts",
    "recovery.rescaleAfterSeconds",
    "recovery.gracePeriodSeconds",
    "recovery.budgets",
    "recovery.rules",
    "recovery.hang.enabled",
    "recovery.stragglers",
    "recovery.disruption",
    "health.preflight.checks",
    "health.preflight.minimumBandwidthGbps",
    "health.quarantine.enabled",
    "scheduling",
    "cleanPodPolicy",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "managedBy",
    "ttlSecondsAfterFinished",
    "data.sources",
)
"""Fields that always have an effect, or whose conditions have another rule; a part stands for all below it."""


@pytest.mark.parametrize(
    ("model", "case"), CASES, ids=[f"{case.field} {number}" for number, (_, case) in enumerate(CASES)]
)
def test_a_field_without_effect_is_refused_by_name_and_accepted_where_it_has_one(
    model: type[BaseModel], case: Case
) -> None:
    with pytest.raises(ValidationError, match="has no effect") as caught:
        model.model_validate(case.off)
    named = max((field for field in CONDITIONAL if f"{case.field}.".startswith(f"{field}.")), key=len)
    assert f"{named} has no effect" in str(caught.value)
    document = model.model_validate(case.on)
    written = document.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert model.model_validate(written | case.on).model_dump() == document.model_dump()


def test_lora_fields_alone_mean_lora() -> None:
    for lora in ({}, {"rank": 8}):
        config = TrainingConfig.model_validate({"model": {"weights": "/base"}, "tuning": {"lora": lora}})
        assert config.to_wire()["tuning"]["method"] == "LoRA"
        assert TrainingConfig.model_validate(config.to_wire()) == config


def test_a_job_without_steps_may_count_epochs() -> None:
    config = TrainingJobSpec.model_validate({"trainer": {"epochs": 2}}).training_config()
    assert TrainingConfig.model_validate(config.to_wire()).epochs == 2


def test_every_requirement_has_a_case() -> None:
    assert {*CONDITIONAL} <= {part for _, case in CASES for part in (case.field, case.field.rpartition(".")[0])}


def leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for info in model.model_fields.values():
        part = find_model(info)
        if part is None:
            yield f"{path}{info.alias}"
        else:
            yield from leaves(part, f"{path}{info.alias}.")


@pytest.mark.parametrize("model", [TrainingConfig, TrainingJobSpec])
def test_every_field_is_known_to_have_an_effect_always_or_under_a_condition(model: type[BaseModel]) -> None:
    known = tuple(f"{field}." for field in (*CONDITIONAL, *EVERYWHERE))
    fields = {leaf.removeprefix("trainer.") for leaf in leaves(model)}
    assert [field for field in sorted(fields) if not f"{field}.".startswith(known)] == []
