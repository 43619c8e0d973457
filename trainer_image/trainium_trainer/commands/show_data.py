"""Print samples as the model's input, and counts of the records: `trainium-trainer show-data`.

Guarantees:
- The samples are the first ones of a run with this configuration, read in the same way.
- Torch is imported only for data that are tokenized during training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_contract.trainer.data import BosToken
from trainium_trainer.commands.options import DEFAULT_CONFIG, ConfigFile, Overrides

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text
    from tokenizers import Tokenizer

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.data import DataConfig
    from trainium_trainer.data.dataset import Dataset
    from trainium_trainer.data.examples.dataset import DataReport

_BAR = 40
_LEARNED = "bold green"
_OPEN, _CLOSE = "⟦", "⟧"
_BORDER = "│"


@dataclass(frozen=True, slots=True)
class DisplayedTokens:
    """A document or example of a sample: its tokens, and which of them are learned."""

    ids: Sequence[int]
    loss_mask: Sequence[bool]


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
    from trainium_trainer.data.dataset import open_run_data  # noqa: PLC0415
    from trainium_trainer.data.tokens.tokenizer import load_tokenizer  # noqa: PLC0415

    run = load(config, overrides or ())
    data = open_run_data(run)
    console = Console(highlight=False)
    tokenizer = load_tokenizer(data.tokenizer)
    display = _Display(tokenizer, console.is_terminal and not console.no_color, borders=borders, ids=ids)
    seen: Sequence[int] = ()
    for number, sample in enumerate(_iterate_samples(run, data, first, samples), start=first):
        _print_sample(console, display, number, sample, run.data)
        if sample and not seen:
            seen = sample[0].ids
    _print_summary(console, run, data)
    has_examples = data.report is not None  # running text is cut anywhere, also within words
    if difference := _compare_with_transformers(data.tokenizer, tokenizer, seen, whole=has_examples):
        console.print(Text(f"\nwarning: {difference}", "yellow"), soft_wrap=True)


def _iterate_samples(
    config: TrainingConfig, data: Dataset, first: int, count: int
) -> Iterator[list[DisplayedTokens] | None]:
    """Yield samples by position; None for the padding of an epoch."""
    from trainium_trainer.data.batches.samples import Samples, TextSample  # noqa: PLC0415
    from trainium_trainer.data.examples.sample_sources import ExampleSample, PairSample  # noqa: PLC0415 - as above

    training = data.training
    if not isinstance(training, Samples):
        yield from _read_streamed_samples(config, data, first, count)
        return
    for sample in training.read_at(first, count):
        if isinstance(sample, ExampleSample | PairSample):
            yield [
                DisplayedTokens(ids.tolist(), [False, *loss_mask[1:].tolist()]) for ids, loss_mask in sample.examples
            ]
        elif isinstance(sample, TextSample):
            loss_mask = sample.list_rows(training.rules)[0].loss_mask
            yield [DisplayedTokens(sample.tokens.tolist(), [False, *loss_mask.tolist()])]
        else:
            yield None


def _read_streamed_samples(
    config: TrainingConfig, data: Dataset, first: int, count: int
) -> Iterator[list[DisplayedTokens]]:
    """Yield samples of text that is tokenized during training, starting at sample `first`."""
    from trainium_trainer.data.batches.samples import Share  # noqa: PLC0415 - only for streams
    from trainium_trainer.data.loader import open_loader  # noqa: PLC0415
    from trainium_trainer.models.loss import IGNORED_LABEL  # noqa: PLC0415

    batch = config.batch.global_size
    loader = open_loader(data, Share(global_size=batch, micro_size=1, dp_rank=0, dp_size=1))
    try:
        for position in range(first, first + count):
            micro = loader.read_batch(position // batch * batch).micro_batches[position % batch]
            inputs, labels = micro.inputs[0].tolist(), micro.labels[0].tolist()
            yield [DisplayedTokens(inputs, [False, *(label != IGNORED_LABEL for label in labels[:-1])])]
    finally:
        loader.close()


def _print_sample(
    console: Console, display: _Display, number: int, sample: list[DisplayedTokens] | None, config: DataConfig
) -> None:
    from rich.text import Text  # noqa: PLC0415

    pairs, length = config.rows_per_sample > 1, config.rows_per_sample * config.sequence_length

    if sample is None:
        console.print(Text(f"── sample {number}: padding of the last batch of an epoch; not trained ──", "dim"))
        return
    used = sum(len(tokens.ids) - 1 for tokens in sample)
    learned = sum(sum(tokens.loss_mask) for tokens in sample)
    several = f"{len(sample)} {'answers' if pairs else 'examples'}, " if len(sample) > 1 else ""
    head = f"── sample {number}: {several}{used:,} of {length:,} positions used, {learned:,} tokens learned ──"
    console.print(Text(head, "bold cyan"))
    for index, tokens in enumerate(sample):
        if index:
            sees = "does not see" if config.masked else "sees"
            other = f"example {index + 1} of this sample, which {sees} the one before"
            console.print(Text(f"── {'the answer that is not preferred' if pairs else other} ──", "dim"))
        console.print(_format_tokens(display, tokens), soft_wrap=True)
        if display.ids:
            console.print(Text(f"ids: {' '.join(map(str, tokens.ids))}", "dim"), soft_wrap=True)
    console.print()


def _format_tokens(display: _Display, tokens: DisplayedTokens) -> Text:
    """Return the decoded text; learned tokens are coloured, or in brackets."""
    from rich.text import Text  # noqa: PLC0415

    text, before, start = Text(), "", 0
    ids, loss_mask = list(tokens.ids), list(tokens.loss_mask)
    while start < len(ids):
        end = start + 1
        while end < len(ids) and loss_mask[end] == loss_mask[start] and not display.borders:
            end += 1
        # Always decoded from the beginning, because many tokenizers drop the leading space of a text.
        now = str(display.tokenizer.decode(ids[:end], skip_special_tokens=False))
        piece, before, is_learned = now[len(before) :], now, loss_mask[start]
        if display.borders and start:
            text.append(_BORDER, "dim")
        start = end
        if display.colour:
            text.append(piece, _LEARNED if is_learned else "")
        else:
            text.append(f"{_OPEN}{piece}{_CLOSE}" if is_learned else piece)
    return text


def _print_summary(console: Console, config: TrainingConfig, data: Dataset) -> None:
    from rich.text import Text  # noqa: PLC0415

    what = "green" if console.is_terminal and not console.no_color else f"between {_OPEN} and {_CLOSE}"
    lines = [("learned", what), ("tokenizer", str(data.tokenizer)), ("format", str(config.data.format))]
    if config.data.bos is not BosToken.AUTO:
        lines.append(("BOS token", str(config.data.bos)))
    if data.report is not None:
        lines += _format_counts(config, data.report)
    else:
        count = getattr(data.training, "num_samples", None)
        length = f"{count:,} of {config.data.sequence_length:,} tokens" if count is not None else "not known ahead"
        lines += [("samples", f"{length}, tokenized {'ahead' if count is not None else 'while training'}")]
        lines += [("masks", "documents do not see each other")] if config.data.masked else []
    if data.validation is not None:
        lines.append(("validation", f"{data.validation.num_samples:,} samples"))
    if data.epoch_samples is not None:
        lines.append(("one epoch", f"{-(-data.epoch_samples // config.batch.global_size):,} steps"))
    for name, value in lines:
        console.print(Text.assemble((f"{name:<12}", "bold"), value), soft_wrap=True)
    if data.report is not None:
        _print_histogram(console, data.report)


def _format_counts(config: TrainingConfig, report: DataReport) -> list[tuple[str, str]]:
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
        ("positions", f"{report.occupancy:.1%} used"),
    ]
    zero = {"filtered", "left out", "skipped", "held back", "not used"}  # omit counts of zero
    return [(name, value) for name, value in lines if name not in zero or not value.startswith("0")]


def _print_histogram(console: Console, report: DataReport) -> None:
    from rich.text import Text  # noqa: PLC0415

    bars = report.build_histogram()
    largest = max((count for _, _, count in bars), default=1)
    width = len(f"{bars[-1][1]:,}") if bars else 1
    console.print(Text("\ntokens of an example, before it is cut or dropped", "bold"))
    for low, high, count in bars:
        bar = "█" * -(-count * _BAR // max(1, largest))
        style = "yellow" if low > report.sequence_length + 1 else "cyan"
        console.print(Text.assemble(f"{low:>{width},} - {high:>{width},} ", (bar, style), f" {count:,}"))


def _compare_with_transformers(file: Path, ours: Tokenizer, ids: Sequence[int], *, whole: bool) -> str:
    """Describe where `transformers` encodes the text of a sample differently; empty if it does not.

    Unless the sample is a `whole` text, and its tokens have the text from which they were made, both encode that text.
    """
    from trainium_trainer.data.tokens.tokenizer import CONFIG_FILE  # noqa: PLC0415

    if not file.with_name(CONFIG_FILE).is_file():
        return ""
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, only for a person who looks

    ours.encode_special_tokens = False
    text = str(ours.decode(list(ids), skip_special_tokens=False))
    try:
        expected = AutoTokenizer.from_pretrained(str(file.parent))(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # noqa: BLE001 - whatever the library meets in the folder
        return f"transformers cannot load {file.parent} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    again = ours.encode(text, add_special_tokens=False).ids
    if not whole or again != expected or ours.decode(again, skip_special_tokens=False) != text:
        ids = again  # many tokenizers add or drop blanks when they decode
    if list(ids) == expected:
        return ""
    index = next((at for at, (one, other) in enumerate(zip(ids, expected, strict=False)) if one != other), None)
    index = min(len(ids), len(expected)) if index is None else index
    here = list(ids[index : index + 3])
    return (
        f"transformers' AutoTokenizer gives the first text {len(expected)} tokens, this run gives it {len(ids)}; they "
        f"differ from token {index} on: {expected[index : index + 3]} there, {here} here "
        f"({ours.decode(here, skip_special_tokens=False)!r}; the ends of texts and messages are text in records)"
    )
