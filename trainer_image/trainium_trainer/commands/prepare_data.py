"""Tokenize or encode data ahead of a run: `trainium-trainer prepare-data`.

Guarantees:
- Nothing here imports torch.
- Progress is shown on stderr; the result is one line on stdout.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated, Self

import typer

from trainium_contract.trainer.data import BosToken, DataConfig
from trainium_contract.trainer.examples import DataFormat
from trainium_trainer.commands.options import Overrides  # noqa: TC001 - as above
from trainium_trainer.exits import UserError
from trainium_trainer.validation_errors import validate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_trainer.data.prepared.build import BuildProgress
    from trainium_trainer.data.prepared.reader import PreparedManifest


def prepare_data(
    config: Annotated[
        Path | None,
        typer.Option(help="A TrainingJob or the trainer's configuration: fill its data.cacheDirectory for the run."),
    ] = None,
    overrides: Overrides = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="A file, folder, glob, s3://bucket/prefix or hf://datasets/owner/name; may be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to make of the text; name it in data.source afterwards.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json or its folder; omitted: one is trained on the data.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Entries of a tokenizer that is trained on the data.")] = 2048,
    text_field: Annotated[str, typer.Option(help="Column or key that holds the text.")] = "text",
    bos: Annotated[
        BosToken, typer.Option(help="Whether each document begins with the tokenizer's BOS token.")
    ] = BosToken.AUTO,
    workers: Annotated[
        int | None, typer.Option(help="Tokenizing processes; omitted: one for each core, at most 16.")
    ] = None,
    max_bad_lines: Annotated[
        int | None,
        typer.Option(help="Lines that may be skipped before it is an error; omitted: 100, and 1 % of records."),
    ] = None,
) -> None:
    """Tokenize text, or encode examples, ahead of a run; a killed command is continued by the next.

    With --config all that the run would make before its first step is made in its cache; with --source and --output
    text becomes a folder of Arrow files.
    """
    if config is not None:
        if source or output:
            raise UserError("prepare-data: --config names what is prepared and where: leave --source and --output out")
        _prepare_for(config, overrides or ())
        return
    if not source or output is None:
        raise UserError("prepare-data: needs --config FILE, or --source and --output")
    _prepare_texts(source, output, _check(tokenizer, vocab_size, text_field, workers, max_bad_lines), bos)


def _prepare_texts(sources: Sequence[str], output: Path, config: DataConfig, bos: BosToken) -> None:
    """Tokenize texts into a folder of Arrow files."""
    from trainium_trainer.data.cache import find_cache_directory, use_cache  # noqa: PLC0415 - only for this command
    from trainium_trainer.data.prepared.build import build  # noqa: PLC0415 - numpy
    from trainium_trainer.data.prepared.text_sources import TextInputs  # noqa: PLC0415
    from trainium_trainer.data.sources.resolve import SourceSpec  # noqa: PLC0415
    from trainium_trainer.data.tokens.encoding import train_for_texts  # noqa: PLC0415
    from trainium_trainer.data.tokens.special_tokens import find_document_bos_prefix  # noqa: PLC0415
    from trainium_trainer.data.tokens.tokenizer import count_entries, find_tokenizer_file  # noqa: PLC0415

    specs = tuple(SourceSpec(name, config.text_field).pin() for name in sources)
    with use_cache(find_cache_directory(config)) as cache:
        if config.tokenizer.path is not None:
            file = find_tokenizer_file(config.tokenizer)
            count_entries(file)
        else:
            file = train_for_texts(specs, config.tokenizer.vocab_size, cache)
        inputs = TextInputs(specs, file, config.max_bad_lines, find_document_bos_prefix(bos, file))
        key = inputs.compute_key(cache)
    bar = _ProgressBar("documents")
    with bar:
        manifest = build(output.absolute(), inputs, key, workers=config.workers, progress=bar.update)
    typer.echo(_format_summary(output, manifest, bar))


def _prepare_for(file: Path, overrides: Sequence[str]) -> None:
    """Prepare all data that a run would prepare before its first step."""
    from trainium_trainer.configuration.config import load  # noqa: PLC0415 - as above
    from trainium_trainer.data.batches.samples import Samples  # noqa: PLC0415
    from trainium_trainer.data.cache import find_cache_directory, use_cache  # noqa: PLC0415
    from trainium_trainer.data.dataset import open_run_data  # noqa: PLC0415

    config = load(file, overrides)
    with use_cache(
        find_cache_directory(config.data)
    ) as cache:  # a run can work without its cache, but not the preparation
        tempfile.TemporaryFile(dir=cache).close()
    bar = _ProgressBar("documents" if config.data.format is DataFormat.TEXT else "examples")
    with bar:
        data = open_run_data(config, bar.update)
    if not isinstance(data.training, Samples):
        raise UserError(
            "data.tokenization: these data are tokenized while training, so nothing is prepared: set it to Ahead, or "
            "use --source and --output"
        )
    what = data.report.format_line() if data.report is not None else f"{data.training.num_samples:,} samples"
    speed = f", {bar.new_tokens / bar.seconds:,.0f} tokens/s" if bar.new_tokens else ", all of it was there"
    typer.echo(f"{find_cache_directory(config.data)}: {what}{speed}")


def _check(tokenizer: Path | None, vocab_size: int, field: str, workers: int | None, bad: int | None) -> DataConfig:
    """Check the options against the bounds of the configuration. Raises UserError."""
    tokens = {"path": str(tokenizer) if tokenizer else None, "vocab_size": vocab_size}
    fields = {"tokenizer": tokens, "text_field": field, "workers": workers, "max_bad_lines": bad}
    return validate(DataConfig, fields)


def _format_summary(output: Path, manifest: PreparedManifest, bar: _ProgressBar) -> str:
    line = f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens"
    if bar.new_tokens:
        line += f", {bar.new_tokens / bar.seconds:,.0f} tokens/s"
    if manifest.skipped:
        return f"{line}, {manifest.skipped:,} lines skipped, the first: {manifest.examples[0]}"
    return f"{line}, no line skipped"


class _ProgressBar:
    """A progress bar on stderr; without a terminal only its end is printed."""

    def __init__(self, noun: str) -> None:
        from rich.console import Console  # noqa: PLC0415 - as above
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._noun = noun
        self._task = self._bar.add_task("listing", total=None)
        self._began = time.perf_counter()
        self.seconds = 0.0
        self.new_tokens = 0

    def update(self, progress: BuildProgress) -> None:
        """Draw the progress."""
        now = time.perf_counter()
        if progress.tokens == progress.resumed_tokens:
            self._began = now
        self.seconds = max(now - self._began, 1e-9)
        self.new_tokens = progress.tokens - progress.resumed_tokens
        speed = self.new_tokens / self.seconds
        skipped = f", {progress.skipped:,} skipped" if progress.skipped else ""
        self._bar.update(
            self._task,
            total=max(1, progress.total_bytes),
            completed=min(progress.bytes, progress.total_bytes) if progress.total_bytes else 0,
            description=f"{progress.documents:,} {self._noun}, {progress.tokens:,} tokens, {speed:,.0f}/s{skipped}",
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
