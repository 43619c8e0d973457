"""Build examples from messages with the tokenizer's chat template, in a sandbox.

Guarantees:
- The template gets the same variables and functions as from `transformers`, including tools, with the date of the
  recipe in place of a clock: an example does not depend on the day on which it is encoded.
- Rows of JSON lines and of Parquet, which fills missing keys with null, give equal conversations.
- The assistant's messages are found by the template's own generation markers or, without them, by what the template
  writes without them or with another content. The token that ends a turn belongs to the answer; whitespace after it
  does not.
- An error of a template names the template's line.
"""

from __future__ import annotations

import json
import re
import traceback
from dataclasses import astuple
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from trainium_trainer.data.examples.conversation import (
    END_OF_REASONING,
    REASONING_FIELDS,
    START_OF_REASONING,
    Conversation,
    Marks,
)
from trainium_trainer.data.examples.record_format import (
    BadRecordError,
    Example,
    GuardedText,
    RecordFormat,
    SpecialTokenGuard,
    drop_nulls,
    list_fields,
)
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from trainium_trainer.data.sources.documents import Record
    from trainium_trainer.data.tokens.special_tokens import ChatTemplates, SpecialTokens


_ASSISTANT = "assistant"
_TOOLS = "tools"
_WEIGHT = "weight"
CLOCK = "strftime_now"
"""The function of a template that formats the time."""
_MARKS = "marks"
"""The variable of a template with the characters of `Marks`."""
_PROBE = "\U0010ffff"
_ASTRAL = re.compile("[\U00010000-\U0010ffff]")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_FREE_CONTENT = frozenset({"tool", "ipython", "function"})
"""Roles whose content may be any value; the template formats it."""


