"""Write missing artifacts of milestones later, and do not recreate artifacts that a user may have removed."""

from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.base_models import save_tuned, write_run
from trainium_contract.status.results import ArtifactReport, RunStage
from trainium_contract.wire.checkpoint_manifest import COMMIT_NAME, milestone_name
from trainium_trainer.artifacts.manifest import MANIFEST_NAME, PLAN_NAME, UNFINISHED, ArtifactManifest, WritePlan
from trainium_trainer.artifacts.stage import write_artifacts, write_milestones
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_trainer.peers import Peers

STEPS = (2, 4, 6, 8)


class MilestoneProgress:
    def __init__(self) -> None:
        self.reports: list[ArtifactReport] = []

    def enter_stage(self, stage: RunStage, done: float = 0.0) -> None:
        raise AssertionError(f"{stage} {done}: the stage stays Train")

    def record_artifact(self, report: ArtifactReport) -> None:
        self.reports.append(report)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Create a run with four milestones."""
    run = save_tuned(tmp_path, artifacts={"atMilestones": True})
    for step in STEPS:
        write_run(tmp_path / "step", run.shape, run.trained, step=step, settings={"weights": run.weights.digest})
        folder = next(path for path in (tmp_path / "step").glob("step-*") if (path / COMMIT_NAME).exists())
        folder.rename(tmp_path / "run" / milestone_name(step))
    return run


def write_and_list_steps(run: Any) -> list[int]:
    """Write the artifacts of milestones and return the steps that were reported."""
    progress, heartbeats = MilestoneProgress(), []
    write_milestones(run.config, Peers(0, 1), progress, heartbeat=lambda: heartbeats.append(True))
    assert bool(heartbeats) == bool(progress.reports)
    return sorted({report.step for report in progress.reports})


def artifact_folder(run: Any, step: int) -> Path:
    return Path(run.root) / "artifacts" / f"step-{step}"


def test_milestones_get_missing_artifacts_unless_a_user_may_have_removed_them(run: Any) -> None:
    assert write_and_list_steps(run) == [6, 8]
    assert not artifact_folder(run, 2).exists()
    for kind, last in (("adapter", "adapter_config.json"), ("model", "config.json")):
        assert (artifact_folder(run, 6) / kind / last).exists()


def test_unfinished_artifacts_of_a_killed_rank_are_finished_later(run: Any) -> None:
    write_artifacts(run.config, run.root, 2, Peers(0, 1), ProgressWriter(None))
    model = artifact_folder(run, 2) / "model"
    identity = ArtifactManifest.model_validate_json((model / MANIFEST_NAME).read_bytes()).identity
    (model / "config.json").unlink()
    (model / UNFINISHED).mkdir()
    (model / PLAN_NAME).write_text(WritePlan(identity=identity, writers=1).model_dump_json(by_alias=True))
    assert write_and_list_steps(run) == [2, 6, 8]
    assert (model / "config.json").exists()
    assert not (model / UNFINISHED).exists()


def test_milestones_get_no_artifacts_unless_configured(run: Any) -> None:
    plain = run.config.artifacts.model_copy(update={"at_milestones": False})
    run.config = run.config.model_copy(update={"artifacts": plain})
    assert write_and_list_steps(run) == []
