"""A few steps of fine-tuning beside `transformers.Trainer` and peft: curves, trained numbers, what is left behind.

One rank of two of the rows of `make parity`; that other layouts equal one rank is held by `test_tuning_layouts`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses
from transformers.modeling_outputs import CausalLMOutput

from tests.unit.trainer.conftest import Job
from trainium_trainer.configuration.config import load
from trainium_trainer.data.dataset import open_data

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # of transformers and peft
]

LORA = "{method: LoRA, lora: {rank: 4, alpha: 16, rankStabilized: true, targets: ['*_proj']}}"
ROWS = {
    "LoRA, packed examples": (f"tuning={LORA}", "data.format=Instruction", "data.examples.packing=true"),
    "full, examples one by one": ("data.format=Instruction", "optimizer.learningRate=3e-4"),
}
COMMON = ("steps=8", "data.sequenceLength=192", "artifacts.precision=Float32")


@pytest.fixture(autouse=True)
def _leaves_torch_as_it_was() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """Save a Hugging Face folder with the tokenizer that is trained on the text of all tests."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(vocab_size=320, initializer_range=0.2, **sizes, **heads)).save_pretrained(folder)
    file = folder / "learn.yaml"
    source = {"source": str(text_file), "sequenceLength": 32, "tokenizer": {"vocabSize": 320}}
    data = source | {"cacheDirectory": str(text_file.parent / "cache")}
    file.write_text(yaml.safe_dump({"data": data}))
    (folder / "tokenizer.json").write_bytes(open_data(load(file).data, 8).tokenizer.read_bytes())
    return folder


@pytest.mark.parametrize("row", ROWS)
def test_the_curve_and_the_result_are_those_of_transformers_and_peft(
    launch: Callable[..., Job], base: Path, tmp_path: Path, row: str
) -> None:
    from benchmarks.parity import tuned
    from benchmarks.parity.inputs import write_instructions
    from benchmarks.parity.reference import load_model, logits_of

    records = write_instructions(tmp_path / "instructions.jsonl")
    overrides = [*COMMON, *ROWS[row], f"model.weights={base}", f"data.source={records}"]
    config = load(tmp_path / "trainer.yaml", overrides)
    against = tuned.reference_run(config, tmp_path / "reference")
    (tmp_path / "of").mkdir()
    job = launch(1, "of/run", overrides).finish()
    assert job.losses() == pytest.approx(against.losses, rel=1e-5)
    ours = tuned.trained_weights(tmp_path / "of")
    assert ours.keys() == against.parameters.keys()
    for name, parameter in against.parameters.items():
        torch.testing.assert_close(ours[name], parameter, rtol=0.0, atol=1e-4)
    left = tuned.artifact_folders(tmp_path / "of")
    own = logits_of(load_model(left["model"]), against.tokens)
    torch.testing.assert_close(own, against.logits, rtol=1e-3, atol=1e-3)
    if against.adapter is None:
        return
    theirs = tuned.peft_merged_logits(base, left["adapter"], against.tokens)
    torch.testing.assert_close(own, theirs, rtol=0.0, atol=1e-5)
    untouched = logits_of(load_model(base), against.tokens)
    assert (own - untouched).abs().max() > 0.01, "a merged adapter changes the model"
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(config.to_wire()))
    assert tuned.first_loss_difference(file, against, tmp_path / "again") < 1e-5


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
    from benchmarks.parity.tuned import held_out_accuracy

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
    firsts = {tokenizer.encode(word).ids[0] for word in (" class", " function")}
    shares = [held_out_accuracy(ConstantModel(token), config) for token in firsts]
    assert sum(share or 0.0 for share in shares) == pytest.approx(1.0), "each answer begins with one of them"
    assert held_out_accuracy(ConstantModel(0), load(file, ["data.validation=null"])) is None
