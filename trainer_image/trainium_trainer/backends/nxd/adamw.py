"""AdamW for devices that run whole graphs: every value of a step is a tensor, so all steps share one graph.

The arithmetic is that of `backends.optimizers.adamw`.

Guarantees:
- Moments exist from construction on, so that a checkpoint can be loaded into them.
- If the gradient is not finite the state does not change; the device decides this.
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
class UpdateScalars:
    """The values of one step, scalars on the device."""

    learning_rate: Tensor
    gradient_scale: Tensor
    """The factor of the gradients: one over the tokens, times the clipping."""
    correction: Tensor
    """1 - beta1^step."""
    root_correction: Tensor
    """The square root of 1 - beta2^step."""
    finite: Tensor
    """Whether to update the state; bool."""


class GraphAdamW(Optimizer):
    """Set `scalars`, then call `step`."""

    scalars: UpdateScalars
    after_update: Callable[[], None] | None = None
    """Called at the end of `step`, before the weights are sent to other ranks."""

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], **defaults: Any) -> None:
        """Create the moments; `defaults` are those of `list_adamw_settings`."""
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
        scalars, state = self.scalars, self.state[parameter]
        assert parameter.grad is not None
        # The update is computed in float32 even if the state is not; results are rounded once, stochastically if the
        # device does so.
        weight, exp_avg, exp_avg_sq = parameter.float(), state["exp_avg"].float(), state["exp_avg_sq"].float()
        gradient = parameter.grad.float() * scalars.gradient_scale
        first = exp_avg.lerp(gradient, 1.0 - group["beta1"])
        second = exp_avg_sq * group["beta2"] + gradient * gradient * (1.0 - group["beta2"])
        decayed = weight
        if weight.dim() == 2 or group["decay_all"]:
            decayed = weight * (1.0 - scalars.learning_rate * group["weight_decay"])
        denominator = second.sqrt() / scalars.root_correction + group["eps"]
        moved = decayed - scalars.learning_rate / scalars.correction * (first / denominator)
        for old, new in ((state["exp_avg"], first), (state["exp_avg_sq"], second), (parameter, moved)):
            old.copy_(torch.where(scalars.finite, new.to(old.dtype), old))


def list_adamw_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the settings that are constant during a run."""
    return {
        "lr": config.learning_rate,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "decay_all": config.decay_scope is WeightDecayScope.ALL,
    }
