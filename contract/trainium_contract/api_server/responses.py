"""Parse responses of the API server: raw JSON, typed errors."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from trainium_contract.api_server.errors import ApiError, UnavailableError, build_error
from trainium_contract.stored_json import read_json

Json = dict[str, Any]
MAX_REFUSAL_CHARACTERS = 8192
"""Characters of a refusal that are kept; webhooks of others may write it."""


def parse_object(path: str, body: bytes) -> Json:
    """Parse a JSON object. Raises UnavailableError for anything else, such as a proxy's or a truncated response."""
    try:
        document = read_json(body, _parse_quickly)
    except ValueError as error:
        raise UnavailableError(f"{path}: the response is not JSON ({str(error)[:100]})") from error
    if not isinstance(document, dict):
        raise UnavailableError(f"{path}: the response is not an object")
    return document


def parse_refusal(request: str, status: int, body: bytes) -> ApiError:
    """Return the error of a response with an HTTP status >= 400."""
    try:
        document = read_json(body, _parse_quickly)
    except ValueError:
        document = {}
    if not isinstance(document, dict):
        document = {}
    message = document.get("message") or body[:200].decode(errors="replace") or "no message"
    text = f"{request}: HTTP {status}: {message}"
    return build_error(status, str(document.get("reason", "")), text[:MAX_REFUSAL_CHARACTERS])


def parse_event(path: str, line: bytes) -> Json:
    """Parse an event of a watch. Raises ApiError for an error event and UnavailableError for an invalid line."""
    event = parse_object(path, line)
    changed = event.get("object")
    if not isinstance(changed, dict) or not isinstance(event.get("type"), str):
        raise UnavailableError(f"watch {path}: an event without type or object")
    if event["type"] == "ERROR":
        raise _build_watch_error(f"watch {path}", changed)
    return event


def _build_watch_error(request: str, status: Json) -> ApiError:
    code = status.get("code")
    message = str(status.get("message", "")) or request
    return build_error(
        code if isinstance(code, int) else 500, str(status.get("reason", "")), message[:MAX_REFUSAL_CHARACTERS]
    )


def _parse_quickly(body: bytes) -> Any:
    return from_json(body, cache_strings="keys")
