"""Split shell scripts into statements and words, as far as an import needs it.

Quotes, escapes, line continuations, comments, here-documents, variables and arrays with literal values are understood.
Everything else (command substitution, arithmetic, tests) is kept as text and marked as not literal.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\}|\{(\w+):-([^}$`]*)\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=", re.ASCII)
_OPERATOR = re.compile(r"\d*>>?&?\d*|\d*<+|&>>?|&&|\|\||[;|&()]")


class OptionParser(argparse.ArgumentParser):
    """Parses the options of a command line; an error is a ClientError that begins with `subject`."""

    def __init__(self, subject: str) -> None:
        super().__init__(add_help=False)
        self._subject = subject

    def error(self, message: str) -> NoReturn:
        """Raise ClientError."""
        raise ClientError(f"{self._subject} cannot be read: {message}; correct it")


@dataclass(frozen=True, slots=True)
class Word:
    """A word or an operator in a statement."""

    text: str
    """The value; variables that are not known stay as they are written."""
    start: int
    """Place of its first character in the script."""
    end: int
    is_literal: bool = True
    """Whether the text is the whole value."""
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class Statement:
    """A simple command with its redirections and pipes."""

    start: int
    end: int
    line: int
    """Number of its first line."""


def split_statements(script: str) -> list[Statement]:
    """Return the statements of a script, without comments and empty ones."""
    found: list[Statement] = []
    start = position = 0
    while position <= len(script):
        end, separator = _scan(script, position)
        if separator or position >= len(script):
            text = script[start:end]
            if text.strip(" \t\n\\"):
                begin = start + len(text) - len(text.lstrip(" \t\n\\"))
                found.append(Statement(begin, start + len(text.rstrip()), script.count("\n", 0, begin) + 1))
            position = start = max(end + len(separator), position + 1)
            if separator == "#":
                line_end = script.find("\n", end)
                position = start = len(script) if line_end < 0 else line_end
        else:
            position = end
    return found


def parse_words(script: str, statement: Statement, variables: Mapping[str, list[str]]) -> list[Word]:
    """Split a statement into words, with the variables of known value replaced."""
    words: list[Word] = []
    position = statement.start
    while position < statement.end:
        if script[position].isspace():
            position += 1
        elif script.startswith("\\\n", position):
            position += 2
        elif operator := _OPERATOR.match(script, position, statement.end):
            words.append(Word(operator.group(), position, operator.end(), is_operator=True))
            position = operator.end()
        else:
            end = _find_word_end(script, position, statement.end)
            words += _expand(script[position:end], position, end, variables)
            position = end
    return words


def read_assignments(
    script: str, statement: Statement, variables: Mapping[str, list[str]]
) -> dict[str, list[str]] | None:
    """Return what a statement that only assigns variables assigns; None for another one.

    A variable whose value is not literal is absent.
    """
    text = re.sub(r"^(?:export|declare\s+-\w+|local|readonly)\s+", "", script[statement.start : statement.end])
    offset = statement.end - len(text)
    array = re.fullmatch(r"([A-Za-z_]\w*)(\+?)=\((.*)\)", text, re.DOTALL | re.ASCII)
    if array:
        inner = Statement(offset + array.start(3), offset + array.end(3), statement.line)
        lines = re.sub(r"(?m)(^|\s)#.*$", lambda match: " " * len(match.group()), script[inner.start : inner.end])
        words = parse_words(script[: inner.start] + lines + script[inner.end :], inner, variables)
        if not all(word.is_literal and not word.is_operator for word in words):
            return {}
        before = variables.get(array.group(1), []) if array.group(2) else []
        return {array.group(1): [*before, *(word.text for word in words)]}
    assigned: dict[str, list[str]] = {}
    words = parse_words(script, Statement(offset, statement.end, statement.line), variables)
    for word in words:
        match = _ASSIGNMENT.match(word.text)
        if match is None or word.is_operator:
            return None
        if word.is_literal:
            assigned[match.group(1)] = [word.text[match.end() :]]
    return assigned if words else None


def quote(text: str) -> str:
    """Return a word for `sh` that has this value, with variables in it still expanded."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'(["\\`])', r"\\\1", text) + '"'


def _scan(script: str, position: int) -> tuple[int, str]:
    """Return the end of the piece at a position, and the separator that it is, `#` for a comment."""
    if position >= len(script):
        return position, ""
    if script.startswith("\\\n", position):
        return position + 2, ""
    here = _HERE_DOCUMENT.match(script, position)
    if here and not script.startswith("<<<", position):
        last = re.compile(rf"^\s*{re.escape(here.group(2))}\s*$", re.MULTILINE).search(script, here.end())
        return (last.end() if last else len(script)), ""
    character = script[position]
    if character == "#" and (position == 0 or script[position - 1] in " \t\n;"):
        return position, "#"
    for separator in ("&&", "||"):
        if script.startswith(separator, position):
            return position, separator
    if character == "&" and (script[position - 1 : position] == ">" or script[position + 1 : position + 2] == ">"):
        return position + 1, ""
    if character in ";\n&":
        return position, character
    return _find_piece_end(script, position), ""