class ChatFormat(RecordFormat):
    """Builds examples from lists of messages."""

    def __init__(
        self,
        templates: ChatTemplates,
        special: SpecialTokens,
        guard: SpecialTokenGuard,
        field: str,
        template_name: str,
        date: str | None = None,
    ) -> None:
        """Compile the templates, with the date for those that ask for one. Raises UserError."""
        super().__init__(guard)
        self.field = field
        self._template_name = template_name
        self._chosen = templates
        texts = {template for template in astuple(templates) if template is not None}
        self._words = frozenset(re.findall(r"\w+", " ".join(texts)))
        self._variables = dict(special.tokens)
        self._characters = set("".join([*texts, *self._variables.values()]))
        try:
            environment = _create_environment(date)
        except ValueError as error:
            raise UserError(f"data.examples.chat.date {date}: {error}: correct it") from error
        try:
            self._compiled = {text: environment.from_string(text) for text in texts}
            self._characters.update(*(literal for text in texts for literal in _list_literals(environment.parse(text))))
        except Exception as error:
            line = getattr(error, "lineno", None)
            at = f" line {line}" if line else ""
            raise UserError(f"{template_name}{at}: is no chat template ({error}): correct it") from error

    def build_examples(self, record: Record) -> tuple[Example, ...]:
        """Build the example of a record's messages."""
        return (self.build_example(record.fields),)

    def build_example(self, record: Mapping[str, Any], *, to_the_end: bool = False) -> Example:
        """Build the example of a record; with `to_the_end`, all that follows the first prompt is learned.

        Raises BadRecordError.
        """
        messages = self._parse_messages(record)
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
            not messages[number].get("content", "").strip() and not messages[number].get("tool_calls")
            for number in learned
        ):
            raise BadRecordError("the answer is empty: give the assistant's message a content")
        conversation = self._parse_conversation(messages, record)
        text = conversation.render(len(messages))
        if to_the_end:
            answers = [(conversation.answer_range(learned[0], text.text)[0], len(text.text))]
        elif text.generated:
            answers = list(text.generated)
            for number in assistants:
                if number not in learned:
                    start, end = conversation.answer_range(number, text.text)
                    answers = [answer for answer in answers if answer[1] <= start or answer[0] >= end]
        else:
            answers = [conversation.answer_range(number, text.text) for number in learned]
        answers = [(start, end) for start, end in answers if start < end]
        if not answers:
            raise BadRecordError("the chat template leaves nothing of the assistant's messages: correct the template")
        unused = self._find_unused_reasoning(messages[assistants[-1]], text.text)
        return Example(text.guarded, tuple(answers), from_chat_template=True, unused=unused)

    def _find_unused_reasoning(self, message: Mapping[str, Any], text: str) -> tuple[str, ...]:
        """Name the reasoning before an answer that the template leaves out."""
        before, end, _ = message.get("content", "").partition(END_OF_REASONING)
        if end and before.rpartition(START_OF_REASONING)[2].strip() not in text:
            return (f"{self.field}[].content before {END_OF_REASONING}",)
        return ()

    def render_prompt(self, fields: Mapping[str, Any]) -> tuple[GuardedText, bool]:
        """Return the text before the last answer, or all of it without an answer."""
        messages = self._parse_messages(fields)
        if messages[-1]["role"] == _ASSISTANT:
            messages = messages[:-1]
        return self._parse_conversation(messages, fields).render(len(messages), prompt=True).guarded, True

    def record_of_prompt(self, text: str) -> dict[str, Any]:
        """Build the message of a user."""
        return {self.field: [{"role": "user", "content": text}]}

    def find_unused_fields(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Yield the fields of the record and of its messages."""
        used = {self.field} | ({_TOOLS} & self._words)
        yield from (name for name in fields if name not in used)
        messages = _from_json(fields.get(self.field))
        if isinstance(messages, list):
            dictionaries = [message for message in messages if isinstance(message, dict)]
            names = dict.fromkeys(
                name for message in dictionaries for name, value in message.items() if value is not None
            )
            used = {"role", "content", _WEIGHT} | self._words
            used |= set(REASONING_FIELDS) if used.intersection(REASONING_FIELDS) else set()
            yield from (f"{self.field}[].{name}" for name in names if name not in used)

    def _parse_messages(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        if record.get(self.field) is None:
            raise BadRecordError(
                f"has no field {self.field!r}, which data.examples.chat.messagesField names "
                f"({list_fields(record, self.field)})"
            )
        messages = _from_json(record[self.field])
        is_valid = isinstance(messages, list) and all(
            isinstance(message, dict) and message.get("role") for message in messages
        )
        if not is_valid or not messages:
            raise BadRecordError(f"the field {self.field!r} is no list of messages with `role` and `content`")
        return [self._parse_message(message) for message in messages]

    def _parse_message(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as input of the template: the content is a text, and no value is null."""
        message: dict[str, Any] = drop_nulls(fields) | {"role": fields["role"]}
        reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning} | message | {"reasoning_content": reasoning}
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
        return message if content is None else message | {"content": content}

    def _parse_conversation(self, messages: list[dict[str, Any]], record: Mapping[str, Any]) -> Conversation:
        """Return messages and tools for the template. Raises BadRecordError."""
        tools = self._parse_tools(record)
        texts = json.dumps([messages, tools], ensure_ascii=False, default=str)
        marks = Marks(self.guard, self._characters | set(_ASTRAL.findall(texts)))
        return Conversation(self.render, marks.escape(messages), marks.escape(tools), marks)

    def _parse_tools(self, record: Mapping[str, Any]) -> list[Any] | None:
        """Return the tools that the assistant may call. Raises BadRecordError."""
        value = record.get(_TOOLS)
        if value is None or value in ("", []):
            return None
        tools = _from_json(value)
        if not isinstance(tools, list):
            raise BadRecordError(f"the field {_TOOLS!r} is no list of tools: correct it, or leave it out")
        tools = [_from_json(tool) for tool in tools]
        return list(tools if isinstance(value, str) else drop_nulls(tools))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, marks: str, *, prompt: bool) -> str:
        """Render messages; `marks` are the characters of `Marks`. Raises BadRecordError."""
        chosen = self._chosen.choose_template(tools)
        if chosen is None:
            raise BadRecordError(f"has no tools, but {self._template_name} is only for conversations with tools")
        variables = self._variables | {_MARKS: marks}
        inputs = {"tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            text: str = self._compiled[chosen].render(messages=messages, **inputs, **variables)
        except Exception as error:  # a user's template may raise anything
            if any("content" not in message for message in messages):
                # transformers leaves null values out; some templates compare the content of tool calls with null.
                nulls = [{"content": None, **message} for message in messages]
                return self.render(nulls, tools, marks, prompt=prompt)
            raise BadRecordError(
                f"the chat template refuses the messages ({_format_template_error(error, self._template_name)}"
            ) from error
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


def _format_template_error(error: Exception, template_name: str) -> str:
    """Format the error that a template raised, with its line."""
    from jinja2 import TemplateError  # noqa: PLC0415 - only chats pay for it

    kind = "" if isinstance(error, (TemplateError, TypeError)) else f"{type(error).__name__}: "
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f"{kind}{error})" + (f" in line {lines[-1]} of {template_name}" if lines else "")


def find_control_tokens(template: str, specials: Iterable[str], variables: Mapping[str, str]) -> set[str]:
    """Return the special tokens with which a chat template separates messages.

    They are those that it writes, except for what it looks for in messages, as the ends of a reasoning, and for what
    only a prompt ends with.
    """
    from jinja2 import TemplateError, nodes  # noqa: PLC0415 - only chats pay for it

    environment = _create_environment()
    try:
        tree = environment.parse(template)
    except TemplateError:  # reported when the template is compiled
        return set(specials)
    calls = [call.args for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)]
    operands = [[compared.expr] for compared in tree.find_all(nodes.Compare) if compared.ops[0].op in ("in", "notin")]
    read = {node.value for nodes_read in (*calls, *operands) for node in nodes_read if isinstance(node, nodes.Const)}
    messages = [{"role": role, "content": _PROBE} for role in ("user", _ASSISTANT, "user")]
    options = {"messages": messages, "tools": None, "documents": None} | dict(variables)
    try:
        compiled = environment.from_string(template)
        turns, prompt = (compiled.render(**options, add_generation_prompt=prompt) for prompt in (False, True))
    except Exception:  # noqa: BLE001 - a template may raise anything
        turns = prompt = ""
    written = "\0".join([turns, *_list_literals(tree)])
    return {
        token
        for token in specials
        if token in written
        and not any(isinstance(text, str) and token in text for text in read)
        and (token in turns or token not in prompt)
    }


