"""Format Classification: one or two texts and a label, whose word is the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_trainer.data.examples.forms.example import BadRecordError, Example, answered
from trainium_trainer.data.examples.forms.fields import Guard, as_text, known_fields, parsed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.trainer.examples import ClassificationConfig

_WHERE = "data.examples.classification"
_SHOWN = 8


class Classification:
    """Makes examples from records."""

    def __init__(self, config: ClassificationConfig, guard: Guard) -> None:
        """Check the template. Raises UserError."""
        self._config = config
        self._guard = guard
        if config.prompt is not None:
            self._prompt = parsed(config.prompt, f"{_WHERE}.prompt")
        else:
            escaped = [(name.replace("{", "{{").replace("}", "}}"), name) for name in config.text_fields]
            lines = [f"{shown}: {{{name}}}\n" for shown, name in escaped]
            self._prompt = parsed("".join(lines) + "label:", f"{_WHERE}.textFields")

    def example(self, record: Mapping[str, Any]) -> Example:
        """The example of a record. Raises BadRecordError."""
        prompt, label = self.prompt(record), self._label(record)
        return answered(prompt, label if prompt[-1:].isspace() else f" {label}", label)

    def prompt(self, record: Mapping[str, Any]) -> str:
        """The prompt alone. Raises BadRecordError."""
        return self._prompt.render(record, self._guard)

    @property
    def fields(self) -> frozenset[str]:
        """Fields that an example depends on."""
        return frozenset((*self._prompt.fields, self._config.label_field))

    def prompt_fields(self) -> tuple[str, ...]:
        """What a record must have for a prompt."""
        return self._prompt.fields

    def _label(self, record: Mapping[str, Any]) -> str:
        field, labels = self._config.label_field, self._config.labels
        if field not in record:
            raise BadRecordError(
                f"has no field {field!r}, which {_WHERE}.labelField names ({known_fields(record, field)})"
            )
        value = record[field]
        text = as_text(value).strip()
        if text in labels:
            return text
        number = int(value) if isinstance(value, bool) else _whole(text)
        if number is not None and 0 <= number < len(labels):
            return labels[number]
        known = ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")
        raise BadRecordError(f"the label {text!r} is neither one of {_WHERE}.labels ({known}) nor the number of one")


def _whole(text: str) -> int | None:
    """The number that a text is, 1.0 as well as 1."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None
