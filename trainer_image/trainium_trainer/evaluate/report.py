"""The result of an evaluation: figures before and after and the answers, as JSON and as a Markdown table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trainium_contract.base import MessageModel
from trainium_contract.status.results import EvaluationFigure, RunResults
from trainium_contract.trainer.evaluate import GenerationConfig
from trainium_trainer.evaluate.scoring import ExampleScore, compute_figures
from trainium_trainer.evaluate.tasks import TaskReport  # noqa: TC001 - pydantic reads annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_trainer.data.examples.held_out import HeldOutExamples

JSON_NAME = "evaluation.json"
MARKDOWN_NAME = "evaluation.md"
ANSWERS_KEPT = 100
"""The number of first examples whose answers a result holds."""
_MEANING = {
    "perplexity": "perplexity of the answers",
    "accuracy": "accuracy (likeliest label)",
    "generatedAccuracy": "accuracy (label as generated)",
    "exactMatch": "exact match",
    "rougeL": "ROUGE-L",
}
_MAX_ANSWERS = 3
_SHOWN_CHARACTERS = 400
_MESSAGE_BYTES = 4096
"""The bytes of a termination message that the kubelet keeps."""


class AnswerRecord(MessageModel):
    """A prompt and its answers."""

    prompt: str
    expected: str
    before: str | None = None
    after: str | None = None


class EvaluationResult(MessageModel):
    """The result of an evaluation."""

    identity: str = ""
    """The digest of the models, the data and the settings; empty if the evaluation is not part of a run."""
    model: str
    base: str | None = None
    """The location of the model in the column `before`."""
    examples: Annotated[int, Field(ge=0)]
    answer_tokens: Annotated[int, Field(ge=0)] = 0
    """The number of tokens of the perplexity."""
    computed: str = ""
    """The number format and device."""
    generation: GenerationConfig = GenerationConfig()
    figures: tuple[EvaluationFigure, ...] = ()
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    answers: tuple[AnswerRecord, ...] = ()
    """Answers to the first prompts."""
    tasks: TaskReport | None = None
    """The figures of benchmark tasks with their standard errors."""

    def add_tasks(self, report: TaskReport) -> EvaluationResult:
        """Return this result with the figures of tasks."""
        return self.model_copy(update={"tasks": report, "figures": (*self.figures, *report.compared)})

    def format_message(self) -> str:
        """Return the figures as a pod's termination message, as many as it can hold."""
        results = RunResults().set_evaluation(self.figures)
        while len(message := results.model_dump_json(by_alias=True, exclude_defaults=True)) > _MESSAGE_BYTES:
            results = results.set_evaluation(results.evaluation[:-1])
        return message

    def to_json(self) -> str:
        """Return the contents of the file."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"

    def to_markdown(self) -> str:
        """Return a table followed by the first answers."""
        if self.tasks is not None and not self.examples:
            return "\n".join([self.tasks.to_markdown(), *self.notes]).rstrip() + "\n"
        before = self.base is not None
        lines = [f"| figure |{' before |' if before else ''} after |", f"|---|{'---:|' if before else ''}---:|"]
        of_tasks = {figure.name for figure in self.tasks.compared} if self.tasks is not None else set()
        for figure in self.figures:
            if figure.name in of_tasks:
                continue
            cells = [_MEANING.get(figure.name, figure.name), *([_format_cell(figure.before)] if before else [])]
            lines.append(f"| {' | '.join([*cells, _format_cell(figure.after)])} |")
        count = f"{self.examples} held-out examples, {self.answer_tokens:,} tokens of answers"
        lines += ["", f"{count}; {self.computed}." if self.computed else f"{count}.", *self.notes]
        lines += ["", self.tasks.to_markdown().rstrip()] if self.tasks is not None else []
        for answer in self.answers[:_MAX_ANSWERS]:
            lines += [*_quote("Prompt", answer.prompt), *_quote("Expected", answer.expected)]
            lines += _quote("Before", answer.before) if answer.before is not None else []
            lines += _quote("After", answer.after) if answer.after is not None else []
        return "\n".join(lines) + "\n"


def build_figures(before: Sequence[ExampleScore], after: Sequence[ExampleScore]) -> tuple[EvaluationFigure, ...]:
    """Return a table of the figures of two models; the first may be missing."""
    old, new = compute_figures(before), compute_figures(after)
    none = (None, None)
    return tuple(
        EvaluationFigure(
            name=name,
            before=old.get(name, none)[0],
            after=new.get(name, none)[0],
            standard_error=new.get(name, none)[1],
        )
        for name in old | new
    )


def select_answers(
    held_out: HeldOutExamples, before: Sequence[ExampleScore], after: Sequence[ExampleScore]
) -> tuple[AnswerRecord, ...]:
    """Return the first examples with the models' answers."""
    if not held_out.has_answers:
        return ()
    old, new = ({score.number: score.answer for score in scores} for scores in (before, after))
    return tuple(
        AnswerRecord(prompt=example.prompt, expected=example.answer, before=old.get(number), after=new.get(number))
        for number, example in enumerate(held_out.examples[:ANSWERS_KEPT])
    )


def _format_cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value >= 10_000 else f"{value:.4f}"


def _quote(name: str, text: str) -> list[str]:
    """Return a text in a code fence that it cannot close."""
    short = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."
    fence = "```"
    while fence in short:
        fence += "`"
    return ["", f"{name}:", "", f"{fence}text", short, fence]
