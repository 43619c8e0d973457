"""Serve answers of the newest policies by OpenAI's protocol for completions: the smallest server for grpo_rollout.py.

A request names the weights (`model: policy-8`) and a seed, so an answer is the same from every pod and at each attempt.
"""

# ruff: noqa: INP001 - a user's program, in no package
from __future__ import annotations

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

VOCABULARY = 12
_MAX_BODY_BYTES, _MAX_TOKENS, _MAX_SAMPLES = 65_536, 64, 64


class Policies:
    """The policies of a folder; the newest one that was asked for stays in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._loaded: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def find_logits(self, name: str) -> torch.Tensor:
        """Return the logits of each next token. Raises FileNotFoundError, and ValueError for another shape."""
        with self._lock:
            if self._loaded[0] != name:
                if not name.replace("-", "").isalnum():
                    raise FileNotFoundError(name)
                logits = torch.load(self._folder / f"{name}.pt", weights_only=True)["policy"]["weight"]
                if logits.shape != (VOCABULARY, VOCABULARY):
                    raise ValueError(
                        f"{name} has weights of shape {tuple(logits.shape)}, and this server serves "
                        f"{(VOCABULARY, VOCABULARY)}: start trainer and servers with the same model"
                    )
                self._loaded = (name, logits)
            return self._loaded[1]


def complete(logits: torch.Tensor, prompt: list[int], tokens: int, seed: int) -> list[int]:
    """Sample the tokens that follow the prompt."""
    generator, last, sampled = torch.Generator().manual_seed(seed), prompt[-1], []
    for _ in range(tokens):
        last = int(torch.multinomial(logits[last].softmax(0), 1, generator=generator))
        sampled.append(last)
    return sampled


class Handler(BaseHTTPRequestHandler):
    """Answers GET /health and POST /v1/completions."""

    policies: Policies

    def do_GET(self) -> None:
        """Answer that the server runs."""
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        """Answer a completion."""
        try:
            body = json.loads(self.rfile.read(min(int(self.headers["Content-Length"]), _MAX_BODY_BYTES)))
            logits = self.policies.find_logits(str(body["model"]))
            tokens, samples = min(int(body["max_tokens"]), _MAX_TOKENS), min(int(body.get("n", 1)), _MAX_SAMPLES)
            choices = [
                {"index": index, "token_ids": complete(logits, body["prompt"], tokens, int(body["seed"]) + index)}
                for index in range(samples)
            ]
        except FileNotFoundError:
            self._answer(404, {"error": {"message": f"the model {body['model']} does not exist"}})
        except (ValueError, KeyError, TypeError, IndexError) as error:
            self._answer(400, {"error": {"message": str(error)}})
        else:
            self._answer(200, {"object": "text_completion", "model": body["model"], "choices": choices})

    def _answer(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing for each request."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    Handler.policies = Policies(Path(sys.argv[1]))
    address = (os.environ.get("POD_IP", "127.0.0.1"), int(os.environ.get("TRAINIUM_ROLE_PORT", "0") or sys.argv[2]))
    server = ThreadingHTTPServer(address, Handler)
    sys.stdout.write(f"serves at port {server.server_address[1]}\n")
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # process 1 of a container ignores it otherwise
    server.serve_forever()
