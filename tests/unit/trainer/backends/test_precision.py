"""Round stochastically without a bias, and train in every number format and layout."""

import json

import pytest
import torch

from tests.testing.trainer.layouts import SHARDED, SP, TP
from tests.unit.trainer.conftest import Launcher, ReferenceRuns
from trainium_contract.trainer.optimizer import OptimizerConfig
from trainium_trainer.backends.optimizers import Rounding, Slot, create_noise_generator, draw_noise_like, round_into
from trainium_trainer.backends.optimizers.adamw import update

CPU = torch.device("cpu")
STOCHASTIC = "precision=BFloat16Stochastic"


def round_value(value: torch.Tensor, step: int = 1, share: int = 0) -> torch.Tensor:
    target = torch.empty(value.shape, dtype=torch.bfloat16)
    round_into(target, value, draw_noise_like(value, create_noise_generator(0, step, "x", CPU)), share=share)
    return target


@pytest.mark.parametrize("share", [0, 1, 2])
@pytest.mark.parametrize("value", [1.001, -1.001, 3.0e-5, -7.77e12, 1.0 - 2**-10, 1e-39])
def test_rounding_goes_to_a_neighbour_and_its_mean_is_the_value(value: float, share: int) -> None:
    values = torch.full((200_000,), value)
    rounded = round_value(values, share=share).double()
    low, high = rounded.min().item(), rounded.max().item()
    exact = values[0].double().item()
    assert low < exact < high
    assert set(rounded.unique().tolist()) == {low, high}, "only the two neighbours"
    neighbour = torch.tensor(low if exact > 0 else high, dtype=torch.bfloat16)
    following = (neighbour.view(torch.int16) + 1).view(torch.bfloat16)
    assert following.double().item() == (high if exact > 0 else low)
    # Five standard deviations of the mean of two values `high - low` apart, at equal probability.
    assert rounded.mean().item() == pytest.approx(exact, abs=5 * 0.5 * (high - low) / len(values) ** 0.5)


def test_values_of_bfloat16_infinities_and_nan_are_not_rounded() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**100, float("inf"), float("-inf")])
    for step in range(20):
        assert torch.equal(round_value(exact, step).float(), exact)
    assert round_value(torch.tensor([float("nan")])).isnan().all()


def test_equal_ranks_round_alike_and_steps_and_shares_do_not() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_value(values), round_value(values))
    for other in (round_value(values, step=2), round_value(values, share=1), round_value(values, share=2)):
        different = (round_value(values) != other).float().mean().item()
        assert 0.2 < different < 0.5  # a third on average


def test_an_update_too_small_for_bfloat16_arrives_on_average() -> None:
    count, steps = 20_000, 30
    weight = torch.ones(count, dtype=torch.bfloat16)
    nearest = torch.ones(1, dtype=torch.bfloat16)
    moments = torch.zeros(2, count, dtype=torch.bfloat16)
    config = OptimizerConfig(learning_rate=1e-4, beta1=0.0, weight_decay=0.0)
    for step in range(1, steps + 1):
        slot = Slot(weight, torch.full((count,), -1.0), tuple(moments), is_matrix=True, key="w")
        update([slot], config, step=step, learning_rate=1e-4, gradient_scale=1.0, rounding=Rounding(0, by_device=False))
        nearest += 1e-4
    assert nearest.item() == 1.0, "rounding to the nearest value loses every update"
    # Five standard deviations, with one random choice per step and value.
    assert weight.double().mean().item() - 1 == pytest.approx(1e-4 * steps, rel=5 / (count * steps / 80) ** 0.5)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, [STOCHASTIC], id="stochastic"),
        pytest.param(2, [STOCHASTIC, TP, SP], id="stochastic, tp2"),
        pytest.param(2, [STOCHASTIC, SHARDED], id="stochastic, sharded", marks=pytest.mark.long),
        pytest.param(2, ["precision=BFloat16"], id="master weights"),
        pytest.param(2, ["precision=BFloat16", SHARDED], id="master weights, sharded"),
    ],
)
def test_narrow_formats_stay_close_to_full_precision(
    launch: Launcher, reference_run: ReferenceRuns, ranks: int, overrides: list[str]
) -> None:
    reference = reference_run(1).losses()
    narrow = launch(ranks, "narrow", overrides).finish().losses()
    assert narrow[-1] == pytest.approx(reference[-1], rel=0.02)
    assert narrow[-1] != reference[-1]


def test_a_run_with_stochastic_rounding_is_repeatable_and_its_checkpoint_has_half_the_size(launch: Launcher) -> None:
    first, second = (launch(2, name, ["steps=3", STOCHASTIC]).finish() for name in ("first", "second"))
    assert first.losses() == second.losses()
    (path,) = first.folder.glob("step-3/**/index.json")
    dtypes = {name: entry["dtype"] for name, entry in json.loads(path.read_text())["tensors"].items()}
    assert dtypes.pop("optimizer.step") == "I64"
    assert set(dtypes.values()) == {"BF16"}


def test_a_checkpoint_is_resumed_in_another_number_format(launch: Launcher) -> None:
    formats = ["Float32", "BFloat16Stochastic", "BFloat16"]
    for number, precision in enumerate(formats, start=1):
        overrides = [f"steps={2 * number}", f"precision={precision}", "schedule.finalRatio=1"]
        job = launch(2, "run", overrides).finish()
    reference = launch(1, "whole", ["steps=6", "schedule.finalRatio=1"]).finish()
    assert [line["step"] for line in job.metrics()] == list(range(1, 7))
    assert job.losses()[-1] == pytest.approx(reference.losses()[-1], rel=0.02)
