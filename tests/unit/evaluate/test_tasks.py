"""Measure models with lm-eval, compare with `lm_eval run` on the same folders, and refuse bad input.

Tests of tasks need lm-eval (`make test-tasks`) and are skipped without it.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.testing.suite.timeouts import scaled
from trainium_contract.status.results import EvaluationFigure, RunResults, read_results
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.cli import run
from trainium_trainer.evaluate.answering.folder import ModelLocations
from trainium_trainer.evaluate.report import EvaluationResult
from trainium_trainer.evaluate.stage import RunEvaluation, refuse_unmeasurable
from trainium_trainer.exits import UserError
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_trainer.peers import Peers

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="lm-eval is not installed")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def models(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tuple(write_model(folder / f"m{seed}", seed=seed, max_position_embeddings=256) for seed in (1, 2))  # type: ignore[return-value]


def run_lm_eval(model: Path, tasks_folder: Path, output: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the command of lm-eval and return its results and samples."""
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "4"),
        *("--model_args", f"pretrained={model},dtype=float32", "--tasks", "tiny_choice,tiny_copy"),
        *("--num_fewshot", "2", "--include_path", str(tasks_folder), "--output_path", str(output), "--log_samples"),
    ]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # to round as in this process
    subprocess.run(command, check=True, timeout=scaled(300), capture_output=True, env=one_thread)
    (results,) = output.rglob("results_*.json")
    samples = [
        {"task": task, **json.loads(line)}
        for task in ("tiny_choice", "tiny_copy")
        for file in output.rglob(f"samples_{task}_*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return json.loads(results.read_text())["results"], samples


@needs_harness
def test_figures_and_samples_are_those_of_lm_eval_run(
    models: tuple[Path, Path], tasks_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    code = run(
        [
            *("evaluate", str(models[1]), "--base", str(models[0]), "--tasks", "tiny_choice, tiny_copy"),
            *("--shots", "2", "--batch-size", "4", "--include-path", str(tasks_folder), "--device", "cpu"),
            *("--output", str(output), "--keep-samples", "--markdown", str(tmp_path / "table.md")),
        ]
    )
    output_texts = capfd.readouterr()
    assert code == 0, output_texts.err
    report = json.loads(output.read_text())
    samples = [json.loads(line) for line in (tmp_path / "result.samples.jsonl").read_text().splitlines()]
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert output_texts.out.splitlines() == rows
    assert rows[0] == f"| task | measure | shots | questions | {models[0]} | {models[1]} |"
    for number, model in enumerate(models):
        results, expected = run_lm_eval(model, tasks_folder, tmp_path / f"by-hand-{number}")
        figures = {(figure["task"], figure["metric"]): figure for figure in report["models"][number]["figures"]}
        assert set(figures) == {("tiny_choice", "acc"), ("tiny_choice", "acc_norm"), ("tiny_copy", "exact_match")}
        for (task, metric), figure in figures.items():
            assert figure["value"] == results[task][f"{metric},none"]
            assert figure["standardError"] == results[task][f"{metric}_stderr,none"]
            assert (figure["shots"], figure["questions"]) == (2, results[task]["sample_len"])
            row = next(row for row in rows if row.startswith(f"| {task} | {metric} |"))
            assert f"{figure['value']:.4f} ± {figure['standardError']:.4f}" in row.split(" | ")[4 + number]
        of_model = [sample for sample in samples if sample["model"] == str(model)]
        for sample, reference in zip(of_model, expected, strict=True):
            assert [sample[key] == reference[key] for key in ("task", "doc_id", "prompt_hash")] == [True] * 3
            responses = [text if isinstance(text, str) else [*map(str, text)] for text in sample["filtered_resps"]]
            assert responses == reference["filtered_resps"]


@needs_harness
def test_a_group_is_measured_by_its_tasks_and_an_adapter_as_its_merged_model(
    models: tuple[Path, Path], tasks_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(5)
    tuned = get_peft_model(
        LlamaForCausalLM.from_pretrained(models[0], dtype=torch.float32),
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "merged" / name).write_bytes((models[0] / name).read_bytes())
    common = ("--tasks", "tiny", "--include-path", str(tasks_folder), "--device", "cpu", "--limit", "20", "--seed", "7")
    adapter = ("--base", str(models[0]), "--adapter", str(tmp_path / "adapter"))
    assert run(["evaluate", *adapter, *common, "--output", str(tmp_path / "a.json")]) == 0
    assert run(["evaluate", str(tmp_path / "merged"), *common, "--output", str(tmp_path / "b.json")]) == 0
    table = capfd.readouterr().out
    assert "| tiny | acc | 0 | 20 |" in table
    assert "| tiny_choice |" not in table, "the table names the group, not its tasks"
    (_, with_adapter), (merged,) = (
        json.loads((tmp_path / name).read_text())["models"] for name in ("a.json", "b.json")
    )
    assert with_adapter["model"] == f"{models[0]} with {tmp_path / 'adapter'}"
    assert with_adapter["figures"] == merged["figures"]
    assert {(figure["task"], figure["part"]) for figure in merged["figures"]} == {
        ("tiny", False),
        ("tiny_choice", True),
    }


@needs_harness
def test_reported_artifacts_are_measured_again_only_after_changes_of_the_tasks(
    models: tuple[Path, Path], tasks_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks_copy = shutil.copytree(tasks_folder, tmp_path / "tasks")
    steps = [shutil.copytree(model, tmp_path / f"step-{number}") for number, model in enumerate(models)]
    for step in steps:
        (step / "artifact.json").write_text(json.dumps({"step": step.name}))
    common = ("--tasks", "tiny_choice", "--include-path", str(tasks_copy), "--device", "cpu", "--limit", "10")
    command = ["evaluate", *common, "--output", str(tmp_path / "steps.json")]
    assert run([*command, str(steps[0])]) == 0
    (first,) = json.loads((tmp_path / "steps.json").read_text())["models"]
    (steps[0] / "model.safetensors").unlink()
    assert run([*command, *map(str, steps)]) == 0, "the weights of the first step are not needed"
    unchanged, second = json.loads((tmp_path / "steps.json").read_text())["models"]
    assert unchanged == first
    assert second["model"] == str(steps[1])
    for file in tasks_copy.rglob("*.yaml"):
        file.write_text(file.read_text() + "# changed\n")
    capfd.readouterr()
    assert run([*command, *map(str, steps)]) == 64
    assert "there is no safetensors file" in capfd.readouterr().err


@needs_harness
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tasks", "tiny_choise"], "tiny_choise: lm-eval has no such task or group: did you mean tiny_choice"),
        (["--tasks", "tiny_copy,gsm8k"], "cannot be loaded (Couldn't reach 'openai/gsm8k' on the Hub"),
        (["--tasks", "broken"], "tasks broken: cannot be loaded"),
        (["--tasks", "tiny_copy", "--include-path", "/nowhere"], "/nowhere: there is no such folder"),
    ],
)
def test_unknown_or_unreachable_tasks_are_refused_in_a_sentence(
    models: tuple[Path, Path], tasks_folder: Path, tmp_path: Path, options: list[str], sentence: str
) -> None:
    """Run in a separate process: the library of the hub reads HF_HUB_OFFLINE when it is imported."""
    copy_task = (tasks_folder / "copy.yaml").read_text()
    broken_task = copy_task.replace("copy.jsonl", "absent.jsonl").replace("tiny_copy", "broken")
    (tasks_folder / "broken.yaml").write_text(broken_task)
    command = [
        sys.executable,
        "-m",
        "trainium_trainer",
        "evaluate",
        str(models[0]),
        "--include-path",
        str(tasks_folder),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    completed = subprocess.run(
        [*command, *options], check=False, capture_output=True, text=True, timeout=scaled(170), env=environment
    )
    assert (completed.returncode, len(completed.stderr.splitlines())) == (64, 1), completed.stderr
    assert sentence in completed.stderr


@pytest.mark.skipif(HAS_HARNESS, reason="lm-eval is installed")
def test_without_the_harness_a_sentence_names_what_to_install(
    models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", str(models[0]), "--tasks", "gsm8k"]) == 64
    assert "pip install 'trainium-trainer[tasks]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["MODEL"], "give --config"),
        (["MODEL", "MODEL", "--config", "run.yaml"], "several models are compared by --tasks alone"),
        (["--tasks", "tiny_copy"], "give a MODEL folder"),
        (["MODEL", "--tasks", "tiny_copy", "--shots", "-1"], "shots is -1"),
        (["MODEL", "--tasks", " , "], "names"),
        (["MODEL", "--tasks", "tiny_copy", "--keep-samples"], "--keep-samples goes with --output"),
        (["MODEL", "--tasks", "tiny_copy", "--config", "run.yaml"], "give one of them"),
    ],
)
def test_conflicting_arguments_are_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", *arguments]) == 64
    assert sentence in capsys.readouterr().err


@needs_harness
def test_the_last_stage_of_a_run_measures_tasks_once(
    models: tuple[Path, Path], tasks_folder: Path, tmp_path: Path
) -> None:
    config = TrainingConfig.model_validate(
        {
            "data": {"source": "absent", "sequenceLength": 32},
            "evaluate": {
                "enabled": True,
                "tasks": {"names": ["tiny_choice"], "includePath": str(tasks_folder), "limit": 9, "keepSamples": True},
            },
        }
    )

    def run_stage() -> EvaluationResult:
        return RunEvaluation(
            config=config,
            models=ModelLocations(model=str(models[1]), base=str(models[0])),
            peers=Peers(rank=0, size=1),
            progress=ProgressWriter(tmp_path / "progress"),
            output=str(tmp_path / "out"),
        ).run()

    result = run_stage()
    first, second = result.tasks.models
    expected = [("tiny_choice acc", first.figures[0].value, second.figures[0].value)]
    assert [(figure.name, figure.before, figure.after) for figure in result.figures][:1] == expected
    assert read_results(tmp_path / "progress").evaluation == result.figures
    table = (tmp_path / "out/evaluation.md").read_text()
    assert table == result.to_markdown()
    assert f"| tiny_choice | acc | 0 | 9 | {first.figures[0].value:.4f} ± " in table
    assert len((tmp_path / "out/task-samples.jsonl").read_text().splitlines()) == 2 * 9
    written = (tmp_path / "out/evaluation.json").stat().st_mtime_ns
    assert run_stage() == result
    assert (tmp_path / "out/evaluation.json").stat().st_mtime_ns == written


@needs_harness
def test_the_command_measures_the_tasks_of_a_configuration_once(
    models: tuple[Path, Path], tasks_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"names": ["tiny_choice", "tiny_copy"], "includePath": str(tasks_folder), "limit": 9}
    config, output, message = (tmp_path / name for name in ("run.yaml", "milestone.json", "message"))
    config.write_text(json.dumps({"data": {"source": "absent"}, "evaluate": {"tasks": tasks}}))
    model = tmp_path / "model"
    shutil.copytree(models[1], model)
    (model / "artifact.json").write_text("{}")
    argv = ["evaluate", str(model), "--config", str(config), "--output", str(output), "--message", str(message)]
    assert run(argv) == 0
    result = json.loads(output.read_text())
    measured = result["tasks"]["models"][0]["figures"]
    assert json.loads(message.read_text())["evaluation"] == [
        {
            "name": f"{figure['task']} {figure['metric']}",
            "after": figure["value"],
            "standardError": figure["standardError"],
        }
        for figure in measured
    ]
    monkeypatch.setattr("trainium_trainer.evaluate.tasks._run_harness", None)
    assert run(argv) == 0
    assert json.loads(output.read_text()) == result


def test_a_message_leaves_out_figures_beyond_the_limit_of_the_kubelet() -> None:
    figures = tuple(EvaluationFigure(name=f"{digit}" * 190, after=1 / 3, standard_error=1 / 7) for digit in range(10))
    message = EvaluationResult(model="m", examples=0, figures=figures * 2).format_message()
    assert 3500 < len(message) <= 4096
    kept = RunResults.model_validate_json(message).evaluation
    assert kept == (figures * 2)[: len(kept)]


@pytest.mark.skipif(HAS_HARNESS, reason="lm-eval is installed")
def test_a_run_that_could_not_measure_its_tasks_is_refused_at_its_start() -> None:
    refuse_unmeasurable("neuron")
    with pytest.raises(UserError, match=r"pip install 'trainium-trainer\[tasks\]'"):
        refuse_unmeasurable("cpu")
