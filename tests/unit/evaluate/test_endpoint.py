"""Ask servers with OpenAI's protocol: a real one, and fake ones that fail.

Tests of `transformers serve` and of tasks need packages of `make test-tasks` and are skipped without them.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.testing.suite.loopback_http import LoopbackServer
from tests.testing.suite.timeouts import scaled
from trainium_trainer.cli import run
from trainium_trainer.evaluate.answering.folder import ModelFiles, open_model_files
from trainium_trainer.evaluate.answering.loading import LoadedModel, load

HAS_SERVER_PACKAGES = all(importlib.util.find_spec(name) is not None for name in ("fastapi", "uvicorn", "openai"))
HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
LISTING = json.dumps({"object": "list", "data": [{"id": "small"}]}).encode()
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]


@contextmanager
def run_server(
    answer: Callable[[BaseHTTPRequestHandler, dict[str, Any]], None], listing: bytes = LISTING
) -> Iterator[str]:
    """Serve a list of models and completions by a function; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self, listing)

        def do_POST(self) -> None:
            answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_: Any) -> None:
            pass

    with LoopbackServer(Handler).running() as http_server:
        yield f"{http_server.url}/v1"


def respond(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json" if body.startswith(b"{") else "text/event-stream")
    handler.end_headers()
    handler.wfile.write(body)


def event(text: str, finish_reason: str | None = None, **fields: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': finish_reason}], **fields})}\n\n".encode()


def test_an_answer_is_shown_as_it_arrives_and_settings_and_key_are_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[dict[str, Any]] = []

    def answer(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        requests.append(request | {"key": handler.headers["Authorization"], "path": handler.path})
        respond(handler, b": comment\n\n" + event("two ") + event("words", "length") + b"data: [DONE]\n\ngarbage")

    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    with run_server(answer) as url:
        options = ("--prompt", "Say", "--max-new-tokens", "2", "--temperature", "0.5", "--top-k", "3", "--stop", "x")
        assert run(["generate", "--endpoint", url, *options]) == 0
        assert capsys.readouterr().out == "[1] prompt\nSay\n[1] answer of small\ntwo words\n(2 tokens, Length)\n"
        assert run(["generate", "--endpoint", url, "--endpoint-model", "other", "--prompt", "Say", "--json"]) == 0
        line = json.loads(capsys.readouterr().out)
    assert line == {"prompt": "Say", "answer": "two words", "tokens": 2, "ending": "Length"}
    first, second = requests
    assert (first["model"], second["model"]) == ("small", "other")
    assert (first["key"], first["path"], first["stream"]) == ("Bearer secret-key", "/v1/completions", True)
    assert (first["max_tokens"], first["temperature"], first["top_k"], first["stop"]) == (2, 0.5, 3, ["x"])
    assert "top_k" not in second


def _drip(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:  # until the client closes the connection
        handler.wfile.write(b"d")
        time.sleep(0.05)


def _never_answer(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    handler.rfile.read(1)  # until the client closes the connection


def _endless(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(event("a" * 60_000))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda handler, _: respond(handler, b"<html>Sign in</html>"), "sends what is not OpenAI's protocol"),
        (lambda handler, _: respond(handler, b"data: {\x00\xff\n"), "sends what is not OpenAI's protocol"),
        (lambda handler, _: respond(handler, b'data: {"choices": 3}\n'), "sends what is not OpenAI's protocol"),
        (lambda handler, _: respond(handler, b"data: [1]\n"), "sends what is not OpenAI's protocol"),
        (lambda handler, _: respond(handler, b'data: {"error": {"message": "no memory"}}\n'), "no memory"),
        (lambda handler, _: respond(handler, event("half")), "the answer breaks off after 1 parts"),
        (lambda handler, _: respond(handler, b""), "the answer breaks off after 0 parts"),
        (lambda handler, _: respond(handler, b"wrong key", 401), "answers 401 Unauthorized to completions (wrong key)"),
        (_drip, "no whole answer in 1 s"),
        (_never_answer, "no whole answer in 1 s"),
        (_endless, "more than 16 MiB"),
    ],
)
def test_a_failure_of_the_server_is_reported_in_time(
    answer: Callable[..., None], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_server(answer) as url:
        seconds = "60" if answer is _endless else "1"
        assert run(["generate", "--endpoint", url, "--endpoint-seconds", seconds, "--prompt", "Say"]) == 64
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert sentence in last_line
    assert url in last_line


@pytest.mark.parametrize(
    ("listing", "sentence"),
    [
        (b"{}", "sends what is not OpenAI's protocol"),
        (b'{"data": []}', "lists 0 models (none): name one by --endpoint-model"),
        (b'{"data": [{"id": "a"}, {"id": "b"}]}', "lists 2 models (a, b)"),
    ],
)
def test_the_model_of_a_server_is_its_only_one(
    listing: bytes, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_server(_never_answer, listing) as url:
        assert run(["generate", "--endpoint", url, "--prompt", "Say"]) == 64
    assert sentence in capsys.readouterr().err


def test_a_wrong_address_or_key_and_folders_beside_it_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        closed_url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        for url, sentence in (
            (closed_url, "cannot be asked (Connection refused): start the server"),
            ("ftp://host", "give a URL such as"),
            ("http://key@host/v1", "a key in OPENAI_API_KEY"),
            ("http://host:port/v1", "give a URL such as"),
        ):
            assert run(["generate", "--endpoint", url, "--prompt", "Say"]) == 64
            assert sentence in capsys.readouterr().err
    assert run(["generate", "MODEL", "--endpoint", closed_url, "--prompt", "Say"]) == 64
    assert "leave out --base, --adapter and MODEL" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", "secret\nkey")
    assert run(["generate", "--endpoint", closed_url, "--prompt", "Say"]) == 64
    error = capsys.readouterr().err
    assert "OPENAI_API_KEY has characters" in error
    assert "secret" not in error


@pytest.fixture(scope="module")
def folder(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model that answers in ASCII; a stream divides other text within characters."""
    model_folder = write_model(tmp_path_factory.mktemp("served") / "model", seed=4, max_position_embeddings=256)
    model_files, file = open_model_files(model_folder), model_folder / "model.safetensors"
    weights = load_file(file)
    for token in range(model_files.vocabulary):
        if not model_files.decode([token]).isascii():
            weights["lm_head.weight"][token] = 0
    save_file(weights, file, metadata={"format": "pt"})
    return model_folder


@pytest.fixture(scope="module")
def real_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`transformers serve` with the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [*(sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)), "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--device", "cpu", "--dtype", "float32"],
            stdout=file,
            stderr=file,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + scaled(120)
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not HAS_SERVER_PACKAGES, reason="packages of transformers serve are not installed")
def test_a_real_server_gives_the_answers_of_the_folder(
    real_server: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prompt", "gradient loss", "--prompt", "step batch", "--max-new-tokens", "8", "--json")
    assert run(["generate", "--endpoint", real_server, "--endpoint-model", str(folder), *options]) == 0
    served = capsys.readouterr().out
    assert run(["generate", str(folder), "--device", "cpu", *options]) == 0
    assert served == capsys.readouterr().out
    records = [{"instruction": f"Say {word}.", "response": word} for word in ("step", "batch", "token", "shard") * 3]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {
        "source": str(tmp_path / "data.jsonl"),
        "format": "Instruction",
        "sequenceLength": 96,
        "tokenizer": {"path": str(folder / "tokenizer.json")},
        "cacheDirectory": str(tmp_path / "cache"),
        "validation": {"fraction": 0.5, "split": "Tail"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": data}))
    common = ("--config", str(tmp_path / "run.yaml"), "--max-new-tokens", "6", "--output")
    endpoint = ("--endpoint", real_server, "--endpoint-model", str(folder))
    assert run(["evaluate", *endpoint, *common, str(tmp_path / "served.json")]) == 0
    assert run(["evaluate", str(folder), "--device", "cpu", *common, str(tmp_path / "folder.json")]) == 0
    served_result, result = (json.loads((tmp_path / name).read_text()) for name in ("served.json", "folder.json"))
    assert [answer["after"] for answer in served_result["answers"]] == [answer["after"] for answer in result["answers"]]
    assert served_result["figures"] == [figure for figure in result["figures"] if figure["name"] != "perplexity"]


class LikelihoodServer:
    """Answer completions with a model, and with the likelihoods of the prompt (`echo`), like vLLM."""

    def __init__(self, folder: Path) -> None:
        self.model_files: ModelFiles = open_model_files(folder)
        self.model: LoadedModel = load(self.model_files)

    def __call__(self, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        choices = [self._choice(number, ids, request) for number, ids in enumerate(request["prompt"])]
        respond(handler, json.dumps({"choices": choices}).encode())

    @torch.no_grad()
    def _choice(self, number: int, ids: list[int], request: dict[str, Any]) -> dict[str, Any]:
        if not request.get("echo"):
            out = self.model.network.generate(
                torch.tensor([ids]), max_new_tokens=request["max_tokens"], do_sample=False, pad_token_id=0
            )
            text = self.model_files.decode(out[0, len(ids) :].tolist())
            ends = [text.find(stop) for stop in request["stop"] if stop in text]
            return {"index": number, "text": text[: min(ends, default=len(text))]}
        logs = self.model.network(torch.tensor([ids])).logits[0].log_softmax(-1)
        likelihood = [None, *(float(logs[index, token]) for index, token in enumerate(ids[1:]))]
        best = [None, *({"best": float(row.max())} for row in logs[:-1])]
        likelihoods = {"token_logprobs": [*likelihood, 0.0], "top_logprobs": [*best, {"best": 0.0}]}
        return {"index": number, "text": "", "logprobs": likelihoods}


@pytest.mark.skipif(not HAS_HARNESS, reason="lm-eval is not installed")
def test_tasks_of_a_server_give_the_figures_of_its_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tasks_folder: Path
) -> None:
    common = ("--tasks", "tiny_choice,tiny_copy", "--shots", "1", "--include-path", str(tasks_folder), "--output")
    with run_server(LikelihoodServer(folder)) as url:
        assert run(["evaluate", str(folder), "--endpoint", url, *common, str(tmp_path / "served.json")]) == 0
        assert f"answered by {url}." in capsys.readouterr().out
        assert run(["evaluate", "--endpoint", url, *common, str(tmp_path / "none.json")]) == 64
        assert "tiny_choice: compares likelihoods of tokens: give also a MODEL folder" in capsys.readouterr().err
    assert run(["evaluate", str(folder), "--device", "cpu", *common, str(tmp_path / "folder.json")]) == 0
    served, local = (json.loads((tmp_path / name).read_text())["models"] for name in ("served.json", "folder.json"))
    assert served[0]["model"] == "small"
    assert served[0]["figures"] == local[0]["figures"]
    with run_server(lambda handler, _: respond(handler, b'{"choices": [{"text": "no logprobs", "index": 0}]}')) as url:
        assert run(["evaluate", str(folder), "--endpoint", url, *common, str(tmp_path / "none.json")]) == 64
    assert "likelihoods need a server that returns them for the prompt" in capsys.readouterr().err
