"""Run the trainer on the real neuronx-distributed, on the CPU; skip all tests where it cannot be imported.

NXD_SRC names the `src` folder of a checkout of https://github.com/aws-neuron/neuronx-distributed; without it an
installed package is used. docs/backends.md lists what runs where.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.testing.trainer.base_models import save_base

HERE = Path(__file__).parent


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_trainer = _load(HERE.parent / "unit" / "trainer" / "conftest.py", "trainer_conftest")
text_file, base_config, launch = _trainer.text_file, _trainer.base_config, _trainer.launch
documents = _trainer.documents


def _skip_reason() -> str | None:
    """Return why these tests cannot run, or None."""
    source = os.environ.get("NXD_SRC")
    if source and not (Path(source) / "neuronx_distributed").is_dir():
        return f"NXD_SRC is {source}, which has no folder neuronx_distributed"
    if not source and importlib.util.find_spec("neuronx_distributed") is None:
        return "neuronx-distributed is not installed, and NXD_SRC does not name the src folder of a checkout"
    return None


@pytest.fixture(scope="session", autouse=True)
def nxd() -> None:
    """Skip all tests of this folder where they cannot run."""
    reason = _skip_reason()
    if reason:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def torch_xla(request: pytest.FixtureRequest, nxd: None) -> None:
    """Skip tests of the real torch_xla where only its stand-in exists."""
    if request.node.get_closest_marker("torch_xla") and importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla 2.9 is not installed, and the test needs its ZeRO-1 or lazy device")


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = _trainer.RankServer(tmp_path_factory.mktemp("scratch"), HERE / "nxd_rank_server.py")
    yield server
    server.close()


@pytest.fixture
def program(launch: Callable[..., Any], rank_server: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs a program of `programs.py` and returns the results of its ranks."""

    def start(name: str, ranks: int, *overrides: str, **environment: str) -> list[dict[str, Any]]:
        logs = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        logs.mkdir()
        argv = [name, "--config", str(tmp_path / "trainer.yaml")]
        for override in overrides:
            argv += ["--set", override]
        pids = rank_server.request(ranks=ranks, argv=argv, last=[], environment=environment, logs=str(logs))["pids"]
        log_files = [logs / f"rank-{rank}.log" for rank in range(ranks)]
        assert rank_server.request(wait=pids, seconds=300)["codes"] == [0] * ranks, log_files[0].read_text()
        return [json.loads(file.read_text().splitlines()[-1]) for file in log_files]

    return start


@pytest.fixture(scope="session")
def make_base(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Callable[..., Path]:
    """Return a function that writes a folder with a small base model and a tokenizer, equal at each call."""
    from trainium_trainer.data.tokens.encoding import train_tokenizer

    def make(*, tied: bool = False, vocabulary: int = 320) -> Path:
        folder = tmp_path_factory.mktemp("base")
        save_base(folder, **_trainer.BASE_FIELDS | {"vocab_size": vocabulary, "tie_word_embeddings": tied})
        train_tokenizer([iter([text_file.read_text()])], 320).save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture(scope="session")
def base(make_base: Callable[..., Path]) -> Path:
    return make_base()
