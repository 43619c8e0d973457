"""Build examples from messages with the tokenizer's chat template, in a sandbox.

Guarantees:
- The template gets the same variables as from `transformers`, including tools, but no clock: an example does not depend
  on the date.
- Rows of JSON lines and of Parquet, which fills missing keys with null, give equal conversations.
- The assistant's messages are found by the template's own generation markers or, without them, by rendering the
  conversation up to each answer. The token that ends a turn belongs to the answer; whitespace after it does not.
- An error of a template names the template's line.
"""

from __future__ import annotations

import json
import re
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from trainium_trainer.data.examples.templates import (
    BadRecordError,
    Example,
    RecordFormat,
    SpecialTokenGuard,
    list_fields,
    without_nulls,
)
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainium_trainer.data.sources.documents import Record
    from trainium_trainer.data.tokens.tokenizer import SpecialTokens


_ASSISTANT = "assistant"
_TOOLS = "tools"
_WEIGHT = "weight"
_OPEN, _CLOSE = "\U000ffff0", "\U000ffff1"
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_FREE_CONTENT = frozenset({"tool", "ipython", "function"})
"""Roles whose content may be any value; the template formats it."""


class ChatFormat(RecordFormat):
    """Builds examples from lists of messages."""

    def __init__(self, template: str, special: SpecialTokens, guard: SpecialTokenGuard, field: str, where: str) -> None:
        """Compile the template. Raises UserError."""
        super().__init__(guard)
        self.field = field
        self._where = where
        self._words = frozenset(re.findall(r"\w+", template))
        self._variables = dict(special.tokens)
        try:
            self._template = _environment().from_string(template)
        except Exception as error:
            line = getattr(error, "lineno", None)
            at = f" line {line}" if line else ""
            raise UserError(f"{where}{at}: is no chat template ({error}): correct it") from error

    def examples(self, record: Record) -> tuple[Example, ...]:
        """Build the example of a record's messages."""
        return (self.example(record.fields),)

    def example(self, record: Mapping[str, Any]) -> Example:
        """Build the example of a record. Raises BadRecordError."""
        messages, tools = self._messages(record), self._tools(record)
        assistants = [number for number, message in enumerate(messages) if message["role"] == _ASSISTANT]
        learned = [number for number in assistants if messages[number].get(_WEIGHT) != 0]
        if not learned:
            problem = (
                "no message is the assistant's"
                if not assistants
                else "all of the assistant's messages have the weight 0"
            )
            raise BadRecordError(f"{problem}, so there is nothing to learn: add its answer")
        if any(
            not (messages[number]["content"] or "").strip() and not messages[number].get("tool_calls")
            for number in learned
        ):
            raise BadRecordError("the answer is empty: give the assistant's message a content")
        marked = self._render(messages, tools, prompt=False)
        text = marked.replace(_OPEN, "").replace(_CLOSE, "")
        if _OPEN in marked:
            answers = list(_answer_ranges(marked))
            for number in assistants:
                if number not in learned:
                    start, end = self._answer_range(messages, tools, number, text)
                    answers = [answer for answer in answers if answer[1] <= start or answer[0] >= end]
        else:
            answers = [self._answer_range(messages, tools, number, text) for number in learned]
        answers = [(start, end) for start, end in answers if start < end]
        if not answers:
            raise BadRecordError("the chat template leaves nothing of the assistant's messages: correct the template")
        return Example(text, tuple(answers), from_chat_template=True)

    def prompt(self, fields: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the text before the last answer, or all of it without an answer."""
        messages = self._messages(fields)
        if messages[-1]["role"] == _ASSISTANT:
            messages = messages[:-1]
        text = self._render(messages, self._tools(fields), prompt=True)
        return text.replace(_OPEN, "").replace(_CLOSE, ""), True

    def record_of_prompt(self, text: str) -> dict[str, Any]:
        """Build the message of a user."""
        return {self.field: [{"role": "user", "content": text}]}

    def unused(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Yield the fields of the record and of its messages."""
        used = {self.field} | ({_TOOLS} & self._words)
        yield from (name for name in fields if name not in used)
        messages = _from_json(fields.get(self.field))
        if isinstance(messages, list):
            dictionaries = [message for message in messages if isinstance(message, dict)]
            names = dict.fromkeys(
                name for message in dictionaries for name, value in message.items() if value is not None
            )
            known = {"role", "content", _WEIGHT} | self._words
            yield from (f"{self.field}[].{name}" for name in names if name not in known)

    def _messages(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        if record.get(self.field) is None:
            raise BadRecordError(
                f"has no field {self.field!r}, which data.examples.chat.messagesField names "
                f"({list_fields(record, self.field)})"
            )
        messages = _from_json(record[self.field])
        whole = isinstance(messages, list) and all(
            isinstance(message, dict) and message.get("role") for message in messages
        )
        if not whole or not messages:
            raise BadRecordError(f"the field {self.field!r} is no list of messages with `role` and `content`")
        return [self._message(message) for message in messages]

    def _message(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as input of the template: the content is a text or null, and no other value is null."""
        message: dict[str, Any] = self._escape_texts(without_nulls(fields)) | {"role": fields["role"]}
        content = message.get("content")
        if isinstance(content, list) and all(
            isinstance(part, str) or (isinstance(part, dict) and "type" in part) for part in content
        ):
            parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
            other = next((part["type"] for part in parts if part["type"] not in _TEXT_PARTS), None)
            if other is not None:
                raise BadRecordError(f"the content has a part of type {other!r}, which a model of text cannot read")
            content = "".join(str(part.get("text", "")) for part in parts)
        if content is not None and not isinstance(content, str) and message["role"] not in _FREE_CONTENT:
            raise BadRecordError(
                f"the content of the {message['role']}'s message is neither text nor a list of parts with `type` and "
                "`text`: write it as text"
            )
        return message | {"content": content}

    def _escape_texts(self, value: Any) -> Any:
        """Replace special tokens in the texts of a value by marks."""
        if isinstance(value, dict):
            return {key: self._escape_texts(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._escape_texts(item) for item in value]
        return self.guard.escape(value) if isinstance(value, str) else value

    def _tools(self, record: Mapping[str, Any]) -> list[Any] | None:
        """Return the tools that the assistant may call. Raises BadRecordError."""
        value = record.get(_TOOLS)
        if value is None or value in ("", []):
            return None
        tools = _from_json(value)
        if not isinstance(tools, list):
            raise BadRecordError(f"the field {_TOOLS!r} is no list of tools: correct it, or leave it out")
        tools = [_from_json(tool) for tool in tools]
        return list(self._escape_texts(tools if isinstance(value, str) else without_nulls(tools)))

    def _answer_range(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, number: int, text: str
    ) -> tuple[int, int]:
        """Return the range of the answer in message `number` within the whole text."""

        def render(count: int, *, prompt: bool) -> str:
            return self._render(messages[:count], tools, prompt=prompt).replace(_OPEN, "").replace(_CLOSE, "")

        before, after = render(number, prompt=True), render(number + 1, prompt=False)
        if not after.startswith(before):
            before = render(number, prompt=False)
        if not after.startswith(before) or not text.startswith(after):
            raise BadRecordError(
                "the chat template changes what comes before an answer once it is given, so that the answer cannot be "
                "found: put {% generation %} and {% endgeneration %} around it in your template "
                "(data.examples.chat.template)"
            )
        return len(before), max(len(before), len(after.rstrip()))

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool) -> str:
        try:
            text: str = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._variables
            )
        except Exception as error:  # a user's template may raise anything
            raise BadRecordError(f"the chat template refuses the messages ({_reason(error, self._where)}") from error
        return text


def require_chat(chat: ChatFormat | None, reason: str) -> ChatFormat:
    """Return the chat. Raises UserError where there is no chat template."""
    if chat is None:
        raise UserError(
            f"{reason}, but there is no chat template: give data.examples.chat.template, or the tokenizer of a model "
            "that was tuned for chats"
        )
    return chat


def _from_json(value: Any) -> Any:
    """Parse a text as JSON, as in tables that hold only text; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None


def _reason(error: Exception, where: str) -> str:
    """Format the error that a template raised, with its line."""
    from jinja2 import TemplateError  # noqa: PLC0415 - only chats pay for it

    kind = "" if isinstance(error, (TemplateError, TypeError)) else f"{type(error).__name__}: "
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f"{kind}{error})" + (f" in line {lines[-1]} of {where}" if lines else "")


def after_answer(template: str, tokens: Mapping[str, str]) -> str:
    """Return the text of a template after an answer, without leading whitespace: it begins with the end of the turn.

    Empty if the template cannot be parsed or refuses a plain question with its answer. `tokens`: special tokens by
    name, as `eos_token`.
    """
    messages = [{"role": "user", "content": "question"}, {"role": _ASSISTANT, "content": _OPEN}]
    try:
        text: str = (
            _environment()
            .from_string(template)
            .render(messages=messages, tools=None, documents=None, add_generation_prompt=False, **tokens)
        )
    except Exception:  # noqa: BLE001 - a template may raise anything
        return ""
    return text.rpartition(_OPEN)[2].replace(_CLOSE, "").lstrip() if _OPEN in text else ""


def _answer_ranges(text: str) -> list[tuple[int, int]]:
    """Return the text without markers, and the ranges between them."""
    return [
        (match.start() - 2 * number, match.end() - 2 * number - 2)
        for number, match in enumerate(_MARKED.finditer(text))
    ]


def _environment() -> Any:
    """Create the environment of transformers' chat templates, without the clock."""
    from jinja2.ext import loopcontrols  # noqa: PLC0415 - only chats pay for it
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - only chats pay for it

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[_generation(), loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(value: Any, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=more.pop("ensure_ascii", False), indent=indent, **more)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError  # noqa: PLC0415 - only chats pay for it

    raise TemplateError(message)


def _generation() -> type:
    """Return the extension for the block `{% generation %}`, which puts markers around its content."""
    from jinja2 import nodes  # noqa: PLC0415 - only chats pay for it
    from jinja2.ext import Extension  # noqa: PLC0415 - only chats pay for it

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    return Generation
