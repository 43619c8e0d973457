"""Call a user's function from a mounted file or an installed module: format Function.

Guarantees:
- What it raises ends the run with its file and line.
- The bytes of its file are part of what the samples depend on.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_trainer.data.sources.documents import Record


_MODULE = "trainium_user_function"


def digest_of_function(reference: str) -> str:
    """Digest of the file that the function is in, and of its name. Raises UserError."""
    place, _, name = reference.rpartition(":")
    try:
        content = _file_of(place, reference).read_bytes()
    except OSError as error:
        raise UserError(f"{_where(reference)}: the file cannot be read ({error.strerror}): correct the path") from error
    return hashlib.sha256(content + b"\0" + name.encode()).hexdigest()


def load_function(reference: str) -> Callable[..., Any]:
    """Import the function. Raises UserError."""
    place, _, name = reference.rpartition(":")
    file = _file_of(place, reference)
    try:
        module: Any
        if place.endswith(".py"):
            folder = str(file.parent)
            if folder not in sys.path:
                sys.path.append(folder)  # what the file imports may lie beside it
            spec = importlib.util.spec_from_file_location(_MODULE, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise UserError(f"{_where(reference)}: cannot be imported: {_describe(error, file)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(f"{_where(reference)}: {file} has no function {name!r}: correct the name")
    return found  # type: ignore[no-any-return]


class Caller:
    """The function, called with records."""

    def __init__(self, reference: str) -> None:
        """Load it. Raises UserError."""
        self._reference = reference
        self._file = _file_of(reference.rpartition(":")[0], reference)
        self._function = load_function(reference)

    def __call__(self, fields: Mapping[str, Any], record: Record | None = None) -> dict[str, Any] | None:
        """Call the function, and check what it returns; None leaves the record out. Raises UserError."""
        at = f" for {record.skipped('').where()}" if record is not None else ""
        try:
            result = self._function(dict(fields))
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{_where(self._reference)}: raised {_describe(error, self._file)}{at}: correct it"
            ) from error
        if result is None:
            return None
        pair = isinstance(result, dict) and all(isinstance(result.get(key), str) for key in ("prompt", "completion"))
        if not pair and not (isinstance(result, dict) and isinstance(result.get("messages"), list)):
            shown = (
                f"a dictionary with {', '.join(map(repr, result))}" if isinstance(result, dict) else repr(result)[:80]
            )
            raise UserError(
                f"{_where(self._reference)}: returned {shown}{at}: return a dictionary with the texts `prompt` and "
                "`completion`, or with `messages`, or None to leave the record out"
            )
        return cast("dict[str, Any]", result)


def _where(reference: str) -> str:
    return f"data.examples.function {reference}"


def _file_of(place: str, reference: str) -> Path:
    """Return the file of a module or path. Raises UserError."""
    if place.endswith(".py"):
        file = Path(place).expanduser()
        if not file.is_file():
            raise UserError(f"{_where(reference)}: there is no such file: correct the path or mount it")
        return file.absolute()
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise UserError(f"{_where(reference)}: there is no module {place!r}: install it, or give /path/file.py:name")
    return Path(spec.origin)


def _describe(error: BaseException, file: Path) -> str:
    """Return the error, and the last line of the user's file in its traceback."""
    kind = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return f"{kind} ({error.filename} line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file)] or list(frames)
    return f"{kind} ({own[-1].filename} line {own[-1].lineno})" if own else kind
