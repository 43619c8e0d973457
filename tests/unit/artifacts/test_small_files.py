"""Write tokenizer, generation settings and model card beside the weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.testing.trainer.base_models import save_base, save_tuned, write_run
from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision
from trainium_trainer import cli
from trainium_trainer.artifacts.card import add_evaluation
from trainium_trainer.artifacts.export import export, merge
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.exits import UserError
from trainium_trainer.weights.base import BaseWeights

FLOAT32 = ArtifactPrecision.FLOAT32
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def save_tokenizer(folder: Path, *, special_tokens: tuple[str, ...] = (), size: int = 60) -> None:
    """Save a tokenizer as `transformers` does, with a chat template."""
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", *(f"w{n}" for n in range(size - 2))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_tuned_run(tmp_path: Path, **settings: Any) -> str:
    """Write a checkpoint of all weights, tuned from a base with tokenizer and generation settings."""
    model = save_base(tmp_path / "base", eos_token_id=1, bos_token_id=0)
    save_tokenizer(tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    base = BaseWeights.open(str(tmp_path / "base"))
    weights = dict(model.named_parameters())
    write_run(tmp_path / "run", base.shape, weights, settings={"weights": base.digest} | settings)
    return str(tmp_path / "run")


def test_tokenizer_template_and_generation_settings_come_from_the_base(tmp_path: Path) -> None:
    root = write_tuned_run(tmp_path)
    export(root, tmp_path / "out", base=str(tmp_path / "base"))
    before, after = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("base", "out"))
    assert after("w3 w9").input_ids == before("w3 w9").input_ids
    assert after.chat_template == TEMPLATE
    assert after.eos_token == "</s>"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [1, 2]
    assert model.generation_config.temperature == 0.6
    assert (model.config.eos_token_id, model.config.bos_token_id) == (1, 0)
    assert str(model.dtype) == "torch.bfloat16"


QUESTION = [{"role": "user", "content": "w3"}]
OTHER = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
TOOLS = "{{ tools | length }} tools" + OTHER


def prompt_of(folder: Path, **options: Any) -> str:
    """Return a question in the form in which `transformers` asks the model of a folder."""
    return str(AutoTokenizer.from_pretrained(folder).apply_chat_template(QUESTION, tokenize=False, **options))


@pytest.mark.parametrize("bases", ["file", "settings", "several"])
def test_an_artifact_has_the_chat_template_that_the_run_was_trained_with(tmp_path: Path, bases: str) -> None:
    root = write_tuned_run(tmp_path, chatTemplate=OTHER)
    base = tmp_path / "base"
    settings = json.loads((base / "tokenizer_config.json").read_text())
    if bases != "file":
        (base / "chat_template.jinja").unlink()
        named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}]
        settings["chat_template"] = TEMPLATE if bases == "settings" else named
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    tools = [{"type": "function", "function": {"name": "f"}}]
    for tokenizer in (None, base):
        export(root, tmp_path / "out", base=str(base), tokenizer=tokenizer)
        assert prompt_of(tmp_path / "out") == prompt_of(tmp_path / "out", tools=tools) == "<user>w3"
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("form", ["file", "settings"])
@pytest.mark.parametrize("base_form", ["file", "settings"])
def test_the_templates_of_the_runs_tokenizer_replace_those_of_the_base(
    tmp_path: Path, form: str, base_form: str
) -> None:
    root = write_tuned_run(tmp_path)
    save_tokenizer(tmp_path / "tokenizer")
    for folder, chosen, texts in (
        (tmp_path / "base", base_form, [TEMPLATE]),
        (tmp_path / "tokenizer", form, [OTHER, TOOLS]),
    ):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        (folder / "chat_template.jinja").unlink()
        named = dict(zip(("default", "tool_use"), texts, strict=False))
        tokenizer.chat_template = named if len(texts) > 1 else texts[0]
        tokenizer.save_pretrained(folder, save_jinja_files=chosen == "file")
    export(root, tmp_path / "out", base=str(tmp_path / "base"), tokenizer=tmp_path / "tokenizer")
    assert prompt_of(tmp_path / "out") == "<user>w3"
    assert prompt_of(tmp_path / "out", tools=[{"type": "function"}]) == "1 tools<user>w3"


def test_a_tokenizer_with_added_tokens_replaces_the_bases(tmp_path: Path) -> None:
    root = write_tuned_run(tmp_path)
    save_tokenizer(tmp_path / "grown", special_tokens=("<|ask|>", "<|answer|>"))
    export(root, tmp_path / "out", base=str(tmp_path / "base"), tokenizer=tmp_path / "grown")
    after = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert after("<|ask|> w1").input_ids == [60, 3]
    assert after.chat_template == TEMPLATE


def test_a_bare_tokenizer_gets_the_settings_that_programs_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_base(tmp_path / "base")
    shape = BaseWeights.open(str(tmp_path / "base")).shape
    write_run(tmp_path / "run", shape, dict(model.named_parameters()))
    save_tokenizer(tmp_path / "other")
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "other/tokenizer.json").read_bytes())
    command = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--tokenizer"]
    assert cli.run([*command, str(tmp_path / "base")]) == 64
    assert "there is no tokenizer.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.run([*command, str(tmp_path / "tokenizer.json")]) == 0
    assert BaseWeights.open(str(tmp_path / "out")).find_dtype("model.norm.weight") == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == 1


WORDS = 60
LAST = WORDS - 1


def renumber_end(folder: Path) -> None:
    """Save the same vocabulary with `</s>` as its last entry and a padding token before it."""
    special = {LAST: "</s>", LAST - 1: "<pad>", 0: "<s>"}
    vocabulary = {special.get(number, f"w{number}"): number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def weights_that_predict_the_last_token(model: Any) -> dict[str, Any]:
    """Return weights with which a model predicts only the last token of the vocabulary."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    weights["model.embed_tokens.weight"][:] = 1.0
    weights["model.norm.weight"][:] = 1.0
    weights["lm_head.weight"][LAST] = 1.0
    return weights


