"""Report from the loops of other libraries, with the real libraries where they are installed."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainium_worker
from tests.unit.worker.test_reports import progress
from trainium_worker.hooks import select_figures
from trainium_worker.hooks.loop import training_steps
from trainium_worker.hooks.torchtitan import report_to_agent
from trainium_worker.progress_record import stop_at


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "g1-r0"
    monkeypatch.setenv("TRAINIUM_PROGRESS_FILE", str(path))
    monkeypatch.setattr(trainium_worker, "_reporter", None)
    return path


def test_training_steps_reports_and_saves_on_a_stop(record: Path) -> None:
    assert list(training_steps(3, 6, lambda step: f"/x/{step}")) == [4, 5, 6]
    assert (progress(record).resume_step, progress(record).step, progress(record).total_steps) == (3, 6, 6)
    made_steps = []

    def train() -> None:
        for step in training_steps(6, 20, lambda step: f"/x/{step}"):
            made_steps.append(step)
            if step == 9:
                stop_at(record, progress(record).stop_checks + 1)

    with pytest.raises(SystemExit) as stopped:
        train()
    assert (made_steps, stopped.value.code, progress(record).durable_step) == ([7, 8, 9], 75, 9)


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x - labels).pow(2).mean()}


def test_transformers_trainer_reports_saves_and_resumes(record: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from trainium_worker.hooks.transformers import ReportToAgent

    def trainer() -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=8, logging_steps=1, save_steps=5,
            report_to=[], use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=4,
        )  # fmt: skip
        rows = [{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])} for n in range(32)]
        return Trainer(Regression(), arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=[ReportToAgent()])

    first = trainer()
    original_step, calls = first.training_step, []

    def training_step(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            stop_at(record, progress(record).stop_checks + 1)
        return original_step(*args, **kwargs)

    first.training_step = training_step  # type: ignore[method-assign]
    with pytest.raises(SystemExit) as stopped:
        first.train()
    assert stopped.value.code == trainium_worker.STOPPED
    assert (progress(record).step, progress(record).durable_step, progress(record).total_steps) == (3, 3, 8)
    assert progress(record).figures["loss"] > 0
    assert progress(record).samples == 3 * 2
    checkpoint = get_last_checkpoint(str(tmp_path / "out"))
    assert checkpoint is not None
    assert checkpoint.endswith("checkpoint-3")
    trainium_worker._reporter = None
    trainer().train(resume_from_checkpoint=checkpoint)
    assert (progress(record).resume_step, progress(record).step, progress(record).durable_step) == (3, 8, 8)


@pytest.mark.filterwarnings("default")  # Lightning uses deprecated functions of torch
def test_lightning_reports_and_saves(record: Path, tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")
    from trainium_worker.hooks.lightning import ReportToAgent

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Regression()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == 5:
                stop_at(record, progress(record).stop_checks + 1)
            return self.model(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    path = tmp_path / "last.ckpt"

    def trainer() -> Any:
        return lightning.Trainer(
            max_steps=4, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[ReportToAgent(path)],
        )  # fmt: skip

    rows = [(torch.ones(1), torch.ones(1)) for _ in range(16)]
    batches = torch.utils.data.DataLoader(rows, batch_size=1)
    with pytest.raises(SystemExit) as stopped:
        trainer().fit(Module(), batches)
    assert stopped.value.code == trainium_worker.STOPPED
    assert (progress(record).step, progress(record).durable_step, progress(record).total_steps) == (3, 3, 4)
    trainium_worker._reporter = None
    trainer().fit(Module(), batches, ckpt_path=path)
    assert (progress(record).resume_step, progress(record).step) == (3, 4)


@pytest.mark.filterwarnings("default")  # Lightning uses deprecated functions of torch
def test_lightning_keeps_only_one_optimizer_in_memory(record: Path, tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")
    from trainium_worker.hooks.lightning import ReportToAgent

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Regression()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            pytest.fail("it must not train")

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]

    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ReportToAgent(tmp_path / "last.ckpt", memory=True)],
    )  # fmt: skip
    with pytest.raises(ValueError, match="not 2 with SingleDeviceStrategy: remove memory=True"):
        trainer.fit(Module(), torch.utils.data.DataLoader([(torch.ones(1), torch.ones(1))]))


class TorchtitanTrainer:
    """The parts of torchtitan's trainer that the hook uses, called in its order; torchtitan itself needs CUDA."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.saves: list[tuple[int, bool]] = []
        self.logged: list[tuple[int, float]] = []
        self.closed = False
        self.checkpointer = self.metrics_processor = self
        self.interval = 100

    def load(self, step: int) -> bool:
        return step > 0

    def save(self, curr_step: int, last_step: bool = False) -> None:
        if last_step or curr_step % self.interval == 0:
            self.saves.append((curr_step, last_step))

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float) -> None:
        self.logged.append((step, global_avg_loss))

    def close(self) -> None:
        self.closed = True

    def train(self, stop_at_step: int, record: Path) -> None:
        self.checkpointer.load(step=-1)
        assert progress(record).stage == "Compile"
        for step in range(1, self.steps + 1):
            if step % 2 == 0:
                self.metrics_processor.log(step, 1.0 / step, 2.0, 3.0)
            if step == stop_at_step:
                stop_at(record, progress(record).stop_checks + 1)
            self.checkpointer.save(step, last_step=step == self.steps)


