"""Runs of the trainer on the real neuronx-distributed, on the CPU; all of it is skipped where that cannot be imported.

NXD_SRC names the `src` folder of a checkout of https://github.com/aws-neuron/neuronx-distributed; without it an
installed package is used. docs/backends.md lists what runs where.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


def _reason() -> str | None:
    """Return why these tests cannot run, or None."""
    source = os.environ.get("NXD_SRC")
    if source and not (Path(source) / "neuronx_distributed").is_dir():
        return f"NXD_SRC is {source}, which has no folder neuronx_distributed"
    if not source and importlib.util.find_spec("neuronx_distributed") is None:
        return "neuronx-distributed is not installed, and NXD_SRC does not name the src folder of a checkout"
    return None


@pytest.fixture(scope="session", autouse=True)
def nxd() -> None:
    """Skip all these tests where they cannot run."""
    reason = _reason()
    if reason:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def torch_xla(request: pytest.FixtureRequest, nxd: None) -> None:
    """Skip what needs torch_xla's own code where a stand-in has its place."""
    if request.node.get_closest_marker("torch_xla") and importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla 2.9 is not installed, whose own ZeRO-1 or lazy device this is")


class NxdRankServer(_trainer.RankServer):  # type: ignore[name-defined]
    """The rank server with stand-ins and NxD."""

    def __init__(self, scratch: Path) -> None:
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(scratch)}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nxd_rank_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )
        self._requests = 0


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    process = NxdRankServer(tmp_path_factory.mktemp("scratch"))
    yield process
    process.close()


@pytest.fixture
def program(launch: Callable[..., Any], rank_server: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs one of `programs.py` and returns the results of its ranks."""

    def start(name: str, ranks: int, *overrides: str, **environment: str) -> list[dict[str, Any]]:
        logs = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        logs.mkdir()
        argv = [name, "--config", str(tmp_path / "trainer.yaml")]
        for override in overrides:
            argv += ["--set", override]
        pids = rank_server.request(ranks=ranks, argv=argv, last=[], environment=environment, logs=str(logs))["pids"]
        texts = [logs / f"rank-{rank}.log" for rank in range(ranks)]
        assert rank_server.request(wait=pids, seconds=300)["codes"] == [0] * ranks, texts[0].read_text()
        return [json.loads(text.read_text().splitlines()[-1]) for text in texts]

    return start


@pytest.fixture(scope="session")
def make_base(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Callable[..., Path]:
    """Return a function that makes a folder with a small base model and a tokenizer, equal at each call."""
    from trainium_trainer.data.tokens.encoding import train_tokenizer

    def make(*, tied: bool = False, vocabulary: int = 320) -> Path:
        folder = tmp_path_factory.mktemp("base")
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            max_position_embeddings=256,
            initializer_range=0.2,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        train_tokenizer([iter([text_file.read_text()])], 320).save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture(scope="session")
def base(make_base: Callable[..., Path]) -> Path:
    return make_base()
