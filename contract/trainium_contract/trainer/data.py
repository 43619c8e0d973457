"""Configuration of the data: `spec.trainer.data`.

The sample stream is a pure function of these fields, the files and the batch's global size. So a field that changes it
must not change between runs of one history.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel, MatchesPattern, derived
from trainium_contract.trainer.examples import DataFormat, ExamplesConfig

MIN_VOCABULARY = 300
"""Entries of a trained tokenizer: 256 bytes, the special tokens, and a few pairs."""
_Path = Annotated[str, Field(min_length=1, max_length=1024)]
_Column = Annotated[str, Field(min_length=1, max_length=128)]
_HubPart = Annotated[
    str,
    Field(min_length=1, max_length=128),
    MatchesPattern(r"[\w.-][\w./-]*", "write letters, digits, '.', '_', '-' and '/', as in refs/convert/parquet"),
]
_HubText = Annotated[str, Field(min_length=1, max_length=256)]
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class TokenizerConfig(ContractModel):
    """Source of token ids."""

    path: _Path | None = None
    """A `tokenizer.json` or a folder with one, also as `s3://bucket/prefix`; omitted: that of prepared data, else a
    byte-level BPE is trained on the data and cached."""
    vocab_size: int = derived(2048, ge=MIN_VOCABULARY, le=200_000)
    """Vocabulary of the trained BPE; a tokenizer given by `path` has its own. Omitted: 2048, or model.vocabSize if that
    is smaller."""


class HubConfig(ContractModel):
    """A split of a data set on the Hugging Face hub: the files that `datasets.load_dataset` would read.

    A token for gated and private data sets is the environment variable HF_TOKEN, from a Secret.
    """

    dataset: Annotated[
        str,
        Field(min_length=1, max_length=128),
        MatchesPattern(r"[\w.-]+(/[\w.-]+)?", "write the name of a data set on the hub, owner/name"),
    ]
    """Name of the data set, for instance nyu-mll/glue."""
    name: _HubText | None = None
    """Configuration of the data set, for instance qnli; omitted: its default."""
    directory: _HubText | None = None
    """Folder of the data set that is read, as `data_dir` of `load_dataset`; omitted: all of it."""
    split: _HubText = "train"
    """Split of the data set, as for `load_dataset`: also `train[:50%]`, `train[10:20]` or `train+test`."""
    revision: _HubPart = "main"
    """Commit, tag or branch. The first start of a run resolves it; later starts read the same commit."""


class SourceConfig(ContractModel):
    """One of several sources. Give `source` or `hub`."""

    source: _Path | None = None
    """Source in the form of `data.source`."""
    hub: HubConfig | None = None
    """Source in the form of `data.hub`."""
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Share of the samples, relative to the other weights; shares are kept to 1/10,000."""
    text_field: _Column | None = None
    """Column or key that holds the text; omitted: `data.textField`."""

    @model_validator(mode="after")
    def _check_one_origin(self) -> Self:
        if (self.source is None) == (self.hub is None):
            raise ValueError("each of data.sources needs either source or hub: give exactly one of them")
        return self


class ValidationSplit(StrEnum):
    """Selection of held-out documents."""

    DOCUMENT_HASH = "DocumentHash"
    """By a hash of the text: a document is on the same side in every run, even when data are added."""
    TAIL = "Tail"
    """The end of each source; also for data that is one long document."""


