"""Fine-tune for a few steps and compare curves, weights and artifacts with `transformers.Trainer` and peft.

These are two rows of `make parity` on one rank; `test_tuning_layouts` compares other layouts with one rank.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the common name
from transformers.modeling_outputs import CausalLMOutput

from tests.unit.trainer.conftest import Job
from trainium_trainer.configuration.config import load

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # from transformers and peft
]

LORA = "{method: LoRA, lora: {rank: 4, alpha: 16, rankStabilized: true, targets: ['*_proj']}}"
ROWS = {
    "LoRA, packed examples": (f"tuning={LORA}", "data.format=Instruction", "data.examples.packing=true"),
    "full, examples one by one": ("data.format=Instruction", "optimizer.learningRate=3e-4"),
}
COMMON = ("steps=8", "data.sequenceLength=192", "artifacts.precision=Float32")


@pytest.fixture(autouse=True)
def _restore_determinism() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize("row", ROWS)
def test_the_curve_and_the_result_are_those_of_transformers_and_peft(
    launch: Callable[..., Job], base: Path, tmp_path: Path, row: str
) -> None:
    from benchmarks.parity import tuned
    from benchmarks.parity.inputs import write_instructions
    from benchmarks.parity.reference import compute_logits, load_model

    records = write_instructions(tmp_path / "instructions.jsonl")
    overrides = [*COMMON, *ROWS[row], f"model.weights={base}", f"data.source={records}"]
    config = load(tmp_path / "trainer.yaml", overrides)
    expected = tuned.run_reference(config, tmp_path / "reference")
    (tmp_path / "runs").mkdir()
    job = launch(1, "runs/run", overrides).finish()
    assert job.losses() == pytest.approx(expected.losses, rel=1e-5)
    weights = tuned.read_trained_weights(tmp_path / "runs")
    assert weights.keys() == expected.parameters.keys()
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(weights[name], parameter, rtol=0.0, atol=1e-4)
    artifacts = tuned.find_artifact_folders(tmp_path / "runs")
    logits = compute_logits(load_model(artifacts["model"]), expected.tokens)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-3, atol=1e-3)
    if expected.adapter is None:
        return
    peft_logits = tuned.compute_peft_merged_logits(base, artifacts["adapter"], expected.tokens)
    torch.testing.assert_close(logits, peft_logits, rtol=0.0, atol=1e-5)
    base_logits = compute_logits(load_model(base), expected.tokens)
    assert (logits - base_logits).abs().max() > 0.01, "a merged adapter changes the model"
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(config.to_wire()))
    assert tuned.compute_first_loss_difference(file, expected, tmp_path / "again") < 1e-5


class ConstantModel(nn.Module):
    """A model that predicts one token everywhere."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self._token = token

    def forward(self, tokens: torch.Tensor) -> CausalLMOutput:
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=F.one_hot(torch.full_like(tokens, self._token), 320))


def test_accuracy_is_the_share_of_held_out_labels_that_are_likeliest(base: Path, tmp_path: Path) -> None:
    from benchmarks.parity.inputs import write_questions
    from benchmarks.parity.tuned import measure_held_out_accuracy

    records = write_questions(tmp_path / "questions.jsonl")
    data = {
        "source": str(records),
        "format": "Classification",
        "sequenceLength": 192,
        "cacheDirectory": str(tmp_path / "cache"),
        "examples": {"classification": {"labels": ["class", "function"]}},
        "validation": {"fraction": 0.2, "samples": 32},
    }
    file = tmp_path / "labels.yaml"
    file.write_text(yaml.safe_dump({"model": {"weights": str(base)}, "data": data}))
    config = load(file)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    first_tokens = {tokenizer.encode(word).ids[0] for word in (" class", " function")}
    shares = [measure_held_out_accuracy(ConstantModel(token), config) for token in first_tokens]
    assert sum(share or 0.0 for share in shares) == pytest.approx(1.0), "each answer starts with one of them"
    assert measure_held_out_accuracy(ConstantModel(0), load(file, ["data.validation=null"])) is None