def test_torchtitans_trainer_reports_and_saves_a_checkpoint(record: Path) -> None:
    trainer = TorchtitanTrainer(10)
    report_to_agent(trainer)
    with pytest.raises(SystemExit) as stopped:
        trainer.train(7, record)
    assert (stopped.value.code, trainer.saves, trainer.closed) == (75, [(7, False)], True)
    assert (progress(record).step, progress(record).figures["loss"]) == (7, 1.0 / 6)
    assert trainer.logged == [(2, 0.5), (4, 0.25), (6, 1.0 / 6)]


class TorchtitanStates(TorchtitanTrainer):
    """Trains a weight, and has the states of torchtitan's checkpointer, whose names it uses."""

    def __init__(self, steps: int, folder: Path) -> None:
        super().__init__(steps)
        self.folder = str(folder)
        self.model = torch.nn.Linear(1, 1)
        self.states = {"model": SimpleNamespace(load_state_dict=partial(self.model.load_state_dict, strict=False))}
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def _flattened_model_states_sd(self) -> dict[str, Any]:
        return {**self.model.state_dict(), "train_state": self}

    def _states_to_load(self, *, model_only: bool) -> dict[str, Any]:
        assert not model_only
        return self._flattened_model_states_sd()

    def maybe_wait_for_staging(self) -> None:
        pass

    def resume(self, last: int, fails_at: int = 0) -> float:
        self.checkpointer.load(step=-1)
        for step in range(self.step + 1, last + 1):
            if step == fails_at:
                raise RuntimeError("killed")
            self.maybe_wait_for_staging()
            self.step = step
            with torch.no_grad():
                self.model.weight.fill_(step * 10.0)
            self.checkpointer.save(step, last_step=step == self.steps)
        return self.model.weight.item()


@pytest.mark.filterwarnings("default:torch.distributed is disabled")  # one process
def test_torchtitans_trainer_resumes_from_memory(record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINIUM_MEMORY_DIR", str(tmp_path / "node"))
    for attempt, fails_at in enumerate((6, 0)):
        monkeypatch.setenv("TRAINIUM_ATTEMPT", str(attempt))
        monkeypatch.setattr("trainium_worker.dcp.session._sessions", {})  # of another process
        trainer = TorchtitanStates(100, tmp_path / "checkpoint")
        report_to_agent(trainer, memory=True)
        if fails_at:
            with pytest.raises(RuntimeError, match="killed"):
                trainer.resume(10, fails_at)
            assert trainer.saves == [], "nothing is on storage"
        else:
            assert trainer.resume(5) == 50.0, "no step is computed again"


def test_the_rewards_that_a_trainer_of_trl_logs_are_figures() -> None:
    logs = {"loss": 0.5, "rewards/margins": 0.25, "rewards/accuracies": 1, "logps/chosen": -9.0, "epoch": 1.0}
    assert select_figures(logs) == {"loss": 0.5, "reward_margin": 0.25, "reward_accuracy": 1.0}
