"""Query a server with OpenAI's protocol: vLLM, also on Neuron, `transformers serve` and others.

Guarantees:
- A request ends within `Endpoint.seconds` and 16 MiB, no matter what the server sends.
- The key comes from the environment and never occurs in a message.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from trainium_trainer.evaluate.answering.generation import FinishReason, GeneratedAnswer
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from trainium_contract.trainer.evaluate import GenerationConfig

KEY_VARIABLE = "OPENAI_API_KEY"
"""The environment variable of the key; lm-eval reads the same one."""
_MAX_BYTES = 16 << 20
_MAX_TEXT_CHARS = 200
_OK = 200


class _Choice(BaseModel):
    text: str = ""
    finish_reason: str | None = None


class _Usage(BaseModel):
    completion_tokens: int


class _Event(BaseModel):
    """A part of an answer."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Named(BaseModel):
    id: str


class _Listing(BaseModel):
    """The models of a server."""

    data: list[_Named]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A model of a server."""

    url: str
    """The base URL, for instance http://127.0.0.1:8000/v1."""
    model: str = ""
    seconds: float = 300.0
    """The time limit of an answer."""

    def complete(
        self, prompt: str, generation: GenerationConfig, receive: Callable[[str], None] = lambda _: None
    ) -> GeneratedAnswer:
        """Return the answer to a prompt; `receive` gets its parts as they arrive. Raises UserError."""
        request = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "seed": generation.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"top_k": generation.top_k} if generation.top_k else {}),
            **({"stop": list(generation.stop)} if generation.stop else {}),
        }
        parts: list[str] = []
        finish: str | None = None
        tokens: int | None = None
        with contextlib.closing(self._read_lines("completions", request)) as lines:
            for line in lines:
                name, _, data = line.partition(":")
                if name not in {"data", "event", "id", "retry", ""}:
                    raise self._create_read_error(line)
                if data.strip() == "[DONE]":
                    break
                if name != "data":
                    continue
                event = self._parse_event(data)
                tokens = event.usage.completion_tokens if event.usage is not None else tokens
                for choice in event.choices[:1]:
                    finish = choice.finish_reason or finish
                    if choice.text:
                        parts.append(choice.text)
                        receive(choice.text)
        if finish is None:
            raise UserError(f"{self.url}: the answer breaks off after {len(parts)} parts: look at the server's log")
        reason = FinishReason.STOP if generation.stop else FinishReason.END_OF_TEXT
        reason = FinishReason.LENGTH if finish == "length" else reason
        return GeneratedAnswer("".join(parts), len(parts) if tokens is None else tokens, reason)

    def list_models(self) -> list[str]:
        """Return the names of the models that the server lists. Raises UserError."""
        text = "".join(self._read_lines("models"))
        try:
            return [model.id for model in _Listing.model_validate_json(text).data]
        except ValidationError as error:
            raise self._create_read_error(text) from error

    def _parse_event(self, data: str) -> _Event:
        try:
            event = _Event.model_validate_json(data)
        except ValidationError as error:
            raise self._create_read_error(data) from error
        if event.error is not None:
            raise UserError(f"{self.url}: the server reports an error: {_shorten(str(event.error))}")
        return event

    def _create_read_error(self, text: str) -> UserError:
        return UserError(
            f"{self.url}: sends what is not OpenAI's protocol ({_shorten(text)!r}): give the URL that ends in /v1 of "
            "vLLM, transformers serve or another such server"
        )

    def _read_lines(self, path: str, request: dict[str, Any] | None = None) -> Generator[str, None, None]:
        """Yield the nonempty lines of a response. Raises UserError."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.seconds)
        expired = threading.Event()
        timer: threading.Timer | None = None
        deadline = time.monotonic() + self.seconds
        try:
            connection.connect()
            timer = threading.Timer(max(0.0, deadline - time.monotonic()), _expire, (connection.sock, expired))
            timer.daemon = True
            timer.start()
            body = None if request is None else json.dumps(request).encode()
            headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
            if key := os.environ.get(KEY_VARIABLE, "").strip():
                headers["Authorization"] = f"Bearer {key}"
            method = "GET" if request is None else "POST"
            connection.request(method, f"{parts.path.rstrip('/')}/{path}", body, headers)
            response = connection.getresponse()
            if response.status != _OK:
                reason = _shorten(response.read(_MAX_TEXT_CHARS * 4).decode(errors="replace"))
                raise UserError(f"{self.url}: answers {response.status} {response.reason} to {path} ({reason})")
            remaining = _MAX_BYTES
            while line := response.readline(remaining + 1):
                if expired.is_set():
                    raise TimeoutError
                remaining -= len(line)
                if remaining < 0:
                    raise UserError(f"{self.url}: an answer of more than {_MAX_BYTES >> 20} MiB: lower the tokens")
                if text := line.decode(errors="replace").strip():
                    yield text
            if expired.is_set():
                raise TimeoutError
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if expired.is_set() or isinstance(error, TimeoutError):
                raise UserError(
                    f"{self.url}: no whole answer in {self.seconds:g} s: look at the server or raise --endpoint-seconds"
                ) from error
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UserError(
                f"{self.url}: cannot be asked ({_shorten(reason)}): start the server, or correct --endpoint"
            ) from error
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()


def open_endpoint(url: str, model: str | None = None, seconds: float = 300.0) -> Endpoint:
    """Open an endpoint and check that it answers; without `model` use the only listed one. Raises UserError."""
    parts = urlsplit(url)
    try:
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.username is not None:
        raise UserError(f"--endpoint {url}: give a URL such as http://127.0.0.1:8000/v1, a key in {KEY_VARIABLE}")
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY_VARIABLE} has characters that no key has: set it again")
    endpoint = Endpoint(url=url.rstrip("/"), model=model or "", seconds=seconds)
    names = endpoint.list_models()
    if model is None and len(names) != 1:
        listed = ", ".join(names[:5]) or "none"
        raise UserError(f"{url}: the server lists {len(names)} models ({listed}): name one by --endpoint-model")
    return endpoint if model is not None else Endpoint(url=endpoint.url, model=names[0], seconds=seconds)


def _expire(connection: socket.socket, expired: threading.Event) -> None:
    """Abort the reads of a connection."""
    expired.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_MAX_TEXT_CHARS]
