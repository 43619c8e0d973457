"""Models of milestones are measured in a pod beside the workers, while a real job trains.

With lm-eval (`make test-tasks`) they are also measured by a task with local data.
"""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.timeouts import until
from trainium_client.commands.main import main
from trainium_contract.wire.worker_env import ROLE_EVALUATION
from trainium_trainer.cli import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

HARNESS = importlib.util.find_spec("lm_eval") is not None
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {validation: /cache/milestones/questions.jsonl}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
CHANGE = """
workers: {replicas: 1}
trainer:
  steps: 60
  data: {validation: {fraction: 0.05}}
  artifacts: {kinds: [Model], atMilestones: true}
  evaluate:
    atMilestones: true
    samples: 4
    %s
checkpoint: {milestones: {everyTokens: 20000}}
"""
TASKS = "tasks: {names: [tiny_choice], includePath: /cache/milestones}"


def write_task(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    (folder / "tiny_choice.yaml").write_text(TASK)
    words = ["gradient", "loss", "step", "batch", "token", "shard"]
    questions = [{"question": word, "choices": words[:4], "answer": at % 4} for at, word in enumerate(words)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))


def side_pods(job: Job) -> list[dict[str, Any]]:
    return [pod for pod in job.list_pods() if pod["metadata"]["labels"]["trainium.dev/role"] == ROLE_EVALUATION]


def test_models_of_milestones_are_evaluated_during_training(
    new_job: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(change=CHANGE % (TASKS if HARNESS else ""))
    write_task(job.cluster.shared / "cache/milestones")
    found: list[dict[str, Any]] = []

    def runs() -> bool:
        found[:] = side_pods(job)
        return bool(found) and found[0]["status"].get("phase") == "Running"

    until(runs, lambda: f"a pod measures the first milestone: {job.describe()}", 180)
    (pod,) = found
    assert job.read_status()["phase"] in ("Running", "Completed")
    assert pod["spec"]["priority"] < 0
    job.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", job.namespace, "--wait=false")

    status = job.wait_until(
        "all milestones are measured",
        lambda status: (
            status.get("phase") == "Completed"
            and len(status.get("evaluations") or []) > 2
            and all(evaluation.get("figures") for evaluation in status["evaluations"])
        ),
        400,
    )
    assert status["evaluations"][-1]["step"] == 60
    assert status["membership"]["generation"] == 1
    assert (status.get("restarts") or {}).get("total", 0) == 0
    assert all(evaluation.get("failures", 0) == 0 for evaluation in status["evaluations"])
    until(lambda: not side_pods(job), lambda: f"no pod is left: {side_pods(job)}", 30)

    # The pod has the figures of the command on the same folder.
    (job.folder / "config.json").write_text(job_config(job))
    steps = [evaluation["step"] for evaluation in status["evaluations"]]
    model = job.folder / f"artifacts/step-{steps[0]}/model"
    output = tmp_path / "result.json"
    assert run(["evaluate", str(model), "--config", str(job.folder / "config.json"), "--output", str(output)]) == 0
    by_hand = {figure["name"]: figure for figure in json.loads(output.read_text())["figures"]}
    first = {figure["name"]: figure for figure in status["evaluations"][0]["figures"]}
    assert first["perplexity"]["after"] == pytest.approx(by_hand["perplexity"]["after"], rel=1e-5)
    perplexities = [evaluation["figures"][0]["after"] for evaluation in status["evaluations"]]
    assert perplexities[-1] < perplexities[0], "the model learns"
    if HARNESS:
        assert first["tiny_choice acc"]["standardError"] > 0
    assert sum(event.startswith("Evaluated: The model of step") for event in job.list_events()) == len(steps)

    capsys.readouterr()
    for name, value in job.cluster.variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["status", job.name, "-n", job.namespace])
    shown = capsys.readouterr().out
    assert all(f"step {step}, " in shown for step in steps)
    picture = tmp_path / "run.png"
    assert run(["plot", str(job.folder), "--by", "tokens", "--output", str(picture)]) == 0


def job_config(job: Job) -> str:
    """Return the configuration of the workers, with the paths of this process and without tasks."""
    data = job.cluster.get("configmap", f"{job.name}-config", "-n", job.namespace)["data"]
    config = json.loads(data["trainer.yaml"])
    config["data"]["cacheDirectory"] = str(job.cluster.shared / "cache")
    config["evaluate"].pop("tasks", None)
    return json.dumps(config)
