"""Compare curves, states and checkpoints of the nxd backend, on the real neuronx-distributed, with the native one."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from trainium_trainer import cli
from trainium_trainer.checkpoint.format.reader import CheckpointReader
from trainium_trainer.checkpoint.root.survey import survey
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

Metrics = list[dict[str, Any]]

pytestmark = pytest.mark.timeout(900)  # the first test also waits for NxD's imports

NXD = "backend=Nxd"
TP = "parallelism.tensor=2"
TP4 = "parallelism.tensor=4"
SP = "parallelism.sequence=true"
ZERO1 = "dataParallel=FullySharded"
CONSTANT = "schedule.kind=Constant"
needs_torch_xla = pytest.mark.torch_xla


def run(launch: Callable[..., Any], ranks: int, name: str, overrides: Sequence[str] = (), **options: Any) -> Metrics:
    return launch(ranks, name, list(overrides), **options).finish(300).metrics()


def assert_same_curve(metrics: Metrics, reference: Metrics) -> None:
    assert [line["tokens"] for line in metrics] == [line["tokens"] for line in reference]
    for line, expected in zip(metrics, reference, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["gradNorm"] == pytest.approx(expected["gradNorm"], rel=1e-3)
        for key in ("parameterNorm", "validationLoss"):
            assert (key in line) == (key in expected)
            assert line.get(key, 0) == pytest.approx(expected.get(key, 0), rel=1e-5)


@pytest.fixture
def reference(launch: Callable[..., Any]) -> Metrics:
    return run(launch, 1, "reference", ["backend=Native"])


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, [], id="one"),
        pytest.param(2, [TP], id="tp2"),
        pytest.param(2, [TP, SP], id="tp2, sequence"),
        pytest.param(2, [], id="dp2"),
        pytest.param(3, ["batch.microSize=1"], id="dp3, an empty pass"),
        pytest.param(3, [], id="dp3, a partly filled pass"),
        pytest.param(3, [ZERO1, "batch.microSize=1"], id="zero1 dp3, an empty pass", marks=needs_torch_xla),
        pytest.param(4, [TP], id="dp2 tp2"),
        pytest.param(4, [TP, SP, "batch.microSize=4"], id="dp2 tp2, sequence, no accumulation"),
        pytest.param(4, [TP4, SP], id="tp4, repeated heads as on trn1"),
        pytest.param(2, [TP, "recompute=Selective"], id="tp2, selective recompute"),
        pytest.param(2, [TP, SP, "recompute=Full"], id="tp2, sequence, full recompute"),
        pytest.param(1, [ZERO1], id="zero1", marks=needs_torch_xla),
        pytest.param(2, [ZERO1], id="zero1 dp2", marks=needs_torch_xla),
        pytest.param(2, ["dataParallel=ShardedOptimizer"], id="zero1 by its name", marks=needs_torch_xla),
        pytest.param(4, [ZERO1, TP, SP], id="zero1 dp2 tp2, sequence", marks=needs_torch_xla),
    ],
)
def test_the_loss_curve_equals_that_of_the_native_backend(
    launch: Callable[..., Any], reference: Metrics, ranks: int, overrides: list[str]
) -> None:
    assert_same_curve(run(launch, ranks, "nxd", [NXD, *overrides]), reference)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, [], id="one"),
        pytest.param(2, [TP, SP, "recompute=Selective"], id="tp2, sequence, selective recompute"),
        pytest.param(4, [TP, "recompute=Full"], id="dp2 tp2, full recompute"),
    ],
)
def test_masked_documents_have_the_curve_of_the_native_backend(
    launch: Callable[..., Any], documents: Path, ranks: int, overrides: list[str]
) -> None:
    text, masked = f"data.source={documents}", "data.maskDocuments=true"
    unmasked_curve = run(launch, 1, "unmasked", ["backend=Native", text])
    masked_curve = run(launch, 1, "masked", ["backend=Native", text, masked])
    assert [line["loss"] for line in masked_curve] != [line["loss"] for line in unmasked_curve]
    assert_same_curve(run(launch, ranks, "nxd", [NXD, text, masked, *overrides]), masked_curve)


def test_heads_repeated_as_on_trn2_make_the_same_curve(launch: Callable[..., Any], reference: Metrics) -> None:
    assert_same_curve(run(launch, 4, "nxd", [NXD, TP4], TEST_NXD_TARGET="trn2"), reference)


def test_untied_embeddings_are_divided_like_tied_ones(launch: Callable[..., Any]) -> None:
    untied = "model.tieEmbeddings=false"
    whole = run(launch, 1, "whole", ["backend=Native", untied])
    assert_same_curve(run(launch, 2, "divided", [NXD, untied, TP, SP]), whole)


@needs_torch_xla
def test_zero1_pads_parameters_that_do_not_divide(launch: Callable[..., Any]) -> None:
    batch = "batch.globalSize=6"
    whole = run(launch, 1, "whole", ["backend=Native", batch])
    assert_same_curve(run(launch, 3, "padded", [NXD, ZERO1, batch]), whole)


@pytest.mark.parametrize(
    ("ranks", "overrides", "rel"),
    [
        pytest.param(1, ["precision=BFloat16"], 1e-3, id="master weights"),
        pytest.param(2, ["precision=BFloat16", TP], 1e-3, id="master weights, tp2"),
        pytest.param(4, ["precision=BFloat16", ZERO1, TP, SP], 1e-3, id="master weights, zero1", marks=needs_torch_xla),
        pytest.param(2, ["precision=BFloat16Stochastic", ZERO1, TP], 2e-2, id="bfloat16", marks=needs_torch_xla),
    ],
)
def test_half_precision_stays_close_to_full_precision(
    launch: Callable[..., Any], reference: Metrics, ranks: int, overrides: list[str], rel: float
) -> None:
    half = run(launch, ranks, "half", [NXD, *overrides])
    assert half[-1]["loss"] == pytest.approx(reference[-1]["loss"], rel=rel)
    assert half[0]["gradNorm"] == pytest.approx(reference[0]["gradNorm"], rel=1e-2)
    assert half[-1]["loss"] != reference[-1]["loss"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param([ZERO1], marks=needs_torch_xla),
        pytest.param([ZERO1, "precision=BFloat16"], marks=needs_torch_xla),
    ],
    ids=["replicated", "zero1", "zero1, master weights"],
)
def test_a_resumed_run_is_bit_identical(launch: Callable[..., Any], overrides: list[str]) -> None:
    """The resume of ZeRO-1 in the library silently restores the weights from before the load."""
    settings = [NXD, TP, CONSTANT, *overrides]
    expected = run(launch, 4, "uninterrupted", [*settings, "steps=6"])
    run(launch, 4, "halted", [*settings, "steps=3"])
    resumed = run(launch, 4, "halted", [*settings, "steps=6"])
    assert [line["loss"] for line in resumed] == [line["loss"] for line in expected]
    assert [line["gradNorm"] for line in resumed] == [line["gradNorm"] for line in expected]


@needs_torch_xla
def test_a_checkpoint_is_loaded_in_every_layout_and_backend(launch: Callable[..., Any]) -> None:
    reference = run(launch, 1, "reference", ["backend=Native", CONSTANT, "steps=10"])
    layouts = [
        (2, [NXD, ZERO1]),
        (2, [NXD, ZERO1, TP, SP]),
        (1, ["backend=Native"]),
        (4, [NXD, TP4]),
        (4, [NXD, ZERO1, TP]),
    ]
    for number, (ranks, overrides) in enumerate(layouts, start=1):
        metrics = run(launch, ranks, "resumed", [*overrides, CONSTANT, f"steps={2 * number}"])
    assert_same_curve(metrics, reference)


def test_a_killed_run_resumes_from_memory(launch: Callable[..., Any]) -> None:
    settings = [NXD, TP, CONSTANT, "steps=12"]
    reference = run(launch, 2, "reference", settings)
    job = launch(2, "killed", settings, memory=True)
    job.wait_for_step(5, 300)
    for pid in job.pids:
        os.kill(pid, signal.SIGKILL)
    job.wait()
    resumed = launch(2, "killed", settings, memory=True)
    assert resumed.wait(300) == [0, 0], resumed.log()
    assert "from memory" in resumed.log()
    assert resumed.losses() == [line["loss"] for line in reference]


def test_a_nonfinite_step_is_not_applied(launch: Callable[..., Any]) -> None:
    job = launch(2, "broken", [NXD, TP, "model.ropeTheta=1e-300", "steps=2"])
    assert job.wait(300) == [65, 65]
    assert "step 1: loss is nan" in job.log()


@pytest.mark.parametrize(
    ("ranks", "overrides", "forward", "backward"),
    [
        pytest.param(3, [], [2], [2], id="dp3"),
        pytest.param(4, [TP], [2, 3], [3], id="dp2 tp2"),
        pytest.param(3, [ZERO1], [2], [2], id="zero1 dp3", marks=needs_torch_xla),
    ],
)
def test_nonfinite_values_are_attributed_to_their_rank(
    program: Callable[..., Any], ranks: int, overrides: list[str], forward: list[int], backward: list[int]
) -> None:
    """A loss that is not finite reaches the gradients of the tensor-parallel group."""
    for result in program("nonfinite", ranks, NXD, *overrides):
        assert result == {"forward": [False, forward], "backward": [False, backward]}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallelism.pipeline=2"], "backend Nxd has no pipeline"),
        (["precision=BFloat16Stochastic"], "set dataParallel to ShardedOptimizer"),
    ],
    ids=["pipeline", "rounding"],
)
def test_an_unsupported_option_is_an_error(launch: Callable[..., Any], overrides: list[str], message: str) -> None:
    job = launch(2, "refused", [NXD, *overrides])
    assert job.wait(300) == [64, 64]
    assert message in job.log().splitlines()[-1]


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_shared_values_agree_after_different_rounding(program: Callable[..., Any], target: str) -> None:
    for result in program("agree", 4, TP4, NXD, TEST_NXD_TARGET=target):
        assert result["before"] > 0
        assert result["after"] == 0
        assert result["changed"] == []


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(2, [], id="dp2"),
        pytest.param(4, [TP, SP], id="dp2 tp2, sequence"),
        pytest.param(4, [TP, ZERO1], id="zero1 dp2 tp2", marks=needs_torch_xla),
    ],
)
def test_validation_and_weight_norm_equal_those_of_the_native_backend(
    program: Callable[..., Any], ranks: int, overrides: list[str]
) -> None:
    (expected, _) = program("evaluate", 2, "backend=Native")
    for result in program("evaluate", ranks, NXD, *overrides):
        assert float(result["losses"][0]) == pytest.approx(float(expected["losses"][0]), rel=1e-6)
        assert result["losses"][1] == expected["losses"][1] == "nan"
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-6)


@needs_torch_xla
@pytest.mark.parametrize("tied", [True, False])
def test_checkpoints_convert_to_and_from_nxd(
    launch: Callable[..., Any], program: Callable[..., Any], tmp_path: Path, tied: bool
) -> None:
    settings = [NXD, ZERO1, TP, "precision=BFloat16", f"model.tieEmbeddings={str(tied).lower()}"]
    run(launch, 4, "run", [*settings, "steps=3"])
    root, config = tmp_path / "run", tmp_path / "converted.yaml"
    document = yaml.safe_load((tmp_path / "trainer.yaml").read_text())
    document["model"]["tieEmbeddings"] = tied
    config.write_text(yaml.safe_dump(document))
    converted, options = str(tmp_path / "converted"), ["--config", str(config)]
    assert cli.run(["convert", "to-nxd", str(root), converted, "--tensor", "2", "--zero1", "2", *options]) == 0
    for result in program("reload", 4, *settings, f"checkpoint.path={root}"):
        assert result["content"]["step"] == 3
    assert cli.run(["convert", "from-nxd", str(tmp_path / "resaved"), str(tmp_path / "back"), *options]) == 0
    before, after = (open_newest(path) for path in (root, tmp_path / "back"))
    assert before.tensors.keys() == after.tensors.keys()
    assert [name for name in before.tensors if not torch.equal(before.read(name), after.read(name))] == []


def open_newest(root: Path) -> CheckpointReader:
    storage = PosixStorage(root)
    return CheckpointReader(storage, survey(storage).committed[0], Retry(()))