def _find_piece_end(script: str, position: int) -> int:
    """Return the end of a quoted text, a substitution, an array or one character."""
    character = script[position]
    if character == "\\":
        return position + 2
    if character in "'`":
        return _find_end(script, character, position + 1)
    if character == '"':
        position += 1
        while position < len(script) and script[position] != '"':
            position = _find_piece_end(script, position) if script[position] in "\\$`" else position + 1
        return position + 1
    if character == "$" and script.startswith("{", position + 1):
        return _find_end(script, "}", position + 2)
    if character == "(" or (character == "$" and script.startswith("(", position + 1)):
        position = script.index("(", position) + 1
        while position < len(script) and script[position] != ")":
            position = _find_piece_end(script, position)
        return position + 1
    return position + 1


def _find_end(script: str, closing: str, start: int) -> int:
    end = script.find(closing, start)
    return len(script) if end < 0 else end + 1


def _find_word_end(script: str, position: int, limit: int) -> int:
    while position < limit and not script[position].isspace() and script[position] not in ";|&<>()":
        if script.startswith("\\\n", position):
            break
        position = _find_piece_end(script, position)
        if position < limit and script[position] == "(" and script[position - 1] == "=":
            position = _find_piece_end(script, position)
    return min(position, limit)


def _expand(raw: str, start: int, end: int, variables: Mapping[str, list[str]]) -> Iterator[Word]:
    """Yield the words that a written word stands for: several for an array or an unquoted value with spaces."""
    match = _VARIABLE.fullmatch(raw.strip('"'))
    if match and (values := _look_up(match, variables)) is not None:
        is_array = "[" in match.group()
        parts = values if raw.startswith('"') or is_array else [part for value in values for part in value.split()]
        yield from (Word(part, start, end) for part in parts)
        return
    text, is_literal, position = "", True, 0
    while position < len(raw):
        piece_end = min(_find_piece_end(raw, position), len(raw))
        piece = raw[position:piece_end]
        if raw[position] == "'":
            text += piece[1:-1]
        elif raw[position] == '"':
            inner, literal = _substitute(piece[1:-1], variables)
            text, is_literal = text + re.sub(r"\\([\\\"$`])", r"\1", inner), is_literal and literal
        elif raw[position] == "\\":
            text += piece[1:]
        else:
            variable_match = _VARIABLE.match(raw, position)
            piece_end = variable_match.end() if variable_match else piece_end
            inner, literal = _substitute(raw[position:piece_end], variables)
            text, is_literal = text + inner, is_literal and literal
        position = piece_end
    yield Word(text, start, end, is_literal=is_literal)


def _substitute(text: str, variables: Mapping[str, list[str]]) -> tuple[str, bool]:
    """Replace the variables of known value; also return whether nothing else is left to expand."""

    def find_value(match: re.Match[str]) -> str:
        values = _look_up(match, variables)
        return match.group() if values is None else " ".join(values)

    replaced = _VARIABLE.sub(find_value, text)
    return replaced, not re.search(r"(?<!\\)[$`]", replaced)


def _look_up(match: re.Match[str], variables: Mapping[str, list[str]]) -> list[str] | None:
    name = match.group(1) or match.group(2) or match.group(3)
    if match.group(3) and name not in variables:
        return [match.group(4)]
    return variables.get(name)
