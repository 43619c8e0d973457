"""A job whose program is a transformers `Trainer` with the one line that makes it elastic."""

import json
import sys
from typing import Any

import pytest

from tests.cluster.training.test_program import ProgramJob, step_of
from tests.testing.cluster.shared_cluster import SharedCluster
from tests.testing.suite.timeouts import scaled

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ROWS, BATCH, EPOCHS = 800, 8, 3
STEPS = ROWS // BATCH * EPOCHS
PROGRAM = f"""
import json, os, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trainium_worker.hooks.transformers import elastic

folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return {ROWS}

    def __getitem__(self, index):
        tokens = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 5] = -100
        return {{"input_ids": tokens, "labels": labels, "number": torch.tensor(index)}}

class LedgerTrainer(Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        numbers = inputs.pop("number").tolist()
        counted = [number for number, labels in zip(numbers, inputs["labels"]) if (labels != -100).any()]
        start = [int(os.environ["TRAINIUM_GENERATION"]), int(os.environ["TRAINIUM_ATTEMPT"])]
        print(json.dumps([self.state.global_step + 1, start, counted]), file=ledger, flush=True)
        time.sleep(0.1)
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            print(json.dumps([self.state.global_step, logs["loss"]]), file=losses, flush=True)
        super().log(logs, *args, **kwargs)

ledger = open(f"{{folder}}/ledger-{{os.environ['HOSTNAME']}}-{{os.getpid()}}", "w")
losses = open(f"{{folder}}/losses-{{os.environ['HOSTNAME']}}-{{os.getpid()}}", "w")
torch.manual_seed(0)
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
))
arguments = TrainingArguments(
    output_dir=folder + "/run", per_device_train_batch_size=2, gradient_accumulation_steps=2,
    num_train_epochs={EPOCHS}, logging_steps=1, save_steps=10, use_cpu=True, report_to=[], disable_tqdm=True,
    remove_unused_columns=False, ddp_find_unused_parameters=False, learning_rate=1e-3,
)
elastic(LedgerTrainer(model, arguments, train_dataset=Rows())).train()
"""
UNCHANGED = "LedgerTrainer(model, arguments, train_dataset=Rows())"


class ElasticJob(ProgramJob):
    """A job that runs the program on one rank of each node."""

    @property
    def manifest(self) -> dict[str, Any]:
        manifest = super().manifest
        folder = f"/checkpoints/{self.namespace}/{self.name}"
        manifest["spec"]["program"] = {
            "image": manifest["spec"]["program"]["image"],
            "command": ["python", "-c", self.source, folder],
            "checkpoints": {"path": f"{folder}/run", "committed": "checkpoint-{step}/trainer_state.json"},
        }
        return manifest

    source = PROGRAM

    def kill_process(self, node_rank: int) -> None:
        """Send SIGKILL to the newest process of a member, which names its ledger by its process ID."""
        pod: str = self.list_members()[node_rank]["podName"]
        newest = max(self.folder.glob(f"ledger-{pod}-*"), key=lambda path: path.stat().st_mtime)
        self.exec_in_pod(pod, "sh", "-c", f"kill -9 {newest.name.rpartition('-')[2]}")

    def read_lines(self, kind: str) -> list[list[Any]]:
        files = sorted(self.folder.glob(f"{kind}-*"))
        return [json.loads(line) for path in files for line in path.read_text().splitlines() if line.endswith("]")]

    def losses_by_step(self) -> dict[int, float]:
        return dict(self.read_lines("losses"))

    def samples_by_step(self) -> dict[int, list[int]]:
        """Return the samples of the last computation of each step."""
        last: dict[int, list[int]] = {}
        samples: dict[int, list[int]] = {}
        for step, start, numbers in self.read_lines("ledger"):
            if start > last.get(step, [0]):
                last[step], samples[step] = start, []
            if start == last[step]:
                samples[step] += numbers
        return samples


def test_an_elastic_trainer_keeps_its_samples_and_its_curve(operator: SharedCluster, namespace: str) -> None:
    undisturbed = ElasticJob(operator, namespace, "undisturbed", "{workers: {spares: 0}, program: {}}")
    undisturbed.apply()
    undisturbed.wait_for_phase("Completed", seconds=scaled(180))
    undisturbed.delete()

    job = ElasticJob(operator, namespace, "elastic", "{workers: {spares: 1}, program: {}}")
    job.apply()
    job.wait_until("steps and a spare", lambda status: step_of(status) >= 10 and status.get("spares") == 1)
    job.kill_process(1)
    job.wait_for_recovery()
    lost = job.list_members()[1]
    operator.power_off(lost["nodeName"])
    try:
        job.wait_for_recovery(2)
        second_epoch = STEPS // EPOCHS + 5
        job.wait_until("the second epoch", lambda status: step_of(status) >= second_epoch, seconds=scaled(180))
        job.scale(1)
        status = job.wait_until("one node", lambda status: status["membership"]["size"] == 1)
        resized = step_of(status)
        job.wait_until("steps on one node", lambda status: step_of(status) >= resized + 5, seconds=scaled(120))
        job.scale(2)
        job.wait_until("two nodes", lambda status: status["membership"]["size"] == 2, seconds=scaled(120))
        status = job.wait_for_phase("Completed", seconds=scaled(180))
    finally:
        operator.power_on(lost["nodeName"])

    print(json.dumps(status["history"], indent=1))  # noqa: T201 - figures
    samples, expected = job.samples_by_step(), undisturbed.samples_by_step()
    assert {step: sorted(numbers) for step, numbers in samples.items()} == {
        step: sorted(numbers) for step, numbers in expected.items()
    }
    for epoch in range(EPOCHS):
        steps = range(epoch * ROWS // BATCH + 1, (epoch + 1) * ROWS // BATCH + 1)
        assert sorted(number for step in steps for number in samples[step]) == list(range(ROWS))
    assert job.losses_by_step() == pytest.approx(undisturbed.losses_by_step(), rel=1e-6)
    assert all(entry.get("stepsLost", 0) <= 1 for entry in status["history"]), status["history"]


class UnchangedJob(ElasticJob):
    """The same script without the line."""

    source = PROGRAM.replace("elastic(LedgerTrainer(model, arguments, train_dataset=Rows()))", UNCHANGED)


def test_an_unchanged_script_of_transformers_has_steps_and_hang_detection(
    operator: SharedCluster, namespace: str
) -> None:
    job = UnchangedJob(operator, namespace, "unchanged", "{workers: {spares: 0}, program: {}}")
    job.apply()
    status = job.wait_until("steps", lambda status: step_of(status) >= 10, seconds=scaled(180))
    assert status["hangDetection"] == "Steps"
    assert status["progress"]["totalSteps"] == STEPS
    job.wait_until("a loss", lambda status: status["progress"].get("loss"), seconds=scaled(60))
    client = [sys.executable, "-m", "trainium_client.commands.main", "checkpoints", job.name, "-n", namespace]
    newest = json.loads(operator.check_output(*client, "-o", "json"))["storage"][0]
    assert (newest["name"], newest["state"]) == (f"checkpoint-{newest['step']}", "committed")