class ValidationConfig(ContractModel):
    """Text that is never trained on, and how often the loss is measured. Give `fraction`, `source` or `hubSplit`."""

    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the data that is held out."""
    split: ValidationSplit = ValidationSplit.DOCUMENT_HASH
    """Selection of `fraction`."""
    source: _Path | None = None
    """A separate source, in the form of `data.source`."""
    hub_split: _HubText | None = None
    """A split of the data set of `data.hub`, for instance validation or `train[90%:]`."""
    every_steps: _Count = 1000
    """Optimizer steps between two measurements; the last step is measured too."""
    samples: _Count = 64
    """Maximum number of samples of one measurement; always the same ones."""

    @model_validator(mode="after")
    def _check_one_origin(self) -> Self:
        if [self.fraction, self.source, self.hub_split].count(None) != 2:
            raise ValueError("data.validation needs one of fraction, source and hubSplit: give exactly one of them")
        return self


class Tokenization(StrEnum):
    """When text is tokenized."""

    AUTO = "Auto"
    """Online for raw data of at least 256 MiB that can be divided, else Ahead."""
    AHEAD = "Ahead"
    """Completely before the first step, into the cache: samples are shuffled over the whole epoch."""
    ONLINE = "Online"
    """While training, by worker processes: each row of the global batch is a stream of shuffled blocks."""


class BosToken(StrEnum):
    """Use of the tokenizer's BOS token at the start of a text."""

    AUTO = "Auto"
    """Examples as the tokenizer or the chat template has it, documents of format Text without."""
    ALWAYS = "Always"
    """Each example and each document, once."""
    NEVER = "Never"
    """None, even if the tokenizer, the template or the source has one."""


class DataConfig(ContractModel):
    """The text to train on, as one ordered stream of samples addressed by global position."""

    source: _Path | None = None
    """A file (.txt, .jsonl, .json, .csv, also with .gz or .zst, .arrow, .parquet), a folder, a glob, or
    `s3://bucket/prefix` of such files; a folder that `trainium-trainer prepare-data` wrote; or `python-docs`, the
    documentation that ships with Python. Required unless `hub` or `sources` is given."""
    hub: HubConfig | None = None
    """A data set of the Hugging Face hub, in place of `source`."""
    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1, max_length=64)] | None = None
    """Several weighted sources, in place of `source`."""
    text_field: _Column = "text"
    """Column or key that holds the text in JSON, CSV, Arrow, Parquet and data sets; format Text."""
    format: DataFormat = DataFormat.TEXT
    """Kind of the source's records: running text, or an example of prompt and answer."""
    examples: ExamplesConfig = ExamplesConfig()
    """Conversion of records to examples, for every format but Text."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Source of token ids."""
    bos: BosToken = BosToken.AUTO
    """Whether each document or example begins with the tokenizer's BOS token."""
    sequence_length: int = derived(128, ge=8, le=1_048_576)
    """Tokens of one sample. Omitted: 128, or model.maxPositions if that is smaller."""
    mask_documents: bool = False
    """Let tokens attend to their own document only, with positions that start at 0 in each, and do not train on the
    first token after another document."""
    validation: ValidationConfig | None = None
    """Text that is held out to measure the loss on; omitted: none."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the per-epoch shuffle and of the mixture."""
    tokenization: Tokenization = Tokenization.AUTO
    """When text is tokenized."""
    workers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Tokenizing processes: of a node before the first step (omitted: one for each core, at most 16), of each training
    process while training (omitted: 1)."""
    prefetch_steps: Annotated[int, Field(ge=1, le=1000)] = 4
    """Steps whose samples are prepared ahead of the training step."""
    max_bad_lines: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Lines, rows and records that may be skipped as unusable, in each source, online in each training process;
    omitted: 100, and at most 1 % of the records of a source."""
    cache_directory: _Path | None = None
    """Where tokenizer and tokenized text are cached; omitted: the user's cache folder, on a worker the node's."""

    @model_validator(mode="after")
    def _check_one_hub(self) -> Self:
        if self.hub is not None and self.sources is not None:
            raise ValueError("data.hub and data.sources are both given: move data.hub into data.sources")
        if self.hub is None and self.validation is not None and self.validation.hub_split is not None:
            raise ValueError("data.validation.hubSplit is a split of data.hub, which is not given: give data.hub")
        if self.format is not DataFormat.TEXT and any(source.text_field for source in self.sources or ()):
            raise ValueError("data.sources[].textField has no effect unless data.format is Text: leave it out")
        return self

    @property
    def rows_per_sample(self) -> int:
        """Return how many sequences a sample has: a pair of answers has two."""
        return 2 if self.format is DataFormat.PREFERENCE else 1

    @property
    def masked(self) -> bool:
        """Return whether a sample holds several documents that do not attend to each other."""
        examples = self.examples.packing and self.examples.mask_examples
        return self.mask_documents if self.format is DataFormat.TEXT else examples
