"""Format Chat: messages through the tokenizer's chat template, in a sandbox.

Invariants: the template sees what it sees in transformers, but no clock, so that an example does not depend on the day;
what the assistant says is found by the template's own generation markers, or, without them, by putting the conversation
together up to each answer: its end-of-turn token belongs to it, blanks after that do not.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from trainium_trainer.data.examples.forms.example import BadRecordError, Example
from trainium_trainer.data.examples.forms.fields import Guard, as_text, known_fields
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_trainer.data.tokens.special_tokens import Special

_ASSISTANT = "assistant"
_OPEN, _CLOSE = "\U000ffff0", "\U000ffff1"
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


class Chat:
    """Makes examples from lists of messages."""

    def __init__(self, template: str, special: Special, guard: Guard, field: str, where: str) -> None:
        """Compile the template. Raises UserError."""
        from jinja2 import TemplateError  # noqa: PLC0415 - only chats pay for it

        self._guard = guard
        self.field = field
        self._variables = dict(special.tokens)
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            at = f" line {line}" if line else ""
            raise UserError(f"{where}{at}: is no chat template ({error}): correct it") from error

    def example(self, record: Mapping[str, Any]) -> Example:
        """The example of a record. Raises BadRecordError."""
        return self.example_of(self._messages(record))

    def example_of(self, messages: Sequence[Mapping[str, Any]]) -> Example:
        """The example of a conversation. Raises BadRecordError."""
        said = [number for number, message in enumerate(messages) if message["role"] == _ASSISTANT]
        if not said:
            raise BadRecordError("no message is the assistant's, so there is nothing to learn: add its answer")
        if any(
            not as_text(messages[number].get("content")).strip() and not messages[number].get("tool_calls")
            for number in said
        ):
            raise BadRecordError("the answer is empty: give the assistant's message a content")
        marked = self._render(messages, prompt=False)
        text = marked.replace(_OPEN, "").replace(_CLOSE, "")
        if _OPEN in marked:
            answers = list(_marked(marked))
        else:
            answers = [self._stretch(messages, number, text) for number in said]
        answers = [(start, end) for start, end in answers if start < end]
        if not answers:
            raise BadRecordError("the chat template leaves nothing of the assistant's messages: correct the template")
        return Example(text, tuple(answers), framed=True)

    def prompt(self, record: Mapping[str, Any]) -> str:
        """What comes before the last answer, or all when there is none yet. Raises BadRecordError."""
        messages = self._messages(record)
        if messages[-1]["role"] == _ASSISTANT:
            messages = messages[:-1]
        return self._render(messages, prompt=True).replace(_OPEN, "").replace(_CLOSE, "")

    def _messages(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self.field not in record:
            raise BadRecordError(
                f"has no field {self.field!r}, which data.examples.chat.messagesField names "
                f"({known_fields(record, self.field)})"
            )
        messages = record[self.field]
        if isinstance(messages, str):  # in a table that has only text
            try:
                messages = json.loads(messages)
            except ValueError:
                messages = None
        whole = isinstance(messages, list) and all(isinstance(one, dict) and "role" in one for one in messages)
        if not whole or not messages:
            raise BadRecordError(f"the field {self.field!r} is no list of messages with `role` and `content`")
        return [
            one | ({"content": self._guard.hide(one["content"])} if isinstance(one.get("content"), str) else {})
            for one in messages
        ]

    def _stretch(self, messages: Sequence[Mapping[str, Any]], number: int, text: str) -> tuple[int, int]:
        """Where the answer that is message `number` stands in the whole."""
        before = self._render(messages[:number], prompt=True)
        after = self._render(messages[: number + 1], prompt=False)
        if not after.startswith(before):
            before = self._render(messages[:number], prompt=False)
        if not after.startswith(before) or not text.startswith(after):
            raise BadRecordError(
                "the chat template changes what stands before an answer once it is given, so that the answer cannot be "
                "found: put {% generation %} and {% endgeneration %} around it in a template of your own "
                "(data.examples.chat.template)"
            )
        return len(before), max(len(before), len(after.rstrip()))

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        from jinja2 import TemplateError  # noqa: PLC0415 - as above

        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=prompt, **self._variables)
        except (TemplateError, TypeError) as error:
            raise BadRecordError(f"the chat template refuses the messages ({error})") from error
        return text


def after_answer(template: str, tokens: Mapping[str, str]) -> str:
    """What a template puts after what the assistant said, blanks before it left out: its end of a turn comes first.

    Nothing where the template cannot be read or refuses a plain question with its answer. `tokens`: special tokens by
    name, as `eos_token`.
    """
    from jinja2 import TemplateError  # noqa: PLC0415 - as above

    messages = [{"role": "user", "content": "question"}, {"role": _ASSISTANT, "content": _OPEN}]
    try:
        text: str = (
            _environment().from_string(template).render(messages=messages, add_generation_prompt=False, **tokens)
        )
    except (TemplateError, TypeError):
        return ""
    return text.rpartition(_OPEN)[2].replace(_CLOSE, "").lstrip() if _OPEN in text else ""


def _marked(text: str) -> list[tuple[int, int]]:
    """The stretches between markers, in the text without them."""
    return [
        (found.start() - 2 * number, found.end() - 2 * number - 2)
        for number, found in enumerate(_MARKED.finditer(text))
    ]


def _environment() -> Any:
    """The environment of transformers' chat templates, without the clock."""
    from jinja2.ext import loopcontrols  # noqa: PLC0415 - as above
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

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
    from jinja2 import TemplateError  # noqa: PLC0415 - as above

    raise TemplateError(message)


def _generation() -> type:
    """The block `{% generation %}`, which puts markers around what it holds."""
    from jinja2 import nodes  # noqa: PLC0415 - as above
    from jinja2.ext import Extension  # noqa: PLC0415

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    return Generation
