"""AdamW for devices that run whole graphs: every number of a step is a tensor, so no step needs a separate graph.

The arithmetic is that of `backends.optimizers.adamw`.

Guarantees:
- Moments exist from construction on, so that a checkpoint can be loaded into them.
- Where the gradient is not finite the state stays as it is, decided on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainium_contract.trainer.optimizer import OptimizerConfig, WeightDecayScope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainium_contract.trainer.optimizer import OptimizerConfig


@dataclass(frozen=True, slots=True)
class Controls:
    """The numbers of one step, scalars on the device."""

    learning_rate: Tensor
    gradient_scale: Tensor
    """What gradients are multiplied with: one over the tokens, and the clipping."""
    correction: Tensor
    """1 - beta1^step."""
    root_correction: Tensor
    """The square root of 1 - beta2^step."""
    finite: Tensor
    """Whether to change anything; bool."""


class GraphAdamW(Optimizer):
    """Set `controls`, then call `step`."""

    controls: Controls
    after_update: Callable[[], None] | None = None
    """Called at the end of `step`, before the weights are given to other ranks."""

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], **defaults: Any) -> None:
        """`defaults` are those of `adamw_settings`."""
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["exp_avg"] = torch.zeros_like(parameter.data)
                state["exp_avg_sq"] = torch.zeros_like(parameter.data)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        if self.after_update is not None:
            self.after_update()

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        controls, state = self.controls, self.state[parameter]
        assert parameter.grad is not None
        # In float32 also where the state is not: what is stored is rounded once, at random where the device does that.
        weight, exp_avg, exp_avg_sq = parameter.float(), state["exp_avg"].float(), state["exp_avg_sq"].float()
        gradient = parameter.grad.float() * controls.gradient_scale
        first = exp_avg.lerp(gradient, 1.0 - group["beta1"])
        second = exp_avg_sq * group["beta2"] + gradient * gradient * (1.0 - group["beta2"])
        kept = weight
        if weight.dim() == 2 or group["decay_all"]:
            kept = weight * (1.0 - controls.learning_rate * group["weight_decay"])
        denominator = second.sqrt() / controls.root_correction + group["eps"]
        moved = kept - controls.learning_rate / controls.correction * (first / denominator)
        for old, new in ((state["exp_avg"], first), (state["exp_avg_sq"], second), (parameter, moved)):
            old.copy_(torch.where(controls.finite, new.to(old.dtype), old))


def adamw_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return what stays the same over a run."""
    return {
        "lr": config.learning_rate,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "decay_all": config.decay_scope is WeightDecayScope.ALL,
    }
