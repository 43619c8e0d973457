"""Divide layers among pipeline stages, and train with the curve of one process."""

import pytest
import torch

from tests.testing.trainer.layouts import (
    PP,
    SHARDED,
    SP,
    TP,
    TWO_PASSES,
    VALIDATION,
    ZERO,
    has_pipelines,
    needs_pipelines,
)
from tests.unit.trainer.conftest import Launcher, ReferenceRuns
from trainium_contract.trainer.model import ModelConfig
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.stages import LlamaStage, find_shared_with_first, list_canonical_parameters, split_layers

EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(4, 2, [2, 2]), (5, 2, [2, 3]), (3, 3, [1, 1, 1]), (7, 4, [1, 2, 2, 2]), (9, 4, [2, 3, 2, 2])],
)
def test_layers_are_divided_in_order_and_evenly_with_more_in_the_middle(
    layers: int, stages: int, counts: list[int]
) -> None:
    parts = [split_layers(stage, stages, layers) for stage in range(stages)]
    assert [len(part) for part in parts] == counts
    assert [layer for part in parts for layer in part] == list(range(layers))


@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_have_the_parameters_of_the_model_under_its_names(tied: bool) -> None:
    shape = resolve_shape(ModelConfig(num_layers=5, hidden_size=32, intermediate_size=48, tie_embeddings=tied), 64)
    with torch.device("meta"):
        model = Llama(shape)
        stages = [
            LlamaStage(shape, stage=number, num_stages=3, length=8, hidden_dtype=torch.float32) for number in range(3)
        ]
    owned = [
        (name, parameter.shape)
        for stage in stages
        for name, parameter in list_canonical_parameters(stage)
        if name not in find_shared_with_first(stage)
    ]
    expected = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    assert sorted(owned) == sorted(expected)
    assert [find_shared_with_first(stage) for stage in stages] == [
        frozenset(),
        frozenset(),
        {EMBEDDING} if tied else set(),
    ]


@pytest.mark.skipif(has_pipelines(), reason="this torch supports pipelines")
def test_an_old_torch_is_refused_before_a_process_group_is_made(launch: Launcher) -> None:
    job = launch(2, "old", [PP])
    assert job.wait() == [64, 64]
    assert "parallelism.pipeline is above 1, which torch 2" in job.log()


@needs_pipelines
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(2, [], id="pp2"),
        pytest.param(2, ["batch.microSize=8"], id="pp2, fewer micro-batches than stages"),
        pytest.param(4, [], id="pp2 dp2", marks=pytest.mark.long),
        pytest.param(4, [TP, SP, TWO_PASSES], id="pp2 tp2, sequence"),
        pytest.param(4, [SHARDED], id="pp2, sharded", marks=pytest.mark.long),
    ],
)
def test_the_curve_does_not_depend_on_the_pipeline(
    launch: Launcher, reference_run: ReferenceRuns, ranks: int, overrides: list[str]
) -> None:
    reference = reference_run(1, [VALIDATION])
    assert "validationLoss" in reference.metrics()[-1]
    launch(ranks, "other", [VALIDATION, PP, *overrides]).finish().assert_same_curve(reference)


@needs_pipelines
@pytest.mark.parametrize("tied", ["true", "false"])
def test_stages_of_uneven_size_have_the_curve_of_one_process(launch: Launcher, tied: str) -> None:
    model = [VALIDATION, "model.numLayers=5", f"model.tieEmbeddings={tied}", "steps=4"]
    reference = launch(1, "whole", model).finish()
    divided = launch(2, "divided", [*model, PP]).finish()
    divided.assert_same_curve(reference)


@needs_pipelines
@pytest.mark.long
def test_a_run_resumes_across_pipeline_tensor_and_sharded_sizes(launch: Launcher) -> None:
    constant = ["schedule.finalRatio=1"]
    reference = launch(1, "whole", [*constant, "steps=12"]).finish()
    sizes = [(2, [PP]), (2, [TP]), (4, [PP, TP]), (4, [PP, SHARDED]), (4, [PP, ZERO]), (1, [])]
    for number, (ranks, overrides) in enumerate(sizes, start=1):
        parts = launch(ranks, "parts", [*constant, f"steps={2 * number}", *overrides]).finish()
    parts.assert_same_curve(reference)


@needs_pipelines
@pytest.mark.long
def test_a_pipeline_that_left_resumes_from_memory_bitwise_equal(launch: Launcher) -> None:
    overrides = ["steps=40", PP, "checkpoint.durable.everySteps=1000"]
    reference = launch(2, "whole", overrides).finish()
    job = launch(2, "parts", overrides, memory=True).request_exit(step=3)
    assert not list(job.folder.glob("step-*")), "the memory of both ranks is enough"
    resumed = launch(2, "parts", overrides, memory=True).finish()
    assert resumed.losses() == reference.losses()
    assert [line["step"] for line in resumed.metrics()] == [line["step"] for line in reference.metrics()]
