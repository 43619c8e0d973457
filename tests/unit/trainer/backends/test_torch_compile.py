"""Compile layers with Inductor: the same curve up to rounding, bitwise the same when repeated."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.conftest import Job, Launcher
from trainium_contract.trainer.model import ModelConfig
from trainium_contract.trainer.parallelism import TorchCompile
from trainium_trainer.backends.torch_compile import check_compiler, compile_layers
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.exits import UserError
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.loss import compute_loss_sum

pytestmark = pytest.mark.timeout(500)  # real processes and a real compiler

COMPILER_SECONDS = 200
"""The time limit of a run with an empty cache."""
COMPILED = ["torchCompile=Layers", "steps=4"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache for Inductor; skip without a compiler."""
    try:
        check_compiler(TorchCompile.LAYERS, "cpu")
    except UserError as reason:
        pytest.skip(str(reason))
    return tmp_path_factory.mktemp("inductor")


def run(launch: Launcher, ranks: int, name: str, overrides: list[str], cache: Path) -> Job:
    return launch(ranks, name, overrides, TORCHINDUCTOR_CACHE_DIR=str(cache)).finish(COMPILER_SECONDS)


SHARDED = ["dataParallel=FullySharded", "recompute=Selective"]
TENSOR = ["parallelism.tensor=2", "parallelism.sequence=true"]
MASKED = ["data.maskDocuments=true", "recompute=Full"]
VALIDATED = "data.validation={fraction: 0.2, split: Tail, everySteps: 2, samples: 5}"


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(
            1, [*MASKED, VALIDATED], id="one process, masked documents, full recompute", marks=pytest.mark.long
        ),
        pytest.param(2, SHARDED, id="sharded, selective recompute", marks=pytest.mark.long),
        pytest.param(2, TENSOR, id="tp2, sequence", marks=pytest.mark.long),
        pytest.param(2, ["parallelism.pipeline=2"], id="pp2", marks=pytest.mark.long),
    ],
)
def test_the_curve_is_that_of_the_uncompiled_run(
    launch: Launcher, cache: Path, ranks: int, overrides: list[str]
) -> None:
    plain = run(launch, ranks, "plain", [*overrides, "steps=4"], cache)
    before = {*cache.rglob("*.so")}
    compiled = run(launch, ranks, "compiled", [*overrides, *COMPILED], cache)
    assert {*cache.rglob("*.so")} - before, "nothing was compiled"
    assert len(plain.metrics()) == 4
    compiled.assert_same_curve(plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # from Dynamo
def test_one_graph_for_all_layers_has_the_gradients_of_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace without the compiler; code that cannot be one program fails."""
    torch.manual_seed(0)
    model = Llama(resolve_shape(ModelConfig(num_layers=2, hidden_size=32, intermediate_size=64), 320))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, 320, (2, 16))

    def gradients() -> list[torch.Tensor]:
        compute_loss_sum(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        values = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return values

    plain = gradients()
    graphs = []

    def trace(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module = torch.nn.Module.compile

    def without_compiler(self: torch.nn.Module, **settings: Any) -> None:
        assert settings == {"backend": "inductor", "dynamic": False, "fullgraph": True}
        compile_module(self, **(settings | {"backend": trace}))

    monkeypatch.setattr(torch.nn.Module, "compile", without_compiler)
    compile_layers(model, TorchCompile.LAYERS, "cpu")
    for gradient, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(gradient, expected)
    assert len(graphs) == 1, "one program for all layers"


@pytest.mark.long
def test_a_repeated_compiled_run_is_bitwise_equal(launch: Launcher, cache: Path) -> None:
    first, second = (run(launch, 1, name, COMPILED, cache) for name in ("first", "second"))
    assert first.losses() == second.losses()
    assert [line["gradNorm"] for line in first.metrics()] == [line["gradNorm"] for line in second.metrics()]


def test_without_a_compiler_the_run_is_refused_in_a_sentence(launch: Launcher, tmp_path: Path) -> None:
    job = launch(1, "none", COMPILED, PATH=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    assert job.wait() == [64], job.log()
    assert "no C++ compiler is here" in job.log()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("device", "adapters", "compiled"), [("cpu", False, 2), ("cpu", True, 0), ("cuda", True, 2)])
def test_layers_with_adapters_stay_uncompiled_on_a_cpu(
    device: str, adapters: bool, compiled: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _self, **options: calls.append(options))
    with torch.device("meta"):
        model = Llama(resolve_shape(ModelConfig(num_layers=2, hidden_size=32, intermediate_size=64), 64))
    compile_layers(model, TorchCompile.LAYERS, device, adapters=adapters)
    assert len(calls) == compiled
    assert ("torchCompile is ignored" in caplog.text) == (compiled == 0)
