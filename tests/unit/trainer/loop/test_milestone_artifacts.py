"""Artifacts at milestones: real ranks write them in the background while they train on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from trainium_trainer.artifacts.manifest import ArtifactManifest
from trainium_trainer.checkpoint.format.contents import Contents
from trainium_trainer.checkpoint.root.selection import choose
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Job

pytestmark = pytest.mark.timeout(150)


def test_every_milestone_leaves_the_model_of_its_step(launch: Callable[..., Job], base: Path) -> None:
    # Steps of 256 tokens; a milestone that is due waits for a save that is under way.
    artifacts = "artifacts={atMilestones: true, precision: Float32}"
    milestones = "checkpoint.milestones={everyTokens: 512}"
    job = launch(2, "run", [f"model={{weights: {base}}}", artifacts, milestones]).finish()
    milestone_steps = {int(path.name.removeprefix("milestone-")) for path in job.folder.glob("milestone-*")}
    steps = sorted(milestone_steps | {6})
    assert len(steps) > 1
    assert {path.name for path in (job.folder / "artifacts").iterdir()} == {f"step-{step}" for step in steps}
    storage = open_storage(str(job.folder))
    written = []
    for step in steps:
        folder = job.folder / f"artifacts/step-{step}"
        assert [path.name for path in folder.iterdir()] == ["model"]
        manifest = ArtifactManifest.model_validate_json((folder / "model/artifact.json").read_bytes())
        assert manifest.step == step
        written.append(load_file(folder / "model/model.safetensors"))
        contents = Contents(storage, choose(storage, str(job.folder), step, milestones=True), Retry())
        for name, value in written[-1].items():
            assert torch.equal(value, contents.read(f"model.{name}").float())
    assert not torch.equal(written[0]["lm_head.weight"], written[1]["lm_head.weight"])
