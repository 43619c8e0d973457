"""Refuse configurations in one sentence with field, value and remedy, with code 64, without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.testing.trainer.example_files import write_tokenizer
from trainium_contract.accelerators import INSTANCES
from trainium_contract.exit_codes import ExitCode
from trainium_contract.job import TrainingJobSpec
from trainium_contract.requirements.memory_estimate import MemoryEstimate
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer import cli
from trainium_trainer.checkpoint.root.run_settings import hash_settings
from trainium_trainer.commands.check import find_missing
from trainium_trainer.configuration.config import Launch, load, read_launch, resolve_settings, resolve_steps
from trainium_trainer.exits import UserError
from trainium_trainer.loop.memory_check import refuse_too_small


def write_config(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "trainer.yaml"
    if isinstance(document, dict) and "kind" not in document:  # a run needs data
        data = {"source": "python-docs", **document.get("data", {})}
        if data.keys() & {"hub", "sources"}:
            del data["source"]
        document = {**document, "data": data}
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def launch_of(world_size: int) -> Launch:
    return Launch(rank=0, local_rank=0, world_size=world_size)


def test_an_empty_file_is_the_default_configuration(tmp_path: Path) -> None:
    assert load(write_config(tmp_path, "")) == TrainingConfig()


def test_overrides_take_precedence_and_common_forms_of_numbers(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"optimizer": {"learningRate": 0.1}})
    config = load(path, ["optimizer.learningRate=1e-3", "data.sequence_length=64", "monitor.tensorboard=false"])
    assert config.optimizer.learning_rate == 1e-3
    assert config.data.sequence_length == 64
    assert config.monitor.tensorboard is False


def preference_config(objective: dict[str, Any], **examples: Any) -> dict[str, Any]:
    """Return a configuration of preference tuning."""
    return {"data": {"format": "Preference", "examples": examples}, "tuning": {"objective": objective}}


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"optimizer": {"learnRate": 1}}, "optimizer.learnRate is not a field: did you mean learningRate?"),
        ({"zzz": 1}, "zzz is not a field: known fields: artifacts, backend, batch,"),
        ({"steps": 0}, "steps is 0: use a number of at least 1"),
        ({"batch": {"globalSize": -4}}, "batch.globalSize is -4: use a number of at least 1"),
        ({"steps": "many"}, "steps is 'many', which is not a whole number: use one"),
        ({"optimizer": {"learningRate": 0}}, "learningRate is 0: use a number greater than 0 and at most 1"),
        ({"optimizer": {"beta1": 1}}, "optimizer.beta1 is 1: use a number of at least 0 and less than 1"),
        ({"seed": 2**31}, "seed is 2147483648: use a number of at least 0 and at most 2147483647"),
        ({"model": {"initialStd": 2}}, "model.initialStd is 2: use a number greater than 0 and at most 1"),
        (
            {"model": {"ropeScaling": {"kind": "YaRN"}}},
            "model.ropeScaling.factor is not given, but model.ropeScaling.kind is YaRN: give the ratio",
        ),
        ({"model": {"ropeScaling": {"factr": 2}}}, "model.ropeScaling.factr is not a field: did you mean factor"),
        (
            {"model": {"ropeScaling": {"lowFrequencyFactor": 4, "highFrequencyFactor": 4}}},
            "model.ropeScaling.lowFrequencyFactor is 4.0 but highFrequencyFactor is 4.0: the low one must be",
        ),
        ({"model": {"preset": "Llama2-7B", "path": "x"}}, "model.preset has no effect beside model.path: leave it out"),
        ({"model": {"path": "x" * 1025}}, "model.path has 1025 characters: use at most 1024"),
        (
            {"steps": 20, "schedule": {"warmupSteps": 10, "decaySteps": 11}},
            "schedule.warmupSteps 10 and schedule.decaySteps 11 are together more than the 20 steps",
        ),
        (
            {"precision": "FP8"},
            "precision is 'FP8', which is not one of its values: use 'Float32', 'BFloat16' or 'BFloat16Stochastic'",
        ),
        ({"batch": 3}, "batch is 3, but it has fields of its own"),
        ({"data": {"source": ""}}, "data.source is empty"),
        ({"data": {"validation": {"samples": 5}}}, "data.validation needs one of fraction, source and hubSplit"),
        ({"data": {"validation": {"hubSplit": "test"}}}, "which is not given: give data.hub"),
        ({"data": {"sources": [{"weight": 2}]}}, "each of data.sources needs either source or hub"),
        (
            {"data": {"sources": [{"source": "a", "weight": 0}]}},
            "data.sources.0.weight is 0: use a number greater than 0",
        ),
        (
            {"data": {"hub": {"dataset": "a/b"}, "sources": [{"source": "a"}]}},
            "data.hub and data.sources are both given: move data.hub into data.sources",
        ),
        ({"data": {"hub": {"dataset": "a/b/c"}}}, "write the name of a data set on the hub, owner/name"),
        ({"data": {"validation": {"fraction": 0.1, "source": "v.txt"}}}, "give exactly one of them"),
        ({"monitor": {"tensorboard": "perhaps"}}, "which is neither true nor false"),
        ({"steps": 5, "schedule": {"warmupSteps": 10}}, "schedule.warmupSteps is 10 but steps is 5"),
        ({"batch": {"tolerance": 0.6}}, "batch.tolerance is 0.6: use a number of at least 0 and at most 0.5"),
        ({"batch": {"tolerance": -0.1}}, "batch.tolerance is -0.1: use a number of at least 0 and at most 0.5"),
        (
            {"batch": {"tolerance": 0.1}, "data": {"tokenization": "Online"}},
            "batch.tolerance must be 0 with data.tokenization Online, where each row of the global batch is",
        ),
        ({"data": {"format": "Preference"}}, "tuning.objective is not given: name its kind, DPO"),
        (
            {"tuning": {"objective": {"kind": "DPO"}}},
            "tuning.objective is given but data.format has no two answers to compare",
        ),
        (preference_config({}), "compares with the model in model.weights, which is not given: give it, or set"),
        (
            preference_config({"labelSmoothing": 0.5}),
            "labelSmoothing is 0.5: use a number of at least 0 and at most 0.49",
        ),
        (
            preference_config({"reference": "/r"}, packing=True),
            "where each answer has a separate sequence: leave it out",
        ),
        (
            preference_config({"reference": "/r"}, loss="All"),
            "is Preference, which compares answers only: leave it out",
        ),
        ("- a\n- b\n", "holds a list, not fields"),
        ("steps: [", "not valid YAML"),
        ({"steps": 0, "zzz": 1}, "zzz is not a field: known fields: "),
    ],
)
def test_a_wrong_configuration_is_refused(tmp_path: Path, document: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        load(write_config(tmp_path, document))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_error_of_a_value_names_its_override(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--set steps=0: steps is 0: use a number of at least 1"):
        load(write_config(tmp_path, {}), ["steps=0"])
    with pytest.raises(UserError, match=r"^--set model\.num_layers=0: model\.numLayers is 0"):
        load(write_config(tmp_path, {}), ["seed=1", "model.num_layers=0"])
    with pytest.raises(UserError, match=r"trainer\.yaml: batch\.microSize is 0"):
        load(write_config(tmp_path, {"batch": {"microSize": 0}}), ["steps=50"])
    with pytest.raises(UserError, match=r"write it as a\.b=value"):
        load(write_config(tmp_path, {}), ["steps"])
    with pytest.raises(UserError, match="steps is 5, which has no fields below it"):
        load(write_config(tmp_path, {"steps": 5}), ["steps.more=1"])


def test_further_problems_are_counted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\(and 1 more problem\)"):
        load(write_config(tmp_path, {"steps": 0, "seed": -1}))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("overrides", "size", "sentence"),
    [
        (["model.vocabSize=100"], 1, "the tokenizer has 300 entries: set model.vocabSize to at least 300"),
        (["model.hiddenSize=97"], 1, "model.hiddenSize is 97, which is not divisible by model.numAttentionHeads 4"),
        (["model.hiddenSize=100"], 1, "heads of width 25"),
        (["model.headDim=25"], 1, "model.headDim is 25, but the rotary embedding needs an even width"),
        (["model.path=/none"], 1, "model.path /none: there is no config.json that can be read"),
        (
            ["model.maxPositions=64", "data.sequenceLength=128"],
            1,
            "data.sequenceLength is 128 but the model is meant for at most 64 positions",
        ),
        (["model.numKeyValueHeads=3"], 1, "model.numAttentionHeads is 4, which is not divisible"),
        (
            ["parallelism.tensor=4", "model.numKeyValueHeads=6", "model.numAttentionHeads=12"],
            4,
            "model.numKeyValueHeads is 6, which neither is divisible by parallelism.tensor 4 nor divides it",
        ),
        (["parallelism.tensor=2"], 3, "the number of ranks is 3, which is not divisible by parallelism.tensor 2"),
        (
            ["parallelism.tensor=2", "parallelism.pipeline=2"],
            6,
            "the number of ranks is 6, which is not divisible by parallelism.tensor x pipeline 4",
        ),
        (["parallelism.pipeline=4"], 4, "is more than the 3 layers of the model (model.numLayers)"),
        (["model.vocabSize=2049", "parallelism.tensor=2"], 2, "model.vocabSize is 2049, which is not divisible"),
        (
            ["batch={globalSize: 2, microSize: 4}"],
            3,
            "batch.microSize is 4 but batch.globalSize is 2: every pass of every",
        ),
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
        resolve_settings(load(write_config(tmp_path, {}), overrides), launch_of(size))
    assert sentence in str(refusal.value)


def test_the_digest_of_the_settings_covers_those_that_must_not_change(tmp_path: Path) -> None:
    def digest(*overrides: str, data: str = "d", tokenizer: str = "t") -> str:
        return hash_settings(
            resolve_settings(load(write_config(tmp_path, {}), overrides), launch_of(1)).list_fixed_settings(
                data, tokenizer, {}
            )
        )

    assert digest() == digest("steps=50", "optimizer.learningRate=0.1", "batch.microSize=2", "precision=BFloat16")
    others = [digest("model.numLayers=9"), digest("seed=3"), digest("data.sequenceLength=64"), digest(data="e")]
    others.append(digest(tokenizer="u"))
    assert len({digest(), *others}) == 6


def test_records_are_beside_the_checkpoints_unless_configured(tmp_path: Path) -> None:
    for path in ("s3://bucket/run", "/there"):
        assert load(write_config(tmp_path, {}), [f"checkpoint.path={path}"]).checkpoint.records == path
    for records in ("s3://bucket/records", "/here"):
        overrides = ["checkpoint.path=s3://bucket/run", f"checkpoint.recordsPath={records}"]
        assert load(write_config(tmp_path, {}), overrides).checkpoint.records == records


def test_launch_variables_are_optional_and_checked() -> None:
    assert read_launch({}) == launch_of(1)
    launch = read_launch({"RANK": "2", "WORLD_SIZE": "4", "TRAINIUM_GENERATION": "7", "TRAINIUM_RUN_ID": "uid"})
    assert (launch.generation, launch.run_id) == (7, "uid")
    with pytest.raises(UserError, match="RANK is 'x', not a number"):
        read_launch({"RANK": "x"})
    with pytest.raises(UserError, match="RANK is 4 but WORLD_SIZE is 2"):
        read_launch({"RANK": "4", "WORLD_SIZE": "2"})


def test_a_bad_command_line_or_configuration_ends_with_64_and_its_sentence_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", "--config", str(write_config(tmp_path, {"steps": 0}))]) == ExitCode.USER_ERROR
    assert capsys.readouterr().err.splitlines()[-1].endswith("steps is 0: use a number of at least 1")
    assert cli.run(["train", "--no-such-option"]) == ExitCode.USER_ERROR
    assert cli.run(["--help"]) == 0


def test_check_reports_the_effect_of_a_configuration_at_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "model": {"preset": "Llama2-7B"},
        "data": {"sequenceLength": 4096},
        "batch": {"globalSize": 1024, "microSize": 1},
        "parallelism": {"tensor": 8, "sequence": True},
        "steps": 500_000,
        "schedule": {"warmupSteps": 2000},
    }
    argv = ["check", "--config", str(write_config(tmp_path, document))]
    assert cli.run([*argv, "--ranks", "4096"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model: 6,738,415,616 parameters, 32 layers of width 4096",
        "processes: 4096 = data 512 x tensor 8 x pipeline 1",
        "step: 1024 samples of 4096 tokens = 4,194,304 tokens; 2 passes of 1 sample on each data-parallel rank",
        "run: 500,000 steps = 2,097,152,000,000 tokens",
        "learning rate: up to 0.0003 in 2,000 steps, Cosine, 3e-05 in the last",
        "open files: up to 4,237 in one process",
        (
            "memory of a process: 12.6 GiB of weights, gradients and optimizer (842,534,912 parameters), about "
            "4.3 GiB of activations"
        ),
    ]
    assert cli.run([*argv, "--ranks", "12"]) == ExitCode.USER_ERROR
    assert "the number of ranks is 12, which is not divisible by parallelism.tensor 8" in capsys.readouterr().err


def test_check_refuses_a_job_that_is_too_large_for_its_cores_and_reports_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = {
        "model": {"preset": "Llama2-7B"},
        "data": {"source": "/data", "tokenizer": {"vocabSize": 32000}},
        "batch": {"globalSize": 32, "microSize": 1},
        "steps": 10,
        "schedule": {"warmupSteps": 1},
    }
    workers = {"replicas": 1, "accelerator": {"instanceType": "trn1.32xlarge"}}
    spec = {"workers": workers, "parallelism": {"tensor": 2}, "trainer": trainer}
    job = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": spec}
    assert cli.run(["check", "--config", str(write_config(tmp_path, job))]) == ExitCode.USER_ERROR
    assert "a core of trn1.32xlarge has 16.0 GiB, but a process needs 50.2 GiB of weights" in capsys.readouterr().err


def test_check_explains_a_program_and_names_a_missing_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = {"image": "a:1", "command": ["python", "a b.py"], "batch": {"globalSize": 128}}
    spec: dict[str, Any] = {"workers": {"replicas": 3, "minReplicas": 1}, "program": program}
    job = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": spec}
    assert cli.run(["check", "--config", str(write_config(tmp_path, job))]) == ExitCode.USER_ERROR
    assert "name the device of a worker: workers.accelerator.instanceType" in capsys.readouterr().err

    spec["workers"]["accelerator"] = {"instanceType": "trn1.32xlarge"}
    assert cli.run(["check", "--config", str(write_config(tmp_path, job))]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "job: starts on 2 nodes of 32 processes; useful sizes: 1, 2",
        "program: python 'a b.py'",
        "image: a:1",
    ]


def test_too_little_shared_memory_on_a_node_is_reported_with_the_features_to_switch_off() -> None:
    gib = 1 << 30
    estimate = MemoryEstimate(10**9, 2 * gib, gib, shared_memory=20 * gib, host=40 * gib)
    small = INSTANCES["trn1.2xlarge"]
    first, second = refuse_too_small(estimate, small, "trn1.2xlarge")
    assert first.startswith(
        "snapshots need 20.0 GiB of /dev/shm on each node, but trn1.2xlarge has about 16.0 GiB there"
    )
    assert "switch them, or the copies of a buddy's, off" in first
    assert second.startswith("a node needs 40.0 GiB of memory")
    assert refuse_too_small(estimate, INSTANCES["trn1.32xlarge"], "") == []


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"schedule": {"kind": "Constant", "decaySteps": 5}}, "schedule.decaySteps"),
        ({"parallelism": {"sequence": True}}, "parallelism.sequence"),
        ({"steps": 100, "epochs": 1}, "steps"),
        ({"kind": "TrainingJob", "spec": {"trainer": {"epochs": 1, "steps": 5}}}, "trainer.steps"),
        ({"kind": "TrainingJob", "spec": {"trainer": {}, "precompile": {"sizes": "All"}}}, "precompile.sizes"),
    ],
)
def test_check_refuses_a_setting_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: dict[str, Any], field: str
) -> None:
    assert cli.run(["check", "--config", str(write_config(tmp_path, document))]) == ExitCode.USER_ERROR
    assert f"{field.removeprefix('trainer.')} has no effect" in capsys.readouterr().err


def test_missing_data_and_packages_are_refused_on_the_machine_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "corpus")
    for document, sentence in (
        ({"data": {"source": missing}}, f"data.source {missing}: there is no such file or folder on this machine"),
        (
            {"data": {"sources": [{"source": "python-docs"}, {"source": missing}]}},
            f"data.source {missing}: there is no such",
        ),
        ({"data": {"source": f"{missing}/*.txt"}}, f"data.source {missing}/*.txt: there is no such file or folder"),
        ({"backend": "Nxd"}, "backend is Nxd, but torch_xla and neuronx_distributed cannot be imported"),
    ):
        argv = ["check", "--config", str(write_config(tmp_path, document))]
        assert cli.run(argv) == ExitCode.USER_ERROR
        assert sentence in capsys.readouterr().err
        # A run of several ranks is elsewhere, where both may exist.
        assert cli.run([*argv, "--ranks", "2"]) == 0
        assert f"warning: {sentence}" in capsys.readouterr().out


def test_data_without_a_source_is_refused_with_what_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, "data: {sequenceLength: 16}"))
    for argv in (
        ["check", "--config", config],
        ["check", "--config", config, "--ranks", "2"],
        ["train", "--config", config],
    ):
        assert cli.run(argv) == ExitCode.USER_ERROR
        assert "data names nothing to train on: give data.source (a file, a folder" in capsys.readouterr().err


def test_data_that_exists_or_is_optional_here_is_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("text")
    for source in (str(tmp_path / "one.txt"), str(tmp_path), f"{tmp_path}/*.txt"):
        assert cli.run(["check", "--config", str(write_config(tmp_path, {"data": {"source": source}}))]) == 0
        assert "data.source" not in capsys.readouterr().out
    for remote in ({"source": "s3://bucket/corpus"}, {"hub": {"dataset": "owner/set"}}):
        assert find_missing(TrainingConfig.model_validate({"data": remote})) == []


def write_shape(folder: Path) -> Path:
    """Create a Hugging Face folder of a small Llama without weights."""
    shape = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def test_unread_weights_beside_a_shape_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_shape(tmp_path / "base")
    argv = ["check", "--config", str(write_config(tmp_path, {"model": {"path": str(folder)}}))]
    assert cli.run(argv) == 0
    assert "warning" not in capsys.readouterr().out
    (folder / "model.safetensors").write_bytes(b"")
    assert cli.run(argv) == 0
    assert f"warning: model.path {folder} gives the shape only and its weights are not read" in capsys.readouterr().out


def test_configuration_errors_are_reported_without_importing_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom trainium_trainer import cli\n"
        f"code = cli.run(['train', '--config', {str(write_config(tmp_path, {'steps': 0}))!r}])\n"
        "sys.exit(99 if 'torch' in sys.modules else code)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 64


def test_the_manifest_of_a_job_is_accepted_as_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[4] / "manifests/examples/hlat-7b.yaml"
    assert cli.run(["check", "--config", str(example)]) == 0
    report = capsys.readouterr().out
    assert "job: starts on 128 nodes of 32 processes; useful sizes: 64, 86, 128\n" in report
    assert "warning: data.tokenizer.path /data/tokenizer is not on this machine" in report
    assert "warning: data.source /data/corpus: there is no such file or folder on this machine" in report
    assert "processes: 4096 = data 512 x tensor 8 x pipeline 1" in report
    assert cli.run(["check", "--config", str(example), "--ranks", "2048"]) == 0
    assert "processes: 2048 = data 256" in capsys.readouterr().out
    assert load(example).batch.global_size == 1024


def test_an_error_in_a_manifest_is_reported_with_its_place(tmp_path: Path) -> None:
    document = {"kind": "TrainingJob", "spec": {"workers": {"replica": 3}}}
    with pytest.raises(UserError, match=r"spec: workers\.replica is not a field: did you mean replicas\?"):
        load(write_config(tmp_path, document))


@pytest.mark.parametrize(
    ("field", "advice"),
    [
        ("startBefore: Workers", "set startupPolicy to BeforeWorkers"),
        ("restart: Always", "set restartPolicy to Always"),
    ],
)
def test_a_role_with_an_expected_name_of_a_field_is_refused_with_the_right_one(field: str, advice: str) -> None:
    name, value = field.split(": ")
    container = {"image": "vllm:1", "command": ["vllm"]}
    role = {"name": "rollout", "port": 8000, "template": {"spec": {"containers": [container]}}, name: value}
    with pytest.raises(ValidationError, match=f"role rollout: {name} is not a field: {advice}"):
        TrainingJobSpec.model_validate({"program": {"image": "rl:1", "command": ["train"]}, "roles": [role]})


def test_the_steps_follow_from_the_epochs_and_the_warm_up_from_the_steps() -> None:
    config = TrainingConfig.model_validate(
        {"epochs": 2.5, "batch": {"globalSize": 8}, "schedule": {"warmupRatio": 0.03}}
    )
    resolved = resolve_steps(config, 400)
    assert (resolved.steps, resolved.schedule.warmup_steps) == (125, 4), "rounded up"
    assert resolve_steps(TrainingConfig(), None) == TrainingConfig()


def test_epochs_of_unknown_length_and_a_warm_up_longer_than_the_run_are_refused() -> None:
    config = TrainingConfig.model_validate({"epochs": 1, "batch": {"globalSize": 8}})
    with pytest.raises(UserError, match=r"set data.tokenization to Ahead, or give steps"):
        resolve_steps(config, None)
    assert resolve_steps(config, 40).schedule.warmup_steps == 5, "the default fits the run"
    longer = TrainingConfig.model_validate({"epochs": 1, "batch": {"globalSize": 8}, "schedule": {"warmupSteps": 9}})
    with pytest.raises(UserError, match=r"warmupSteps is 9, but 1 epochs are 5 steps"):
        resolve_steps(longer, 40)


def test_check_reports_the_trained_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_shape(tmp_path / "base")
    config = {
        "model": {"weights": str(base)},
        "tuning": {"method": "LoRA", "lora": {"rank": 4, "alpha": 8}},
        "epochs": 3,
    }
    assert cli.run(["check", "--config", str(write_config(tmp_path, config))]) == 64
    assert "has no tokenizer.json: copy the model's tokenizer there, or name it in" in capsys.readouterr().err
    (base / "tokenizer.model").write_bytes(b"")
    assert cli.run(["check", "--config", str(write_config(tmp_path, config))]) == 64
    assert "has tokenizer.model but no tokenizer.json: convert it once with transformers" in capsys.readouterr().err
    write_tokenizer(base, specials=("<|endoftext|>",), bos=False)
    assert cli.run(["check", "--config", str(write_config(tmp_path, config))]) == 0
    output = capsys.readouterr().out
    assert "tuning: LoRA of rank 4 on 4 layers, scale 2; 2,048 of 344,384 parameters (0.59%) are trained" in output
    assert "run: 3 epochs" in output


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"steps": [99, 101]}, "monitor.profile.steps ends with step 101 but the run has 100 steps"),
        ({"steps": [3, 2]}, "give the first and the last step, at most 20 steps together"),
        ({"steps": [1, 21]}, "give the first and the last step, at most 20 steps together"),
        ({"steps": [1, 2], "ranks": [1, 1]}, "monitor.profile.ranks names a rank twice"),
    ],
)
def test_a_profile_that_cannot_be_recorded_is_refused(tmp_path: Path, profile: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        load(write_config(tmp_path, {"monitor": {"profile": profile}}))
    assert message in str(refused.value)


UNUSED = "which a sequence of {} tokens does not exceed: it has no effect"


@pytest.mark.parametrize(
    ("preset", "length", "line"),
    [
        ("Mistral-7B-v0.1", 2048, f"32 of 32 layers, {UNUSED.format('2,048')}"),
        ("Mistral-7B-v0.1", 4096, f"32 of 32 layers, {UNUSED.format('4,096')}"),
        ("OLMo3-7B", 8192, "24 of 32 layers"),
        ("Mistral-7B-v0.3", 8192, ""),
    ],
)
def test_check_reports_a_window_and_whether_it_has_an_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str, length: int, line: str
) -> None:
    config = {"model": {"preset": preset}, "data": {"sequenceLength": length}}
    assert cli.run(["check", "--config", str(write_config(tmp_path, config))]) == 0
    windows = [text for text in capsys.readouterr().out.splitlines() if text.startswith("window: ")]
    assert windows == ([f"window: a token sees 4,096 positions in {line}"] if line else [])