def find_text_after_answer(template: str, tokens: Mapping[str, str]) -> str:
    """Return the text of a template after an answer, without leading whitespace: it begins with the end of the turn.

    Empty if the template cannot be parsed or refuses a plain question with its answer. `tokens`: special tokens by
    name, as `eos_token`.
    """
    messages = [{"role": "user", "content": "question"}, {"role": _ASSISTANT, "content": _PROBE}]
    try:
        text: str = (
            _create_environment()
            .from_string(template)
            .render(messages=messages, tools=None, documents=None, add_generation_prompt=False, **tokens)
        )
    except Exception:  # noqa: BLE001 - a template may raise anything
        return ""
    return text.rpartition(_PROBE)[2].lstrip() if _PROBE in text else ""


def _list_literals(template: Any) -> set[str]:
    """Return the texts in a parsed template."""
    from jinja2 import nodes  # noqa: PLC0415 - only chats pay for it

    texts = {node.data for node in template.find_all(nodes.TemplateData)}
    return texts | {node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)}


def read_today() -> str:
    """Return the date of this machine's clock."""
    return datetime.now().astimezone().date().isoformat()


def _create_environment(date: str | None = None) -> Any:
    """Create the environment of transformers' chat templates, with a fixed date in place of the clock."""
    from jinja2 import pass_context  # noqa: PLC0415 - only chats pay for it
    from jinja2.ext import loopcontrols  # noqa: PLC0415 - only chats pay for it
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - only chats pay for it

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[_create_generation_extension(), loopcontrols],
    )
    environment.filters["tojson"] = pass_context(_to_json)
    environment.globals["raise_exception"] = _refuse
    environment.globals[CLOCK] = datetime.fromisoformat(date or read_today()).strftime
    return environment


def _to_json(
    context: Mapping[str, Any],
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    for mark in (context.get(_MARKS) or "") if ensure_ascii else "":
        text = text.replace(json.dumps(mark)[1:-1], mark)
    return text


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError  # noqa: PLC0415 - only chats pay for it

    raise TemplateError(message)


def _create_generation_extension() -> type:
    """Return the extension for the block `{% generation %}`, which puts markers around its content."""
    from jinja2 import nodes  # noqa: PLC0415 - only chats pay for it
    from jinja2.ext import Extension  # noqa: PLC0415 - only chats pay for it

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marked = self.call_method("_mark", [nodes.ContextReference()])
            return nodes.CallBlock(marked, [], [], body).set_lineno(line)

        def _mark(self, context: Any, caller: Any) -> str:
            marks = context.get(_MARKS) or ""
            return f"{marks[:1]}{caller()}{marks[1:2]}"

    return Generation
