"""Defaults never make a valid file invalid: every single field is accepted with the defaults of the others."""

from collections.abc import Iterator
from typing import Any

import pytest

from trainium_contract.base import ContractModel
from trainium_contract.trainer.config import TrainerSpec, TrainingConfig

LARGE = 2**31 - 1
DEPENDENT_FIELDS = {
    "schedule.decaySteps": "no default allows a decay that is longer than the run",
    "tuning.lora.rankPattern": "the numbers are values of a map",
    "tuning.lora.alphaPattern": "the numbers are values of a map",
    "monitor.profile": "the numbers are in lists",
    "evaluate.tasks": "there are no tasks without names",
    "model.ropeScaling": "each kind has its own numbers",
    "tuning.objective": "a loss on pairs needs data that are pairs",
    "data.validation": "the file says twice, or not at all, where the validation data come from",
}


def bounds(model: type[ContractModel], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each number in the file with the values at both ends of its range."""
    for name, field in model.model_fields.items():
        field_path = f"{path}{field.alias or name}"
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, ContractModel):
                yield from bounds(kind, f"{field_path}.")
        is_whole, limits = int in kinds, {}
        for meta in [*field.metadata, *(meta for kind in kinds for meta in getattr(kind, "__metadata__", ()))]:
            for bound in getattr(meta, "metadata", [meta]):
                limits |= {key: getattr(bound, key) for key in ("ge", "gt", "le", "lt") if hasattr(bound, key)}
        step = 1 if is_whole else 1e-3
        if "ge" in limits or "gt" in limits:
            yield field_path, limits["ge"] if "ge" in limits else limits["gt"] + step
        if "le" in limits or "lt" in limits:
            yield field_path, limits["le"] if "le" in limits else limits["lt"] - step


def file_with(path: str, value: Any) -> dict[str, Any]:
    *parents, name = path.split(".")
    file: dict[str, Any] = {name: value}
    for parent in reversed(parents):
        file = {parent: file}
    return file


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, value) for path, value in bounds(TrainerSpec) if not path.startswith(tuple(DEPENDENT_FIELDS))]
    + [("schedule.decaySteps", 95), ("steps", 3), ("batch.microSize", 16), ("model.vocabSize", 512)],
)
def test_a_number_alone_is_accepted_at_each_end_of_its_range(path: str, value: Any) -> None:
    config = TrainingConfig.model_validate(file_with(path, value))
    assert TrainingConfig.model_validate(config.to_wire()) == config, "the written file is read as the same"


def test_dependent_defaults_adapt_to_given_values() -> None:
    config = TrainingConfig.model_validate(
        {
            "steps": 3,
            "batch": {"microSize": 16},
            "model": {"vocabSize": 512, "maxPositions": 64, "numAttentionHeads": 3},
        }
    )
    assert (config.schedule.warmup_steps, config.batch.global_size) == (3, 16)
    assert (config.data.tokenizer.vocab_size, config.data.sequence_length) == (512, 64)
    sizes = config.model.known_shape()
    assert sizes is not None
    assert (sizes.num_attention_heads, sizes.num_key_value_heads) == (3, 3)
    for refused in (
        {"steps": 3, "schedule": {"warmupSteps": 10}},
        {"steps": 3, "schedule": {"decaySteps": 4}},
    ):
        with pytest.raises(ValueError, match=r"warm-up must end within the run|together more than"):
            TrainingConfig.model_validate(refused)
