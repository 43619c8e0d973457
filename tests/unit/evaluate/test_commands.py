"""Run `generate` and `evaluate` on instructions and classes, with a model that has learned its answers."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.cli import run
from trainium_trainer.evaluate.held_out import read_held_out_examples

_WORDS = ("gradient", "loss", "step", "batch", "token", "shard", "rank", "node", "mesh", "state")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft and transformers


def _train_on_answers(base: Path, folder: Path, config: TrainingConfig, steps: int) -> Path:
    """Train the base on the held-back examples, so that it answers them all."""
    from transformers import LlamaForCausalLM

    network = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    examples = read_held_out_examples(config.data, 100).examples
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for step in range(steps):
        example = examples[step % len(examples)]
        ids = torch.tensor([example.prompt_ids + example.answer_ids])
        labels = ids.clone()
        labels[0, : len(example.prompt_ids)] = -100
        optimizer.zero_grad()
        network(ids, labels=labels).loss.backward()
        optimizer.step()
    network.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    return folder


class EvaluatedRun:
    """A configuration, its base and its tuned model."""

    def __init__(
        self, folder: Path, write_model: Callable[..., Path], data: dict[str, Any], records: list[Any]
    ) -> None:
        from trainium_trainer.configuration.config import load

        self.base = write_model(folder / "base", max_position_embeddings=128)
        (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        document = {
            "data": {
                "source": str(folder / "data.jsonl"),
                "sequenceLength": 96,
                "tokenizer": {"path": str(self.base / "tokenizer.json")},
                "cacheDirectory": str(folder / "cache"),
                "validation": {"fraction": 0.25, "split": "Tail"},
                **data,
            },
            "evaluate": {"samples": 8, "generation": {"maxNewTokens": 12, "batchSize": 3}},
        }
        self.file = folder / "run.yaml"
        self.file.write_text(yaml.safe_dump(document))
        self.config = load(self.file)
        self.tuned = _train_on_answers(self.base, folder / "tuned", self.config, 240)


@pytest.fixture(scope="module")
def instruction(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> EvaluatedRun:
    records = [
        {"instruction": f"Say {word} {number}.", "context": "", "response": f"{word} {number}"}
        for number in range(4)
        for word in _WORDS[:4]
    ]
    return EvaluatedRun(tmp_path_factory.mktemp("instruction"), write_model, {"format": "Instruction"}, records)


@pytest.fixture(scope="module")
def classification(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> EvaluatedRun:
    records = [
        {"question": f"Is it {word}?", "sentence": f"It is {_WORDS[index]}.", "label": int(word != _WORDS[index])}
        for index in range(5)
        for word in (_WORDS[index], _WORDS[index + 1])
    ]
    data = {"format": "Classification", "validation": {"fraction": 0.4, "split": "Tail"}}
    return EvaluatedRun(tmp_path_factory.mktemp("classification"), write_model, data, records)


def test_a_tuned_model_gives_the_answers_of_the_records_and_its_base_does_not(
    instruction: EvaluatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, markdown = tmp_path / "new" / "result.json", tmp_path / "result.md"
    argv = ["evaluate", str(instruction.tuned), "--base", str(instruction.base), "--config", str(instruction.file)]
    assert run([*argv, "--output", str(output), "--markdown", str(markdown)]) == 0
    printed = capsys.readouterr().out
    assert markdown.read_text() == printed
    assert printed.startswith("| figure | before | after |\n|---|---:|---:|\n| perplexity of the answers | ")
    result = json.loads(output.read_text())
    figures = {figure["name"]: figure for figure in result["figures"]}
    assert set(figures) == {"perplexity", "exactMatch", "rougeL"}
    assert figures["perplexity"]["after"] < 1.5
    assert figures["perplexity"]["before"] > 50
    assert figures["exactMatch"]["before"] == 0
    assert figures["exactMatch"]["after"] == pytest.approx(
        sum(answer["expected"] == answer["after"] for answer in result["answers"]) / result["examples"]
    )
    assert figures["exactMatch"]["after"] > 0.9
    assert figures["rougeL"]["after"] > 0.9
    assert result["examples"] == 4
    assert result["answers"][0]["prompt"].startswith("### Instruction\nSay ")
    message = tmp_path / "message"
    assert run([*argv, "--output", str(tmp_path / "again.json"), "--message", str(message)]) == 0
    assert (tmp_path / "again.json").read_text() == output.read_text()
    assert json.loads(message.read_text()) == {"evaluation": result["figures"]}
    scores = [answer["expected"] == answer["after"] for answer in result["answers"]]
    error = statistics.stdev(scores) / math.sqrt(len(scores))
    assert figures["exactMatch"]["standardError"] == pytest.approx(error)
    assert "standardError" not in figures["perplexity"]


def test_the_likeliest_label_and_the_generated_one_are_counted(classification: EvaluatedRun, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    argv = ["evaluate", str(classification.tuned), "--config", str(classification.file), "--output", str(output)]
    assert run([*argv, "--base", str(classification.base)]) == 0
    figures = {figure["name"]: figure for figure in json.loads(output.read_text())["figures"]}
    assert set(figures) == {"perplexity", "accuracy", "generatedAccuracy", "exactMatch"}
    assert figures["accuracy"]["after"] == 1.0
    expected = {"name": "generatedAccuracy", "before": 0.0, "after": 1.0, "standardError": 0.0}
    assert figures["generatedAccuracy"] == expected


def test_the_likeliest_label_has_the_likeliest_tokens_after_the_prompt(classification: EvaluatedRun) -> None:
    from trainium_contract.accelerators import Device
    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.evaluate.answering.folder import open_model_files
    from trainium_trainer.evaluate.answering.generation import group_by_length
    from trainium_trainer.evaluate.answering.loading import load
    from trainium_trainer.evaluate.scoring import score_model

    held_out = read_held_out_examples(classification.config.data, 8)
    model = load(open_model_files(classification.base), device=Device.CPU)
    batches = group_by_length([len(example.prompt_ids) for example in held_out.examples], 3)
    scores = score_model(model, held_out, batches, GenerationConfig(max_new_tokens=1))
    for score in scores:
        example = held_out.examples[score.number]
        sums = []
        for label in held_out.labels:
            ids = list(example.prompt_ids) + model.folder.encode(f" {label}")
            with torch.no_grad():
                logs = model.network(torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(float(logs[index - 1, ids[index]]) for index in range(len(example.prompt_ids), len(ids))))
        assert score.label_is_likeliest == (sums.index(max(sums)) == example.label)
        assert example.answer == f" {held_out.labels[example.label or 0]}"


def _generate(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["generate", *argv, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_prompts_have_the_template_of_the_training_data(
    instruction: EvaluatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = _generate([str(instruction.tuned), "--config", str(instruction.file), "--held-out", "2"], capsys)
    assert [line["answer"] for line in held_out] == [line["expected"] for line in held_out]
    expected = held_out[0]["expected"]
    (single,) = _generate(
        [str(instruction.tuned), "--config", str(instruction.file), "--prompt", f"Say {expected}."], capsys
    )
    assert (single["prompt"], single["answer"]) == (held_out[0]["prompt"], expected)
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        json.dumps({"instruction": f"Say {expected}.", "context": None}) + "\n" + json.dumps(f"Say {expected}."),
        encoding="utf-8-sig",
    )
    both = _generate([str(instruction.tuned), "--config", str(instruction.file), "--prompts", str(file)], capsys)
    assert [line["answer"] for line in both] == [expected, expected]


def test_a_prompt_without_a_configuration_is_not_changed(
    instruction: EvaluatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("gradient loss\n\nstep\n", encoding="utf-8-sig")  # as Windows writes it
    lines = _generate(
        [str(instruction.tuned), "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "3"], capsys
    )
    assert [line["prompt"] for line in lines] == ["gradient loss", "step"]
    assert all(line["tokens"] <= 3 for line in lines)
    assert run(["generate", str(instruction.tuned), "--prompt", "step", "--max-new-tokens", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("[1] prompt\nstep\n[1] answer (")
    assert lines[1]["answer"] in text


def test_an_unmerged_adapter_changes_answers_and_figures(
    instruction: EvaluatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    network = get_peft_model(
        LlamaForCausalLM.from_pretrained(instruction.base), LoraConfig(r=2, target_modules=["v_proj"])
    )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    network.save_pretrained(tmp_path / "adapter")
    both = ["--base", str(instruction.base), "--adapter", str(tmp_path / "adapter"), "--max-new-tokens", "5"]
    (with_adapter,) = _generate([*both, "--prompt", "gradient"], capsys)
    (plain,) = _generate([str(instruction.base), "--prompt", "gradient", "--max-new-tokens", "5"], capsys)
    assert with_adapter["answer"] != plain["answer"]
    output = tmp_path / "result.json"
    assert run(["evaluate", *both, "--config", str(instruction.file), "--output", str(output)]) == 0
    figure = json.loads(output.read_text())["figures"][0]
    assert not math.isclose(figure["before"], figure["after"])


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["generate", "MODEL"], "give what is to be answered: one of --prompt, --prompts and --held-out"),
        (["generate", "MODEL", "--prompt", "a", "--held-out", "3"], "one of --prompt, --prompts and --held-out"),
        (["generate", "MODEL", "--held-out", "3"], "--held-out needs --config"),
        (["generate", "--prompt", "a"], "give a MODEL folder, or --base and --adapter"),
        (["generate", "MODEL", "--base", "MODEL", "--prompt", "a"], "--base goes with --adapter"),
        (["generate", "MODEL", "--adapter", "MODEL", "--prompt", "a"], "--adapter goes with --base"),
        (["generate", "MODEL", "--prompt", "a", "--temperature", "-1"], "temperature is -1.0: use"),
        (["generate", "MODEL", "--prompt", "a", "--top-p", "1.5"], "topP is 1.5: use"),
        (["generate", "MODEL", "--prompt", ""], "prompt 1 has no tokens"),
        (["generate", "MODEL", "--prompts", "EMPTY"], "holds no prompt: write one on each line"),
        (
            ["generate", "MODEL", "--prompts", "FIELDS"],
            "has no text 'prompt' (its fields: 'instruction'): give --config",
        ),
        (["generate", "MODEL", "--prompts", "BROKEN"], "line 2: not valid JSON"),
        (["generate", "MODEL", "--prompts", "NUMBER"], "line 1: is neither a text nor an object: write"),
        (["generate", "MODEL", "--prompts", "NOTHING"], "cannot be read (No such file or directory)"),
        (["generate", "MODEL", "--config", "CONFIG", "--prompts", "OTHER"], "has no field 'instruction'"),
        (["generate", "NOTHING", "--prompt", "a"], "there is no such folder"),
        (["generate", "MODEL", "--prompt", "LONG"], "positions, of which an answer needs one: shorten the prompt"),
        (["evaluate", "MODEL", "--config", "CONFIG", "--set", "data.validation=null"], "data.validation is not given"),
        (["evaluate", "MODEL", "--config", "CONFIG", "--set", "data.format=Prose"], "data.format is 'Prose'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    instruction: EvaluatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    files = {
        "EMPTY": ("empty.txt", "\n \n"),
        "FIELDS": ("fields.jsonl", '{"instruction": "a"}\n'),
        "BROKEN": ("broken.jsonl", '"a"\n{"a"\n'),
        "NUMBER": ("number.jsonl", "7\n"),
        "OTHER": ("other.jsonl", '{"question": "a"}\n'),
    }
    names = {"MODEL": str(instruction.tuned), "CONFIG": str(instruction.file), "NOTHING": str(tmp_path / "nothing")}
    names["LONG"] = "step " * 200
    for key, (name, text) in files.items():
        (tmp_path / name).write_text(text)
        names[key] = str(tmp_path / name)
    assert run([names.get(argument, argument) for argument in argv]) == 64
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert sentence in line
