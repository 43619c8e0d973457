"""Convert settings of compiler and runtime to variables, and refuse contradicting variables of the user."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer import neuron_environment
from trainium_trainer.configuration.config import load, read_launch, resolve_settings
from trainium_trainer.exits import UserError
from trainium_trainer.loop.profile import capture_folder

FLAGS = "NEURON_CC_FLAGS"


def config(**neuron: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"backend": "Nxd", "neuron": neuron})


def variables(user_variables: dict[str, str] | None = None, *, nxd: bool = True, **neuron: Any) -> dict[str, str]:
    return neuron_environment.list_variables(config(**neuron), nxd=nxd, given=user_variables or {})


def test_the_defaults_are_those_of_hlat() -> None:
    assert variables() == {
        FLAGS: "--model-type=transformer --distribution-strategy=llm-training --auto-cast=none"
        " --retry_failed_compilation",
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_RT_EXEC_TIMEOUT": "4000",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "0",
        "MALLOC_ARENA_MAX": "64",
    }


def test_every_setting_reaches_its_variable() -> None:
    environment = variables(
        modelType="Generic",
        distributionStrategy="Unspecified",
        optimizationLevel=1,
        autoCast="Matmult",
        ccPipelineTilingFactor=2,
        retryFailedCompilation=False,
        extraCompilerFlags=["--enable-saturate-infinity"],
        cacheDirectory="/var/cache/neuron",
        fuseSoftmax=False,
        stochasticRounding=True,
        stochasticRoundingSeed=7,
        execTimeoutSeconds=100,
        mallocArenas=None,
    )
    assert shlex.split(environment.pop(FLAGS)) == [
        "--model-type=generic",
        "--auto-cast=matmult",
        "--optlevel=1",
        "--tensorizer-options=--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=2",
        "--enable-saturate-infinity",
    ]
    assert environment == {
        "NEURON_COMPILE_CACHE_URL": "/var/cache/neuron",
        "NEURON_FUSE_SOFTMAX": "0",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_RT_EXEC_TIMEOUT": "100",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "7",
    }


def test_torch_neuron_has_no_variable_that_its_runtime_does_not_support() -> None:
    inflight = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"
    assert inflight not in variables(nxd=False)
    assert variables({inflight: "7"})[inflight] == "7", "the user's value is kept"


def test_compiler_flags_of_the_user_are_kept() -> None:
    user_variables = {FLAGS: "--retry_failed_compilation --model-type transformer --enable-saturate-infinity --lnc 2"}
    words = shlex.split(variables(user_variables)[FLAGS])
    assert words.count("--retry_failed_compilation") == 1
    assert words[-2:] == ["--enable-saturate-infinity", "--lnc=2"]
    assert "--model-type=transformer" in words


@pytest.mark.parametrize(
    ("user_variables", "message"),
    [
        (
            {FLAGS: "--model-type=generic"},
            "NEURON_CC_FLAGS has --model-type=generic, but neuron.modelType makes it --model-type=transformer",
        ),
        ({FLAGS: "-O1"}, "NEURON_CC_FLAGS has -O1, but neuron.optimizationLevel makes it --optlevel=2"),
        ({FLAGS: "--auto-cast 'none"}, "is no command line"),
        (
            {"NEURON_RT_EXEC_TIMEOUT": "7"},
            "NEURON_RT_EXEC_TIMEOUT is '7', but neuron.execTimeoutSeconds makes it '4000'",
        ),
        ({"XLA_USE_BF16": "1"}, "would turn float32 master weights and moments into bfloat16"),
    ],
    ids=["flag", "level", "quotes", "runtime", "downcast"],
)
def test_a_variable_that_contradicts_the_configuration_is_refused_by_name(
    user_variables: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        variables(user_variables, optimizationLevel=2)
    assert message in str(refused.value)


def test_variables_with_the_configured_value_are_no_contradiction() -> None:
    first = variables(optimizationLevel=2)
    assert variables(first, optimizationLevel=2) == first


def test_a_flag_that_has_a_separate_field_is_refused_among_the_extra_flags(tmp_path: Path) -> None:
    file = tmp_path / "trainer.yaml"
    file.write_text("neuron: {extraCompilerFlags: ['--optlevel=1']}")
    with pytest.raises(UserError, match=r"has --optlevel=1: remove it there and set neuron\.optimizationLevel"):
        load(file)


def test_nothing_is_set_where_no_neuron_device_can_be_used(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    neuron_environment.apply(TrainingConfig(), environment, devices=tmp_path)
    assert environment == {}
    (tmp_path / "neuron0").touch()
    neuron_environment.apply(TrainingConfig.model_validate({"device": "Cpu"}), environment, devices=tmp_path)
    assert environment == {}
    neuron_environment.apply(
        TrainingConfig.model_validate({"neuron": {"mallocArenas": None}}), environment, devices=tmp_path
    )
    assert environment["NEURON_RT_EXEC_TIMEOUT"] == "4000"


def test_the_runtime_captures_only_on_requested_ranks(tmp_path: Path) -> None:
    (tmp_path / "neuron0").touch()
    profile = {"steps": [5, 6], "ranks": [1], "neuron": True}
    config = TrainingConfig.model_validate(
        {"monitor": {"profile": profile}, "neuron": {"mallocArenas": None}, "checkpoint": {"path": str(tmp_path)}}
    )
    without_profile, with_profile = ({"RANK": rank, "WORLD_SIZE": "2"} for rank in "01")
    assert capture_folder(resolve_settings(config, read_launch(without_profile), vocabulary=300)) is None
    folder = capture_folder(resolve_settings(config, read_launch(with_profile), vocabulary=300))
    assert folder == tmp_path / "profiles" / "neuron-rank-1"
    environment = {"NEURON_RT_INSPECT_DEVICE_PROFILE": "session"}
    neuron_environment.apply(config, environment, devices=tmp_path, capture=folder)
    assert {name: value for name, value in environment.items() if "INSPECT" in name} == {
        "NEURON_RT_INSPECT_ENABLE": "1",
        "NEURON_RT_INSPECT_OUTPUT_DIR": str(folder),
        "NEURON_RT_INSPECT_SYSTEM_PROFILE": "1",
        "NEURON_RT_INSPECT_DEVICE_PROFILE": "session",
    }
    assert folder.is_dir()
    for name, value in (("NEURON_RT_INSPECT_ENABLE", "0"), ("NEURON_RT_INSPECT_OUTPUT_DIR", "/elsewhere")):
        with pytest.raises(UserError, match=rf"{name} is '{value}', but monitor\.profile\.neuron makes it"):
            neuron_environment.apply(config, {name: value}, devices=tmp_path, capture=folder)
