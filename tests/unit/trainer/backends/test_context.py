"""Divide sequences: one curve in every division, alone and combined with other parallelism."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.testing.trainer.base_models import initial_model
from tests.testing.trainer.layouts import CP, PP, SHARDED, SP, TP, TWO_PASSES, VALIDATION, ZERO
from tests.unit.trainer.conftest import Launcher, ReferenceRuns
from trainium_contract.models.shape import ModelShape, RopeScalingKind, RopeStretch
from trainium_contract.trainer.model import ModelConfig
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models import context_parallel
from trainium_trainer.models.context_parallel import SequenceDivision, apply_context_parallel
from trainium_trainer.models.loss import compute_loss_sum

CP4 = "parallelism.context=4"
PACKED = "data.maskDocuments=true"


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(2, [CP], id="cp2"),
        pytest.param(2, [CP, PACKED, "recompute=Selective"], id="cp2, packed"),
        pytest.param(4, [CP4, SHARDED, "recompute=Full", TWO_PASSES], id="cp4, sharded", marks=pytest.mark.long),
        pytest.param(4, [CP4, PACKED], id="cp4, packed", marks=pytest.mark.long),
        pytest.param(4, [CP, TP, SP, PACKED, TWO_PASSES], id="cp2 tp2, sequence, packed"),
        pytest.param(4, [CP, TP], id="cp2 tp2", marks=pytest.mark.long),
        pytest.param(4, [CP, PACKED, ZERO], id="cp2 dp2, packed", marks=pytest.mark.long),
        pytest.param(4, [CP, PP, PACKED, TWO_PASSES], id="cp2 pp2, packed"),
    ],
)
def test_the_curve_does_not_depend_on_the_division_of_the_sequence(
    launch: Launcher, reference_run: ReferenceRuns, documents: Path, ranks: int, overrides: list[str]
) -> None:
    data = [
        VALIDATION,
        f"data.source={documents}",
        *(override for override in overrides if override.startswith("data.")),
    ]
    reference = reference_run(1, data)
    assert "validationLoss" in reference.metrics()[-1]
    launch(ranks, "other", [*data, *overrides]).finish().assert_same_curve(reference)


def test_masks_of_documents_change_the_curve(reference_run: ReferenceRuns, documents: Path) -> None:
    data = [VALIDATION, f"data.source={documents}"]
    assert reference_run(1, [*data, PACKED]).losses() != reference_run(1, data).losses()


@pytest.mark.parametrize("precision", ["BFloat16", "BFloat16Stochastic"])
def test_half_precision_stays_close_to_one_rank(launch: Launcher, reference_run: ReferenceRuns, precision: str) -> None:
    reference = reference_run(1, [f"precision={precision}"]).losses()
    divided = launch(2, "half", [CP, TWO_PASSES, f"precision={precision}"]).finish().losses()
    assert divided == pytest.approx(reference, rel=5e-3)
    assert divided[-1] < divided[0]


@pytest.mark.long
def test_a_run_resumes_across_context_tensor_and_data_parallel_sizes(launch: Launcher) -> None:
    constant = ["schedule.finalRatio=1"]
    reference = launch(1, "whole", [*constant, "steps=12"]).finish()
    sizes = [(2, [CP]), (2, [TP]), (4, [CP, TP]), (4, [CP, SHARDED]), (2, []), (4, [CP4])]
    for number, (ranks, overrides) in enumerate(sizes, start=1):
        job = launch(ranks, "parts", [*constant, f"steps={2 * number}", *overrides]).finish()
    job.assert_same_curve(reference)


@pytest.mark.parametrize("mode", ["Replicated", "FullySharded"])
def test_a_divided_sequence_resumes_from_memory_bitwise_equal(launch: Launcher, mode: str) -> None:
    overrides = ["steps=8", CP, f"dataParallel={mode}", "batch.microSize=8", "checkpoint.durable.everySteps=1000"]
    reference = launch(2, "whole", overrides).finish()
    launch(2, "parts", overrides, memory=True, exit_step=3).wait_for_exit()
    resumed = launch(2, "parts", overrides, memory=True).finish()
    expected = [(line["step"], line["loss"]) for line in reference.metrics()]
    assert [(line["step"], line["loss"]) for line in resumed.metrics()] == expected


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [CP, "data.sequenceLength=30"],
            "data.sequenceLength is 30, which is not divisible by 2 x parallelism.context",
        ),
        (
            ["parallelism.context=3"],
            "the number of ranks is 2, which is not divisible by parallelism.tensor x context 3",
        ),
        ([CP, "backend=Nxd"], "parallelism.context is 2, but backend Nxd does not divide sequences"),
    ],
)
def test_a_degree_that_does_not_fit_is_refused(launch: Launcher, overrides: list[str], sentence: str) -> None:
    overrides = ["data.sequenceLength=36", *overrides] if "context=3" in overrides[0] else overrides
    job = launch(2, "refused", overrides)
    assert job.wait() == [64, 64]
    assert sentence in job.log()


class TestKernels:
    """Compare attention over tiles, by the fused kernel and by products, with masked attention of torch."""

    LENGTH = 24

    @pytest.fixture
    def shape(self) -> ModelShape:
        config = ModelConfig(
            num_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2
        )
        stretch = RopeStretch(
            kind=RopeScalingKind.YARN, factor=4, original_max_positions=6, fast_turns=32, slow_turns=1
        )
        return replace(resolve_shape(config, 64), rope_stretch=stretch, query_growth=0.3)

    def losses(
        self, shape: ModelShape, positions: torch.Tensor | None, group: Any, *, divided: bool
    ) -> list[torch.Tensor]:
        """Return the loss and all gradients."""
        model = initial_model(shape)
        if divided:
            apply_context_parallel(model, SequenceDivision(group, 0, 1, self.LENGTH))
        tokens = torch.randint(0, 64, (2, self.LENGTH), generator=torch.Generator().manual_seed(0))
        loss = compute_loss_sum(model(tokens, positions=positions), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    @pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # from torch about functional collectives
    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("window", [None, 5, 100])
    def test_tiles_give_the_gradients_of_one_attention(
        self,
        shape: ModelShape,
        single_rank_group: Any,
        monkeypatch: pytest.MonkeyPatch,
        fused: bool,
        packed: bool,
        window: int | None,
    ) -> None:
        shape = replace(shape, sliding_window=window)
        positions = torch.tensor([[*range(10), *range(14)], [*range(3), *range(21)]]) if packed else None
        expected = self.losses(shape, positions, None, divided=False)
        monkeypatch.setattr(context_parallel, "_is_fused", lambda _: fused)
        monkeypatch.setattr(context_parallel, "_TILE_VALUES", 300)  # several tiles of rows in each chunk
        tiled = self.losses(shape, positions, single_rank_group, divided=True)
        assert len(tiled) == len(expected) > 10
        for value, expected_value in zip(tiled, expected, strict=True):
            torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-6)
