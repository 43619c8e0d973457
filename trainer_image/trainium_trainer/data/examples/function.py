"""Call a user's function from a mounted file or an installed module: format Function.

Guarantees:
- An exception of the function ends the run and names file and line.
- The bytes of its file are part of the identity of the samples.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainium_trainer.data.examples.chat import ChatFormat, require_chat
from trainium_trainer.data.examples.record_format import (
    BadRecordError,
    Example,
    GuardedText,
    RecordFormat,
    SpecialTokenGuard,
    build_pair,
)
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trainium_trainer.data.sources.documents import Record


_MODULE = "trainium_user_function"
MESSAGES = "messages"
"""Field of what the function returns for the chat template."""


def digest_of_function(reference: str) -> str:
    """Return a digest of the function's file and name. Raises UserError."""
    module, _, name = reference.rpartition(":")
    try:
        content = _find_file(module, reference).read_bytes()
    except OSError as error:
        raise UserError(
            f"{_locate_function(reference)}: the file cannot be read ({error.strerror}): correct the path"
        ) from error
    return hashlib.sha256(content + b"\0" + name.encode()).hexdigest()


def load_function(reference: str) -> Callable[..., Any]:
    """Import the function. Raises UserError."""
    path, _, name = reference.rpartition(":")
    file = _find_file(path, reference)
    try:
        module: Any
        if path.endswith(".py"):
            folder = str(file.parent)
            if folder not in sys.path:
                sys.path.append(folder)  # the file may import modules of its folder
            spec = importlib.util.spec_from_file_location(_MODULE, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(path)
    except (Exception, SystemExit) as error:
        raise UserError(f"{_locate_function(reference)}: cannot be imported: {_describe(error, file)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{_locate_function(reference)}: {file} has no function {name!r}: correct the name")
    return function  # type: ignore[no-any-return]


class FunctionFormat(RecordFormat):
    """Builds examples from the function's results."""

    def __init__(self, reference: str, chat: ChatFormat | None, guard: SpecialTokenGuard) -> None:
        """Load the function; `chat` builds examples from messages. Raises UserError."""
        super().__init__(guard)
        self._chat = chat
        self._reference = reference
        self._file = _find_file(reference.rpartition(":")[0], reference)
        self._function = load_function(reference)

    def build_examples(self, record: Record) -> tuple[Example, ...]:
        """Call the function."""
        result = self._call(record.fields, record)
        if result is None:
            return ()
        if MESSAGES in result:
            return (self._require_chat().build_example(result),)
        return (build_pair(GuardedText(result["prompt"]), GuardedText(result["completion"])),)

    def render_prompt(self, fields: Mapping[str, Any]) -> tuple[GuardedText, bool]:
        """Call the function; its completion is left out."""
        result = self._call(fields)
        if result is None:
            raise BadRecordError("data.examples.function leaves the record out")
        return (
            self._require_chat().render_prompt(result) if MESSAGES in result else (GuardedText(result["prompt"]), False)
        )

    def record_of_prompt(self, text: str) -> dict[str, Any]:  # noqa: ARG002 - as `RecordFormat` has it
        """Refuse: only the function knows its fields."""
        raise UserError(
            "a prompt of this data.format needs the fields of data.examples.function: give a JSON object with them"
        )

    def find_unused_fields(self, fields: Mapping[str, Any]) -> Iterator[str]:  # noqa: ARG002 - as `RecordFormat` has it
        """Yield nothing: the function may use all fields."""
        yield from ()

    def _require_chat(self) -> ChatFormat:
        return require_chat(self._chat, "data.examples.function returned messages")

    def _call(self, fields: Mapping[str, Any], record: Record | None = None) -> dict[str, Any] | None:
        """Call the function, and check what it returns; None leaves the record out. Raises UserError."""
        at = f" for {record.skip('').format_location()}" if record is not None else ""
        try:
            result = self._function(dict(fields))
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{_locate_function(self._reference)}: raised {_describe(error, self._file)}{at}: correct it"
            ) from error
        if result is None:
            return None
        pair = isinstance(result, dict) and all(isinstance(result.get(key), str) for key in ("prompt", "completion"))
        if not pair and not (isinstance(result, dict) and isinstance(result.get("messages"), list)):
            returned = (
                f"a dictionary with {', '.join(map(repr, result))}" if isinstance(result, dict) else repr(result)[:80]
            )
            raise UserError(
                f"{_locate_function(self._reference)}: returned {returned}{at}: return a dictionary with the texts "
                "`prompt` and `completion`, or with `messages`, or None to leave the record out"
            )
        return cast("dict[str, Any]", result)


def _locate_function(reference: str) -> str:
    return f"data.examples.function {reference}"


def _find_file(path: str, reference: str) -> Path:
    """Return the file of a module or path. Raises UserError."""
    if path.endswith(".py"):
        file = Path(path).expanduser()
        if not file.is_file():
            raise UserError(f"{_locate_function(reference)}: there is no such file: correct the path or mount it")
        return file.absolute()
    try:
        spec = importlib.util.find_spec(path)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise UserError(
            f"{_locate_function(reference)}: there is no module {path!r}: install it, or give /path/file.py:name"
        )
    return Path(spec.origin)


def _describe(error: BaseException, file: Path) -> str:
    """Format an error with the last line of the user's file in its traceback."""
    kind = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return f"{kind} ({error.filename} line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    frames_in_file = [frame for frame in frames if frame.filename == str(file)] or list(frames)
    return f"{kind} ({frames_in_file[-1].filename} line {frames_in_file[-1].lineno})" if frames_in_file else kind
