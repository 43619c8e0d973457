"""Print samples as the model sees them, and counts of the records: `trainium-trainer show-data`.

Guarantees:
- What is shown is what a run with this configuration sees first, read the way the run reads it.
- Nothing here imports torch but for data that are tokenised while training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_contract.trainer.data import BosToken
from trainium_trainer.commands.options import DEFAULT_CONFIG, ConfigFile, Overrides

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.text import Text
    from tokenizers import Tokenizer

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.data import DataConfig
    from trainium_trainer.data.examples.opening import DataReport
    from trainium_trainer.data.opening import Data

_BAR = 40
_LEARNED = "bold green"
_OPEN, _CLOSE = "⟦", "⟧"
_BORDER = "│"


@dataclass(frozen=True, slots=True)
class Shown:
    """One stretch of a sample: a document's or example's tokens, and which of them are learned."""

    ids: Sequence[int]
    learned: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Display:
    """Format of printed samples."""

    tokenizer: Tokenizer = field(kw_only=False)
    colour: bool = field(kw_only=False)
    borders: bool
    ids: bool


def show_data(
    config: ConfigFile = DEFAULT_CONFIG,
    samples: Annotated[int, typer.Option(min=0, help="How many samples to show.")] = 3,
    first: Annotated[int, typer.Option(min=0, help="Position of the first of them in the run.")] = 0,
    overrides: Overrides = None,
    *,
    borders: Annotated[bool, typer.Option("--borders", help="Put a line between tokens.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print the ids of the tokens too.")] = False,
) -> None:
    """Print samples as the model will see them, with counts and a histogram of lengths."""
    from rich.console import Console  # noqa: PLC0415 - only for this command
    from rich.text import Text  # noqa: PLC0415

    from trainium_trainer.configuration.config import load  # noqa: PLC0415
    from trainium_trainer.data.opening import open_data  # noqa: PLC0415
    from trainium_trainer.data.tokens.tokenizer import difference_from_transformers, load_tokenizer  # noqa: PLC0415

    given = load(config, overrides or ())
    data = open_data(given.data, given.batch.global_size, epochs=given.epochs, steps_differ=given.batch.tolerance > 0)
    console = Console(highlight=False)
    tokenizer = load_tokenizer(data.tokenizer)
    display = _Display(tokenizer, console.is_terminal and not console.no_color, borders=borders, ids=ids)
    seen = ""
    for number, shown in enumerate(_samples(given, data, first, samples), start=first):
        _print_sample(console, display, number, shown, given.data)
        if shown and not seen:
            seen = str(tokenizer.decode(list(shown[0].ids), skip_special_tokens=False))
    _print_summary(console, given, data)
    if difference := difference_from_transformers(data.tokenizer, seen):
        console.print(Text(f"\nwarning: {difference}", "yellow"), soft_wrap=True)


def _samples(config: TrainingConfig, data: Data, first: int, count: int) -> Iterator[list[Shown] | None]:
    """Yield samples by position; None for one that only fills up an epoch."""
    from trainium_trainer.data.batches.samples import Samples, TextSample  # noqa: PLC0415
    from trainium_trainer.data.examples.part import ExampleSample, PairSample  # noqa: PLC0415 - as above

    training = data.training
    if not isinstance(training, Samples):
        yield from _streamed(config, data, first, count)
        return
    for sample in training.at(first, count):
        if isinstance(sample, ExampleSample | PairSample):
            yield [Shown(ids.tolist(), [False, *trained[1:].tolist()]) for ids, trained in sample.examples]
        elif isinstance(sample, TextSample):
            learned = sample.rows(training.rules)[0].learned
            yield [Shown(sample.tokens.tolist(), [False, *learned.tolist()])]
        else:
            yield None


def _streamed(config: TrainingConfig, data: Data, first: int, count: int) -> Iterator[list[Shown]]:
    """Yield samples of text that is tokenized while training, from the step of the first one on."""
    from trainium_trainer.data.batches.loader import Share  # noqa: PLC0415 - only for streams
    from trainium_trainer.data.streaming import open_loader  # noqa: PLC0415
    from trainium_trainer.models.loss import IGNORED_LABEL  # noqa: PLC0415

    batch = config.batch.global_size
    loader = open_loader(data, Share(global_size=batch, micro_size=1, dp_rank=0, dp_size=1))
    try:
        for position in range(first, first + count):
            micro = loader.batch_at(position // batch * batch).micro_batches[position % batch]
            inputs, labels = micro.inputs[0].tolist(), micro.labels[0].tolist()
            yield [Shown(inputs, [False, *(label != IGNORED_LABEL for label in labels[:-1])])]
    finally:
        loader.close()


def _print_sample(
    console: Console, display: _Display, number: int, shown: list[Shown] | None, config: DataConfig
) -> None:
    from rich.text import Text  # noqa: PLC0415

    pairs, length = config.rows_per_sample > 1, config.rows_per_sample * config.sequence_length

    if shown is None:
        console.print(Text(f"── sample {number}: fills up the last batch of an epoch, does not count ──", "dim"))
        return
    used = sum(len(one.ids) - 1 for one in shown)
    learned = sum(sum(one.learned) for one in shown)
    several = f"{len(shown)} {'answers' if pairs else 'examples'}, " if len(shown) > 1 else ""
    head = f"── sample {number}: {several}{used:,} of {length:,} positions used, {learned:,} tokens learned ──"
    console.print(Text(head, "bold cyan"))
    for index, one in enumerate(shown):
        if index:
            sees = "does not see" if config.masked else "sees"
            other = f"example {index + 1} of this sample, which {sees} the one before"
            console.print(Text(f"── {'the answer that is not preferred' if pairs else other} ──", "dim"))
        console.print(_coloured(display, one), soft_wrap=True)
        if display.ids:
            console.print(Text(f"ids: {' '.join(map(str, one.ids))}", "dim"), soft_wrap=True)
    console.print()


def _coloured(display: _Display, shown: Shown) -> Text:
    """Return the decoded text; what is learned is coloured, or between brackets."""
    from rich.text import Text  # noqa: PLC0415

    text, before, start = Text(), "", 0
    ids, learned = list(shown.ids), list(shown.learned)
    while start < len(ids):
        end = start + 1
        while end < len(ids) and learned[end] == learned[start] and not display.borders:
            end += 1
        # Decoded from the beginning each time: many tokenizers drop the blank that a text begins with.
        now = str(display.tokenizer.decode(ids[:end], skip_special_tokens=False))
        piece, before, is_learned = now[len(before) :], now, learned[start]
        if display.borders and start:
            text.append(_BORDER, "dim")
        start = end
        if display.colour:
            text.append(piece, _LEARNED if is_learned else "")
        else:
            text.append(f"{_OPEN}{piece}{_CLOSE}" if is_learned else piece)
    return text


def _print_summary(console: Console, config: TrainingConfig, data: Data) -> None:
    from rich.text import Text  # noqa: PLC0415

    what = "green" if console.is_terminal and not console.no_color else f"between {_OPEN} and {_CLOSE}"
    lines = [("learned", what), ("tokenizer", str(data.tokenizer)), ("format", str(config.data.format))]
    if config.data.bos is not BosToken.AUTO:
        lines.append(("BOS token", str(config.data.bos)))
    if data.report is not None:
        lines += _counts(config, data.report)
    else:
        count = getattr(data.training, "num_samples", None)
        known = f"{count:,} of {config.data.sequence_length:,} tokens" if count is not None else "not known ahead"
        lines += [("samples", f"{known}, tokenised {'ahead' if count is not None else 'while training'}")]
        lines += [("masks", "documents do not see each other")] if config.data.masked else []
    if data.validation is not None:
        lines.append(("validation", f"{data.validation.num_samples:,} samples"))
    if data.epoch_samples is not None:
        lines.append(("one epoch", f"{-(-data.epoch_samples // config.batch.global_size):,} steps"))
    for name, value in lines:
        console.print(Text.assemble((f"{name:<12}", "bold"), value), soft_wrap=True)
    if data.report is not None:
        _print_histogram(console, data.report)


def _counts(config: TrainingConfig, report: DataReport) -> list[tuple[str, str]]:
    examples = config.data.examples
    lines: list[tuple[str, Any]] = [
        ("loss on", str(examples.loss)),
        ("records", f"{report.counts.records:,}"),
        ("filtered", f"{report.counts.filtered:,} by data.examples.where"),
        ("left out", f"{report.counts.left_out:,} by data.examples.function"),
        ("skipped", f"{report.skipped:,} that cannot be used"),
        ("dropped", f"{report.counts.dropped:,} longer than {report.sequence_length:,} tokens"),
        ("not used", ", ".join(f"{name} ({count:,})" for name, count in report.counts.unused.items()) or "0"),
        ("cut", f"{report.counts.cut:,} (tooLong: {examples.too_long})"),
        ("held back", f"{report.held_back:,}"),
        ("examples", f"{report.examples - report.held_back:,} to train on"),
        ("sequences", f"{report.sequences:,}{', packed' if examples.packing else ''}"),
        ("positions", f"{report.used:.1%} used"),
    ]
    zero = {"filtered", "left out", "skipped", "held back", "not used"}  # worth a line only when there are some
    return [(name, value) for name, value in lines if name not in zero or not value.startswith("0")]


def _print_histogram(console: Console, report: DataReport) -> None:
    from rich.text import Text  # noqa: PLC0415

    bars = report.histogram()
    most = max((count for _, _, count in bars), default=1)
    width = len(f"{bars[-1][1]:,}") if bars else 1
    console.print(Text("\ntokens of an example, before it is cut or dropped", "bold"))
    for low, high, count in bars:
        bar = "█" * -(-count * _BAR // max(1, most))
        style = "yellow" if low > report.sequence_length + 1 else "cyan"
        console.print(Text.assemble(f"{low:>{width},} - {high:>{width},} ", (bar, style), f" {count:,}"))
