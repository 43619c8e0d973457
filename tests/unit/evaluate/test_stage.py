"""Evaluate as the last stage of a job, on one rank and on several: figures, files, reports, a second start."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.fork_server import fork_context
from tests.testing.trainer.s3_gateway import run_gateway
from trainium_contract.status.results import ArtifactReport, RunStage, read_results
from trainium_contract.trainer.config import TrainingConfig
from trainium_devcluster.ports import reserve_port
from trainium_trainer.evaluate.answering.folder import ModelLocations
from trainium_trainer.evaluate.report import EvaluationResult
from trainium_trainer.evaluate.stage import RunEvaluation, evaluate_artifacts
from trainium_trainer.exits import UserError
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_trainer.peers import Peers
from trainium_worker.progress_record import read_progress


@pytest.fixture(scope="module")
def models(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("stage")
    return {name: str(write_model(folder / name, seed=seed)) for seed, name in enumerate(("base", "tuned"))}


@pytest.fixture
def config(tmp_path: Path, models: dict[str, str]) -> TrainingConfig:
    words = ("gradient", "loss", "step", "batch", "token", "shard", "rank", "node")
    (tmp_path / "text.txt").write_text("".join(f"{words[n % 8]} {words[n % 5]} {words[n % 3]}.\n" for n in range(300)))
    return TrainingConfig.model_validate(
        {
            "data": {
                "source": str(tmp_path / "text.txt"),
                "sequenceLength": 32,
                "tokenizer": {"path": f"{models['base']}/tokenizer.json"},
                "cacheDirectory": str(tmp_path / "cache"),
                "validation": {"fraction": 0.3, "split": "Tail"},
            },
            "evaluate": {"enabled": True, "samples": 11, "generation": {"batchSize": 4}},
        }
    )


def with_fields(config: TrainingConfig, section: str, **fields: Any) -> TrainingConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=fields)})


def run_stage(
    config: TrainingConfig, models: dict[str, str], folder: Path, peers: Peers | None = None, **fields: Any
) -> Any:
    return RunEvaluation(
        config=config,
        models=ModelLocations(model=models["tuned"], base=models["base"]),
        peers=peers or Peers(rank=0, size=1),
        progress=ProgressWriter(folder.with_name("progress")),
        output=str(folder),
        **fields,
    ).run()


def test_the_perplexity_of_running_text_is_that_of_the_training_model(
    config: TrainingConfig, models: dict[str, str], tmp_path: Path
) -> None:
    import torch

    from trainium_trainer.data.dataset import open_data
    from trainium_trainer.evaluate.check_folder import compute_logits
    from trainium_trainer.weights.base import BaseWeights

    result = run_stage(config, models, tmp_path / "out")
    data = open_data(config.data, 1)
    total, count = 0.0, 0
    for sample in data.validation.read_rank_samples(0, 1)[:11]:
        (row,) = sample.list_rows(data.validation.rules)
        inputs, targets = (torch.tensor(part.astype("int64")) for part in (row.inputs, row.targets))
        logits = compute_logits(BaseWeights.open(models["tuned"]), inputs[None])
        total += float(torch.nn.functional.cross_entropy(logits[0], targets, reduction="sum"))
        count += len(targets)
    (figure,) = result.figures
    assert (figure.name, result.answer_tokens) == ("perplexity", count)
    assert figure.after == pytest.approx(math.exp(total / count), rel=1e-5)
    assert figure.before is not None
    assert figure.before != figure.after


def test_the_result_is_written_and_reported(config: TrainingConfig, models: dict[str, str], tmp_path: Path) -> None:
    result = run_stage(config, models, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["figures"] == [figure.to_wire() for figure in result.figures]
    table = (tmp_path / "out" / "evaluation.md").read_text().splitlines()
    assert table[0] == "| figure | before | after |"
    assert table[2] == f"| perplexity of the answers | {result.figures[0].before:.4f} | {result.figures[0].after:.4f} |"
    assert read_results(tmp_path / "progress").evaluation == result.figures
    record = read_progress(tmp_path / "progress")
    assert (record.stage, record.stage_progress) == (RunStage.EVALUATE, 1.0)


def test_an_evaluation_is_repeated_only_for_other_settings(
    config: TrainingConfig, models: dict[str, str], tmp_path: Path
) -> None:
    first = run_stage(config, models, tmp_path / "out")
    file = tmp_path / "out" / "evaluation.json"
    document = json.loads(file.read_text())
    document["figures"][0]["after"] = 7.0  # no second measurement gives this
    file.write_text(json.dumps(document))
    assert run_stage(config, models, tmp_path / "out").figures[0].after == 7.0
    assert read_results(tmp_path / "progress").evaluation[0].after == 7.0
    other = with_fields(config, "evaluate", samples=3)
    repeated = run_stage(other, models, tmp_path / "out")
    assert repeated.figures[0].after != 7.0
    assert repeated.identity != first.identity
    file.write_text("{")
    assert run_stage(config, models, tmp_path / "out") == first


def test_only_the_result_is_measured_when_before_is_off(
    config: TrainingConfig, models: dict[str, str], tmp_path: Path
) -> None:
    without_before = with_fields(config, "evaluate", before=False)
    result = run_stage(without_before, models, tmp_path / "out")
    assert result.base is None
    assert result.figures[0].before is None
    assert result.to_markdown().startswith("| figure | after |\n|---|---:|\n")


def test_a_result_that_equals_its_base_is_noted(config: TrainingConfig, models: dict[str, str], tmp_path: Path) -> None:
    result = run_stage(config, {"tuned": models["base"], "base": models["base"]}, tmp_path / "out")
    assert any("left no trace" in note for note in result.notes)


def test_a_result_that_is_not_finite_is_noted(config: TrainingConfig, models: dict[str, str], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(models["tuned"], broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    result = run_stage(config, models | {"tuned": str(broken)}, tmp_path / "out")
    assert any("not finite" in note for note in result.notes)
    assert result.figures[0].after is None
    assert "| - |" in result.to_markdown()


def test_without_transformers_the_trained_model_computes_the_perplexity(
    config: TrainingConfig, models: dict[str, str], tmp_path: Path
) -> None:
    result = run_stage(config, models, tmp_path / "out", device="xla", trained_loss=math.log(3.5))
    assert [(figure.name, figure.before, figure.after) for figure in result.figures] == [
        ("perplexity", None, pytest.approx(3.5))
    ]
    assert len(result.notes) == 1
    unchanged = run_stage(config, {"tuned": models["base"], "base": models["base"]}, tmp_path / "same", device="xla")
    assert any("left no trace" in note for note in unchanged.notes)


def test_without_held_back_data_the_error_names_the_missing_field(
    config: TrainingConfig, models: dict[str, str], tmp_path: Path
) -> None:
    without_validation = with_fields(config, "data", validation=None)
    with pytest.raises(UserError, match=r"data\.validation is not given"):
        run_stage(without_validation, models, tmp_path / "out")
    assert not (tmp_path / "out" / "evaluation.json").exists()


CARD = "# Model\n<!-- evaluation -->\n<!-- end of evaluation -->\nThe end.\n"


def evaluate_model(config: TrainingConfig, base: str, model: str) -> EvaluationResult:
    """Evaluate the artifact `model` of a run."""
    return evaluate_artifacts(
        with_fields(config, "model", weights=base),
        [ArtifactReport(kind="Model", path=model, step=7)],
        peers=Peers(rank=0, size=1),
        progress=ProgressWriter(None),
    )


def test_a_result_in_a_bucket_is_evaluated_and_its_card_completed_there(
    config: TrainingConfig, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_gateway(tmp_path, monkeypatch) as server:
        for file in Path(models["tuned"]).iterdir():
            server.put("bucket", f"run/model/{file.name}", file.read_bytes())
        server.put("bucket", "run/model/README.md", CARD.encode())
        remote = evaluate_model(config, models["base"], "s3://bucket/run/model")
        objects = server.objects("bucket")
        with pytest.raises(UserError, match=r"s3://bucket/nothing"):
            run_stage(config, models | {"tuned": "s3://bucket/nothing"}, tmp_path / "none")
    assert objects["run/evaluation.md"].decode() == remote.to_markdown()
    assert objects["run/evaluation.json"].decode() == remote.to_json()
    card = objects["run/model/README.md"].decode()
    assert remote.to_markdown().strip() in card
    assert card.endswith("The end.\n")
    assert remote.figures == run_stage(config, models, tmp_path / "out").figures


def test_the_table_is_in_the_cards_of_the_artifacts(
    config: TrainingConfig, models: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "artifacts" / "step-7"
    shutil.copytree(models["tuned"], folder / "model")
    card = folder / "model" / "README.md"
    card.write_text(CARD)
    result = evaluate_model(config, models["base"], str(folder / "model"))
    assert result.base == models["base"]
    assert (folder / "evaluation.md").read_text() == result.to_markdown()
    assert result.to_markdown().strip() in card.read_text()
    assert card.read_text().endswith("The end.\n")


def test_a_run_without_artifacts_is_not_measured(config: TrainingConfig) -> None:
    single = Peers(rank=0, size=1)
    assert evaluate_artifacts(config, [], peers=single, progress=ProgressWriter(None)) is None


def _run_rank(rank: int, size: int, port: int, config: TrainingConfig, models: dict[str, str], folder: Path) -> None:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    result = run_stage(config, models, folder / str(rank) / "out", Peers.open(rank, size, rank))
    (folder / f"result-{rank}.json").write_text(result.to_json())
    dist.destroy_process_group()


@pytest.mark.long
def test_ranks_that_share_the_questions_have_the_result_of_one(
    config: TrainingConfig, models: dict[str, str], tmp_path: Path
) -> None:
    size = 2
    expected = run_stage(config, models, tmp_path / "alone" / "out")
    port = reserve_port()
    server = fork_context()
    processes = [
        server.Process(target=_run_rank, args=(rank, size, port, config, models, tmp_path), daemon=True)
        for rank in range(size)
    ]
    for rank in range(size):
        (tmp_path / str(rank)).mkdir()
        processes[rank].start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for rank in range(size):
        assert (tmp_path / f"result-{rank}.json").read_text() == expected.to_json()
    assert [(tmp_path / str(rank) / "out" / "evaluation.json").exists() for rank in range(size)] == [
        rank == 0 for rank in range(size)
    ]