def assert_stops_at_end(folder: Path) -> None:
    """Check that transformers reads the end token from the folder, and stops there."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    assert tokenizer.chat_template == TEMPLATE
    for settings in (model.config, model.generation_config):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (0, LAST, LAST - 1)
    answer = model.generate(**tokenizer("w5 w9", return_tensors="pt"), max_new_tokens=20, do_sample=False)
    assert answer[0].tolist() == [5, 9, LAST]


@pytest.mark.parametrize("based", [True, False])
def test_generate_stops_at_the_end_token_of_the_runs_tokenizer_whatever_the_base_sets(
    tmp_path: Path, based: bool
) -> None:
    model = save_base(tmp_path / "base", eos_token_id=2, bos_token_id=1, tie_word_embeddings=False)
    save_tokenizer(tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    renumber_end(tmp_path / "tokenizer")
    base = BaseWeights.open(str(tmp_path / "base"))
    settings = {"weights": base.digest} if based else {}
    write_run(tmp_path / "run", base.shape, weights_that_predict_the_last_token(model), settings=settings)
    base_path = str(tmp_path / "base") if based else None
    export(str(tmp_path / "run"), tmp_path / "out", base=base_path, tokenizer=tmp_path / "tokenizer", precision=FLOAT32)
    assert_stops_at_end(tmp_path / "out")


TURNS = """{% for m in messages %}<|open|>{{ m['role'] }} {{ m['content'] }}<|close|>
{% endfor %}{% if add_generation_prompt %}<|open|>assistant {% endif %}"""


@pytest.mark.parametrize("tuned_with", ["the base's tokenizer", "one of its own"])
def test_generate_stops_at_the_end_of_a_turn_where_the_chat_template_has_another_than_eos(
    tmp_path: Path, tuned_with: str
) -> None:
    model = save_base(tmp_path / "base", eos_token_id=1, bos_token_id=0, tie_word_embeddings=False)
    folder = tmp_path / ("base" if tuned_with == "the base's tokenizer" else "own")
    save_tokenizer(folder, special_tokens=("<|close", "<|open|>", "<|close|>"), size=WORDS - 3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(folder)
    close = tokenizer.convert_tokens_to_ids("<|close|>")
    assert close == LAST, "the model predicts only this token"
    base = BaseWeights.open(str(tmp_path / "base"))
    write_run(
        tmp_path / "run", base.shape, weights_that_predict_the_last_token(model), settings={"weights": base.digest}
    )
    tokenizer_folder = None if folder.name == "base" else folder
    export(
        str(tmp_path / "run"),
        tmp_path / "out",
        base=str(tmp_path / "base"),
        tokenizer=tokenizer_folder,
        precision=FLOAT32,
    )
    tokenizer, model = (kind.from_pretrained(tmp_path / "out") for kind in (AutoTokenizer, AutoModelForCausalLM))
    assert model.generation_config.eos_token_id == [1, close]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w5"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert answer[0, prompt["input_ids"].shape[1] :].tolist() == [close]


@pytest.mark.parametrize(
    "template", ["{{ broken", "{{ raise_exception('no') }}", "{{ messages[0]['content'] }}", TEMPLATE]
)
def test_a_chat_template_without_an_end_of_turn_token_adds_no_eos_token(tmp_path: Path, template: str) -> None:
    root = write_tuned_run(tmp_path)
    (tmp_path / "base/chat_template.jinja").write_text(template)
    export(root, tmp_path / "out", base=str(tmp_path / "base"))
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [1, 2]


def test_a_model_without_a_tokenizer_has_no_end_token(tmp_path: Path) -> None:
    model = save_base(tmp_path / "base")
    shape = BaseWeights.open(str(tmp_path / "base")).shape
    write_run(tmp_path / "run", shape, dict(model.named_parameters()))
    export(str(tmp_path / "run"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.bos_token_id, model.config.eos_token_id) == (None, None)
    assert model.generation_config.eos_token_id is None


def test_merging_keeps_the_tokenizer_of_the_adapter(tmp_path: Path) -> None:
    run = save_tuned(tmp_path, base={"tie_word_embeddings": False}, trainable=["lm_head", "embed_tokens", "model.norm"])
    run.base.load_state_dict(weights_that_predict_the_last_token(run.base))
    run.base.save_pretrained(tmp_path / "base")
    ends = {name: value for name, value in weights_that_predict_the_last_token(run.base).items() if name in run.trained}
    trained = {name: ends.get(name, torch.zeros_like(value)) for name, value in run.trained.items()}
    settings = {"weights": run.weights.digest, "tuning": run.config.tuning.to_wire()}
    write_run(tmp_path / "second", run.shape, trained, settings=settings)
    save_tokenizer(tmp_path / "base")
    renumber_end(tmp_path / "tokenizer")
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    tokenizer = tmp_path / "tokenizer"
    export(str(tmp_path / "second"), adapter, base=base, tokenizer=tokenizer, kind=ArtifactKind.ADAPTER)
    merge(base, adapter, tmp_path / "out", precision=FLOAT32)
    assert_stops_at_end(tmp_path / "out")
    save_tokenizer(tmp_path / "adapter", size=100)
    with pytest.raises(UserError, match=r"its tokenizer has 100 entries, but the model at --base has 72 rows"):
        merge(base, adapter, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_converted_nxd_model_is_exported_with_its_end_token(tmp_path: Path) -> None:
    from trainium_trainer.checkpoint.whole_tensors import TensorSource, write_whole
    from trainium_trainer.storage import open_storage
    from trainium_trainer.storage.protocol import Retry

    model = save_base(tmp_path / "base", tie_word_embeddings=False)
    shape = BaseWeights.open(str(tmp_path / "base")).shape
    renumber_end(tmp_path / "tokenizer")
    sources = [
        TensorSource(f"model.{name}", tensor.dtype, tensor.shape, tensor.detach)
        for name, tensor in weights_that_predict_the_last_token(model).items()
    ]
    position = Position(step=3, samples=24, tokens=300)
    # Like `convert from-nxd`: the only setting is the shape of the model.
    write_whole(open_storage(str(tmp_path / "run")), sources, position, {"model": shape.to_json()}, Retry())
    export(str(tmp_path / "run"), tmp_path / "out", tokenizer=tmp_path / "tokenizer", precision=FLOAT32)
    assert_stops_at_end(tmp_path / "out")


def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    root = write_tuned_run(tmp_path)
    save_tokenizer(tmp_path / "large", size=100)
    with pytest.raises(UserError, match=r"has 100 entries, but the model has 72: name the tokenizer that"):
        export(root, tmp_path / "out", tokenizer=tmp_path / "large")
    assert not (tmp_path / "out").exists()


def test_the_card_shows_settings_data_losses_and_the_time_in_steps(tmp_path: Path) -> None:
    run = save_tuned(tmp_path, lora={"dropout": 0.1})
    lines = [{"step": n, "loss": 4.0 / n, "timeInSteps": 0.875, "time": 0.0} for n in range(1, 21)]
    lines[6]["validationLoss"] = 0.75
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 21, "lo'
    (tmp_path / "run/metrics.jsonl").write_text(text)
    export(run.root, tmp_path / "out", base=str(tmp_path / "base"), kind=ArtifactKind.ADAPTER)
    card = (tmp_path / "out/README.md").read_text()
    head = card.split("---")[1]
    assert 'library_name: "peft"' in head
    assert f'base_model: "{tmp_path / "base"}"' in head
    for line in (
        "# LoRA adapter of step 7",
        "| LoRA | rank 4, alpha 12 |",
        "| LoRA dropout | 0.1 |",
        f"| digest of the data | {'d' * 64} |",
        f"| digest of the base | {run.weights.digest} |",
        "| 1 | 4.0000 |",
        "| 7 | 0.5714 |",
        "Loss on held-back data after step 7: 0.7500.",
        "Time in steps of this history, of all time since the first step: 87.5 %.",
    ):
        assert line in card
    assert "\n| 8 | 0" not in card  # a later step is not in this artifact


def test_an_evaluation_is_put_into_the_card_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    export(write_tuned_run(tmp_path), tmp_path / "out")
    out = str(tmp_path / "out")
    before = (tmp_path / "out/README.md").read_text()
    add_evaluation(out, "| a | b |\n|---|---|\n| 1 | 2 |\n")
    add_evaluation(out, "| accuracy | 0.9 |\n")
    card = (tmp_path / "out/README.md").read_text()
    assert card.count("## Evaluation") == 1
    assert "| accuracy | 0.9 |" in card
    assert "| 1 | 2 |" not in card
    add_evaluation(out, "")
    assert len((tmp_path / "out/README.md").read_text()) < len(card)
    assert before.split("<!--")[0] == card.split("<!--")[0]
    (tmp_path / "out/README.md").write_text("mine")
    add_evaluation(out, "| accuracy | 0.9 |\n")
    assert (tmp_path / "out/README.md").read_text() == "mine"
    add_evaluation(str(tmp_path / "nowhere"), "x")
    assert not (tmp_path / "nowhere").exists()
