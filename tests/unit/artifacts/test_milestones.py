"""Artifacts of milestones whose writer was killed are made later; what somebody took away stays away."""

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


class RecordedProgress:
    def __init__(self) -> None:
        self.reports: list[ArtifactReport] = []

    def set_stage(self, stage: RunStage, done: float = 0.0) -> None:
        raise AssertionError(f"{stage} {done}: the stage is that of training")

    def record_artifact(self, report: ArtifactReport) -> None:
        self.reports.append(report)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Create a run with four milestones."""
    run = save_tuned(tmp_path, artifacts={"atMilestones": True})
    for step in STEPS:
        write_run(tmp_path / "one", run.shape, run.trained, step=step, settings={"weights": run.weights.digest})
        folder = next(path for path in (tmp_path / "one").glob("step-*") if (path / COMMIT_NAME).exists())
        folder.rename(tmp_path / "run" / milestone_name(step))
    return run


def written_steps(run: Any) -> list[int]:
    """Write the artifacts of milestones and return the steps that were reported."""
    progress, beats = RecordedProgress(), [0]

    def heartbeat() -> None:
        beats[0] += 1

    write_milestones(run.config, Peers(0, 1), progress, heartbeat=heartbeat)
    assert bool(beats[0]) == bool(progress.reports)
    return sorted({report.step for report in progress.reports})


def artifacts(run: Any, step: int) -> Path:
    return Path(run.root) / "artifacts" / f"step-{step}"


def test_milestones_get_the_artifacts_that_they_lack_unless_somebody_may_have_removed_them(run: Any) -> None:
    assert written_steps(run) == [6, 8]
    assert not artifacts(run, 2).exists()
    for kind, last in (("adapter", "adapter_config.json"), ("model", "config.json")):
        assert (artifacts(run, 6) / kind / last).exists()


def test_artifacts_that_a_killed_rank_left_unfinished_are_finished_at_the_next_milestone_or_the_end(run: Any) -> None:
    write_artifacts(run.config, run.root, 2, Peers(0, 1), ProgressWriter(None))
    model = artifacts(run, 2) / "model"
    identity = ArtifactManifest.model_validate_json((model / MANIFEST_NAME).read_bytes()).identity
    (model / "config.json").unlink()
    (model / UNFINISHED).mkdir()
    (model / PLAN_NAME).write_text(WritePlan(identity=identity, writers=1).model_dump_json(by_alias=True))
    assert written_steps(run) == [2, 6, 8]
    assert (model / "config.json").exists()
    assert not (model / UNFINISHED).exists()


def test_milestones_get_no_artifacts_unless_the_configuration_asks_for_them(run: Any) -> None:
    plain = run.config.artifacts.model_copy(update={"at_milestones": False})
    run.config = run.config.model_copy(update={"artifacts": plain})
    assert written_steps(run) == []
