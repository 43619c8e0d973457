"""Configuration: every refusal is one sentence with field, value and advice, and code 64, without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainium_contract.exit_codes import ExitCode
from trainium_contract.trainer import ModelPreset, TrainingConfig
from trainium_trainer import cli
from trainium_trainer.config import Launch, launch_of, load, settle
from trainium_trainer.exits import UserError
from trainium_trainer.models.shapes import PRESETS, resolve_shape
from trainium_trainer.schedule import learning_rate

if TYPE_CHECKING:
    from pathlib import Path


def write(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "trainer.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def world(size: int) -> Launch:
    return Launch(
        rank=0,
        local_rank=0,
        world_size=size,
        generation=0,
        attempt=0,
        run_id="",
        progress_file=None,
        memory_directory=None,
    )


def test_an_empty_file_is_the_default_configuration(tmp_path: Path) -> None:
    assert load(write(tmp_path, "")) == TrainingConfig()


def test_overrides_win_and_take_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = write(tmp_path, {"optimizer": {"learningRate": 0.1}})
    config = load(path, ["optimizer.learningRate=1e-3", "data.sequence_length=64", "monitor.tensorboard=false"])
    assert config.optimizer.learning_rate == 1e-3
    assert config.data.sequence_length == 64
    assert config.monitor.tensorboard is False


@pytest.mark.parametrize(
    ("document", "override", "sentence"),
    [
        ({"optimizer": {"learnRate": 1}}, None, "optimizer.learnRate is not a field: did you mean learningRate?"),
        ({"zzz": 1}, None, "zzz is not a field: known fields: batch, checkpoint,"),
        ({"steps": 0}, None, "steps is 0: use a number of at least 1"),
        ({"batch": {"globalSize": -4}}, None, "batch.globalSize is -4: use a number of at least 1"),
        ({"steps": "many"}, None, "steps is 'many', which is not a whole number: use one"),
        ({"optimizer": {"learningRate": 0}}, None, "optimizer.learningRate is 0: use a number greater than 0"),
        ({"optimizer": {"beta1": 1}}, None, "optimizer.beta1 is 1: use a number less than 1"),
        ({"precision": "FP8"}, None, "precision is 'FP8', which is not one of its values: use 'Float32' or 'BFloat16'"),
        ({"batch": 3}, None, "batch is 3, but it has fields of its own"),
        ({"data": {"source": ""}}, None, "data.source is empty"),
        ({"monitor": {"tensorboard": "perhaps"}}, None, "which is neither true nor false"),
        ({"steps": 5}, None, "schedule.warmupSteps is 10 but steps is 5"),
        ("- a\n- b\n", None, "holds a list, not fields"),
        ("steps: [", None, "not valid YAML"),
        ({}, "steps", "write it as a.b=value"),
        ({"steps": 5}, "steps.more=1", "steps is 5, which has no fields below it"),
        ({"steps": 0, "zzz": 1}, None, "zzz is not a field: known fields: "),
    ],
)
def test_a_wrong_configuration_is_refused_in_a_sentence(
    tmp_path: Path, document: Any, override: str | None, sentence: str
) -> None:
    with pytest.raises(UserError) as refusal:
        load(write(tmp_path, document), [override] if override else [])
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_further_problems_are_counted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\(and 1 more problem\)"):
        load(write(tmp_path, {"steps": 0, "seed": -1}))


def test_a_missing_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("overrides", "size", "sentence"),
    [
        (["model.vocabSize=100"], 1, "the tokenizer has 2048 entries: set model.vocabSize to at least 2048"),
        (["model.hiddenSize=97"], 1, "model.hiddenSize is 97, which is not divisible by model.numAttentionHeads 4"),
        (["model.hiddenSize=100"], 1, "heads of width 25"),
        (["model.numKeyValueHeads=3"], 1, "model.numAttentionHeads is 4, which is not divisible"),
        (["parallelism.tensor=4"], 4, "model.numKeyValueHeads is 2, which is not divisible by parallelism.tensor 4"),
        (["parallelism.tensor=2"], 3, "the number of ranks is 3, which is not divisible by parallelism.tensor 2"),
        (["model.vocabSize=2049", "parallelism.tensor=2"], 2, "model.vocabSize is 2049, which is not divisible"),
        (["batch.globalSize=8"], 3, "batch.globalSize 8 cannot be divided over 3 data-parallel ranks"),
        (
            ["parallelism.tensor=2", "parallelism.sequence=true", "data.sequenceLength=127"],
            2,
            "data.sequenceLength is 127, which is not divisible",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_the_launch_is_refused(
    tmp_path: Path, overrides: list[str], size: int, sentence: str
) -> None:
    with pytest.raises(UserError) as refusal:
        settle(load(write(tmp_path, ""), overrides), world(size))
    assert sentence in str(refusal.value)


def test_the_published_shapes_have_the_published_sizes() -> None:
    sizes = {preset: shape.num_parameters for preset, shape in PRESETS.items()}
    assert sizes[ModelPreset.LLAMA2_7B] == 6_738_415_616
    assert sizes[ModelPreset.LLAMA3_8B] == 8_030_261_248
    assert resolve_shape(TrainingConfig().model, 2048).num_parameters < 1_000_000


def test_the_digest_changes_with_what_must_not_change_and_only_then(tmp_path: Path) -> None:
    def digest(*overrides: str, data: str = "d") -> str:
        return settle(load(write(tmp_path, ""), overrides), world(1)).digest(data)

    assert digest() == digest("steps=50", "optimizer.learningRate=0.1", "batch.microSize=2", "precision=BFloat16")
    others = [digest("model.numLayers=9"), digest("seed=3"), digest("data.sequenceLength=64"), digest(data="e")]
    assert len({digest(), *others}) == 5


def test_launch_variables_are_optional_and_checked() -> None:
    assert launch_of({}) == world(1)
    launch = launch_of({"RANK": "2", "WORLD_SIZE": "4", "TRAINIUM_GENERATION": "7", "TRAINIUM_RUN_ID": "uid"})
    assert (launch.generation, launch.run_id) == (7, "uid")
    with pytest.raises(UserError, match="RANK is 'x', not a number"):
        launch_of({"RANK": "x"})
    with pytest.raises(UserError, match="RANK is 4 but WORLD_SIZE is 2"):
        launch_of({"RANK": "4", "WORLD_SIZE": "2"})


def test_a_bad_command_line_or_configuration_ends_with_64_and_its_sentence_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", "--config", str(write(tmp_path, {"steps": 0}))]) == ExitCode.USER_ERROR
    assert capsys.readouterr().err.splitlines()[-1].endswith("steps is 0: use a number of at least 1")
    assert cli.run(["train", "--no-such-option"]) == ExitCode.USER_ERROR
    assert cli.run(["--help"]) == 0


def test_configuration_errors_are_found_without_importing_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom trainium_trainer import cli\n"
        f"code = cli.run(['train', '--config', {str(write(tmp_path, {'steps': 0}))!r}])\n"
        "sys.exit(99 if 'torch' in sys.modules else code)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 64


@given(st.integers(1, 300), st.data())
def test_the_schedule_warms_up_peaks_once_and_ends_at_its_floor(steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps))
    ratio = data.draw(st.floats(0, 1))
    config = TrainingConfig.model_validate({"steps": steps, "schedule": {"warmupSteps": warmup, "finalRatio": ratio}})
    rates = [learning_rate(config, step) for step in range(steps)]
    peak = config.optimizer.learning_rate
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates[:warmup])
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup:
        assert rates[warmup - 1] == pytest.approx(peak)
    if warmup < steps:
        assert rates[-1] == pytest.approx(peak * ratio)
