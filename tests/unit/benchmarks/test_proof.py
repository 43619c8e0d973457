"""Trials of the recovery proof: seeds, checks of artifacts and steps, and the page."""

import json
import shutil
from dataclasses import replace
from itertools import permutations
from math import gcd
from pathlib import Path

import pytest
import torch

from benchmarks.proof import artifact_checks
from benchmarks.proof.artifact_checks import ArtifactSnapshot
from benchmarks.proof.checks import AttemptResult, StepsLost, TrialResult, check_steps_lost, find_epoch_error
from benchmarks.proof.document import render_section, replace_section, summarize
from benchmarks.proof.kill_points import Point
from benchmarks.proof.runner import find_layouts_with_steps
from benchmarks.proof.suites import PRETRAINING, SUITES, Suite, draw_trial
from tests.testing.trainer.base_models import save_base
from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision
from trainium_contract.trainer.tuning import TuningConfig
from trainium_trainer.artifacts.inputs import ArtifactInputs
from trainium_trainer.artifacts.store import ArtifactStore
from trainium_trainer.artifacts.writer import write_artifact
from trainium_trainer.peers import Peers
from trainium_trainer.tuning.trainable import select_trainable
from trainium_trainer.weights.base import BaseWeights

ROOT = Path(__file__).parents[3]

TUNING, UNEVEN = SUITES["tuning"], SUITES["uneven"]
EACH_SUITE = pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
EVALUATION = {"examples": 2, "answerTokens": 4, "figures": [{"name": "perplexity", "before": 9.0, "after": 8.0}]}


@EACH_SUITE
def test_consecutive_seeds_cover_every_pair_of_family_and_point(suite: Suite) -> None:
    assert gcd(len(suite.scenarios), len(suite.points)) == 1
    pairs = len(suite.scenarios) * len(suite.points)
    met = {(made.scenario.name, made.point) for made in (draw_trial(seed, suite) for seed in range(100, 100 + pairs))}
    assert len(met) == pairs


@EACH_SUITE
def test_a_seed_always_gives_the_same_trial_and_only_its_last_life_ends_by_itself(suite: Suite) -> None:
    for seed in range(80):
        made = draw_trial(seed, suite)
        assert made == draw_trial(seed, suite)
        *killed, last = made.attempts
        assert last.kill is None
        assert {made.point, Point.STEP} >= {attempt.kill.point for attempt in killed if attempt.kill is not None}
        final = killed[-1].kill
        assert final is not None
        assert final.point is made.point


class Trained:
    """An adapter's numbers, drawn from a seed."""

    def __init__(self, sizes: dict[str, tuple[int, ...]]) -> None:
        torch.manual_seed(1)
        self.weights = {name: torch.randn(size) for name, size in sizes.items()}
        self.names = tuple(self.weights)

    def find_size(self, name: str) -> torch.Size:
        return self.weights[name].shape

    def fill(self, name: str, offsets: tuple[int, ...], target: torch.Tensor) -> None:
        box = self.weights[name]
        for dimension, offset in enumerate(offsets):
            box = box.narrow(dimension, offset, target.shape[dimension])
        target.copy_(box)


@pytest.fixture(scope="module")
def artifact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a step with an adapter, the merged model and an evaluation."""
    folder = tmp_path_factory.mktemp("written")
    save_base(folder / "base")
    base = BaseWeights.open(str(folder / "base"))
    lora = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}
    tuning = TuningConfig.model_validate({"method": "LoRA", "lora": lora})
    trained = Trained(dict(select_trainable(base.shape, tuning).sizes))
    inputs = ArtifactInputs(
        shape=base.shape,
        tuning=tuning,
        trained=trained,
        source="s" * 64,
        base=base,
        seed=0,
        step=3,
        tokens=30,
        settings={},
    )
    step = folder / "step"
    for name, kind in artifact_checks.FOLDERS.items():
        largest = 8192 if kind is ArtifactKind.MODEL else None
        artifact_plan = inputs.plan_artifact(kind, ArtifactPrecision.FLOAT32, largest)
        write_artifact(artifact_plan, ArtifactStore(str(step / name)), Peers(0, 1))
    (step / "evaluation.json").write_text(json.dumps(EVALUATION))
    return step


@pytest.fixture
def step(artifact_folder: Path, tmp_path: Path) -> Path:
    """Copy the written step."""
    return Path(shutil.copytree(artifact_folder, tmp_path / "step"))


def test_complete_artifacts_have_no_difference(artifact_folder: Path, step: Path) -> None:
    assert artifact_checks.find_complete_artifacts(step).keys() == {"adapter", "model"}
    assert artifact_checks.find_incomplete(step) == []
    assert (
        artifact_checks.compare_artifacts(
            artifact_checks.read_artifacts(step), artifact_checks.read_artifacts(artifact_folder)
        )
        == []
    )
    assert len(artifact_checks.find_complete_files(step)) > 3


@pytest.mark.parametrize("file", ["model/config.json", "model/model-00002-of-*", "adapter/adapter_model.safetensors"])
def test_a_truncated_file_of_a_complete_artifact_is_found(step: Path, file: str) -> None:
    (path,) = step.glob(file)
    path.write_bytes(path.read_bytes()[:-1])
    assert artifact_checks.find_incomplete(step)


def test_a_missing_manifest_of_a_committed_artifact_is_found(step: Path) -> None:
    (step / "model" / "artifact.json").unlink()
    assert artifact_checks.find_incomplete(step)


def test_an_uncommitted_artifact_is_not_complete(step: Path) -> None:
    (step / "model" / "config.json").unlink()
    next(step.glob("model/model-00001-of-*")).write_bytes(b"")
    assert artifact_checks.find_incomplete(step) == []
    assert artifact_checks.find_complete_artifacts(step).keys() == {"adapter"}


def test_a_truncated_evaluation_is_found(step: Path) -> None:
    (step / "evaluation.json").write_text("{")
    assert artifact_checks.find_incomplete(step)


def perturb(left: ArtifactSnapshot, by: float) -> ArtifactSnapshot:
    """Return a snapshot that differs in one number of each tensor."""
    tensors = {name: tensor.clone() for name, tensor in left.tensors.items()}
    for tensor in tensors.values():
        tensor.view(-1)[0] += by * tensor.norm()
    return replace(left, tensors=tensors)


def test_a_changed_bit_is_a_difference_unless_sizes_changed(artifact_folder: Path) -> None:
    known = artifact_checks.read_artifacts(artifact_folder)
    assert artifact_checks.compare_artifacts(perturb(known, 1e-5), known)
    assert artifact_checks.compare_artifacts(perturb(known, 1e-5), known, 1e-4) == []
    assert artifact_checks.compare_artifacts(perturb(known, 1e-3), known, 1e-4)


def test_an_additional_file_is_a_difference(artifact_folder: Path, step: Path) -> None:
    (step / "model" / ".draft-00").write_bytes(b"half of it")
    known = artifact_checks.read_artifacts(artifact_folder)
    assert artifact_checks.compare_artifacts(artifact_checks.read_artifacts(step), known) == [
        "other files: ['model/.draft-00']"
    ]
    assert artifact_checks.compare_artifacts(artifact_checks.read_artifacts(step), known, 1e-4)


def test_files_may_be_divided_differently_but_equal_names_have_equal_bytes(artifact_folder: Path, step: Path) -> None:
    known = artifact_checks.read_artifacts(artifact_folder)
    divided = {name.replace("-of-0", "-of-9"): digest for name, digest in known.files.items()}
    index = {"model/model.safetensors.index.json": "another"}
    assert artifact_checks.compare_artifacts(replace(known, files=divided | index), known) == []
    (problem,) = artifact_checks.compare_artifacts(replace(known, files=known.files | index), known)
    assert problem == "model/model.safetensors.index.json does not have the same bytes"
    (step / "adapter" / "adapter_config.json").write_text("{}")
    config = artifact_checks.read_artifacts(step).files["adapter/adapter_config.json"]
    changed = replace(known, files=divided | index | {"adapter/adapter_config.json": config})
    assert artifact_checks.compare_artifacts(changed, known) == [
        "adapter/adapter_config.json does not have the same bytes"
    ]


def test_changed_figures_are_a_difference(artifact_folder: Path) -> None:
    known = artifact_checks.read_artifacts(artifact_folder)
    figure = {"name": "perplexity", "before": 9.0, "after": 8.001}
    snapshot = replace(known, evaluation=known.evaluation | {"figures": [figure]})
    assert artifact_checks.compare_artifacts(snapshot, known)
    assert artifact_checks.compare_artifacts(snapshot, known, 1e-4) == ["perplexity after is 8.001, not 8.0"]
    assert artifact_checks.compare_artifacts(snapshot, known, 1e-3) == []


def epochs(size: int) -> dict[int, list[int]]:
    """Samples by step of all epochs of a suite, whose examples are 0 .. size - 1."""
    batch, steps = TUNING.global_batch, -(-size // TUNING.global_batch)
    return {
        step: list(range(size))[(step - 1) % steps * batch : ((step - 1) % steps + 1) * batch]
        for step in range(1, TUNING.steps + 1)
    }


def test_repeated_and_missing_examples_of_an_epoch_are_found() -> None:
    assert find_epoch_error(epochs(31), TUNING) is None
    twice = epochs(31)
    twice[5] = [*twice[5], 0]
    assert "steps 4 to 6" in (find_epoch_error(twice, TUNING) or "")
    never = epochs(31)
    never[1] = never[1][1:]
    assert "steps 1 to 3" in (find_epoch_error(never, TUNING) or "")
    assert "nothing is masked" in (find_epoch_error(epochs(36), TUNING) or "")


def attempt(resumed: int, completed: int, point: str = "", *, killed: bool = False) -> AttemptResult:
    return AttemptResult("dp 2", point, killed, completed, resumed, committed=12)


def test_a_kill_after_the_last_step_must_lose_no_step() -> None:
    result = TrialResult(0, "process")
    before = attempt(0, 15, "export", killed=True)
    check_steps_lost(before, attempt(15, 15), "export", result, allowed=0)
    assert result.lost == [StepsLost("export", 0)]
    assert not result.deviations
    check_steps_lost(before, attempt(12, 15), "export", result, allowed=0)
    assert result.lost[-1] == StepsLost("export", 3)
    assert result.deviations


def test_only_layouts_with_steps_are_listed() -> None:
    trial = next(trial for trial in (draw_trial(seed, TUNING) for seed in range(99)) if trial.scenario.name == "resize")
    four, two, three = (attempt.layout for attempt in trial.attempts[-3:])
    trial = replace(trial, attempts=trial.attempts[-3:])
    late = [attempt(0, 15, "export", killed=True), attempt(15, 15, "export", killed=True), attempt(15, 15)]
    assert find_layouts_with_steps(trial, TrialResult(0, "resize", attempts=late)) == {four}
    early = [attempt(0, 5, "step", killed=True), attempt(-1, -1, "load", killed=True), attempt(5, 15)]
    assert find_layouts_with_steps(trial, TrialResult(0, "resize", attempts=early)) == {four, three}
    unseen = [attempt(0, 0, "step", killed=True), attempt(1, 4, "step", killed=True), attempt(4, 15)]
    assert find_layouts_with_steps(trial, TrialResult(0, "resize", attempts=unseen)) == {four, two, three}


def test_no_size_of_the_uneven_suite_divides_its_batch() -> None:
    sizes = {layout.dp for scenario in UNEVEN.scenarios for layout in scenario.attempts}
    assert all(UNEVEN.global_batch % dp for dp in sizes)
    assert max(sizes) > UNEVEN.global_batch


def test_each_suite_replaces_only_its_section_of_the_page() -> None:
    result = TrialResult(0, "process", [StepsLost("step", 1)], [attempt(0, 5, "step", killed=True), attempt(4, 15)])
    tuning = render_section(summarize([result], TUNING, 0, 1.0), TUNING)
    pretraining = render_section(summarize([result], PRETRAINING, 0, 1.0), PRETRAINING)
    assert "| 1 step | 1: 1 / 1.0 | - |" in tuning
    assert "1 kills in 1 runs" in pretraining
    uneven = render_section(summarize([result], UNEVEN, 0, 1.0), UNEVEN)
    parts = [(pretraining, PRETRAINING), (uneven, UNEVEN), (tuning, TUNING)]
    pages = set()
    for order in permutations(parts):
        page = ""
        for part, suite in order:
            page = replace_section(page, part, suite)
        pages.add(page)
    assert len(pages) == 1
    known = (ROOT / "benchmarks/proof/recovery-proof.md").read_text()
    renewed = replace_section(known, tuning, TUNING)
    assert renewed.startswith(known.partition("## Fine-tuning")[0].strip())
    assert replace_section(renewed, tuning, TUNING) == renewed
