"""How many tokens per second one core makes ready for training, against the 26,000 that a trn1.32xlarge eats.

Text: the documentation and the source of Python's standard library as JSON lines; tokenizer: a byte-level BPE of 32,000
entries trained on it; samples of 4,096 tokens. Speeds are by processor time of all processes together, so that what
else the machine does matters little. `tokenizer alone` is the library on the same text in memory: what no loader can
beat. HLAT 7B trains at about 26,000 tokens/s on a trn1.32xlarge (arXiv 2404.10630); goal: ten times that per core.

    python -m benchmarks.training.loader --json out/bench/loader.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from trainium_contract.trainer.data import DataConfig, Tokenization
from trainium_trainer.data.batches.share import Share
from trainium_trainer.data.opening import open_data
from trainium_trainer.data.prepared.build import PreparedRecipe, build
from trainium_trainer.data.prepared.learned_tokenizer import learned
from trainium_trainer.data.prepared.prepared import Prepared
from trainium_trainer.data.sources.documents import TextPiece
from trainium_trainer.data.sources.resolve import open_source
from trainium_trainer.data.streaming import open_loader
from trainium_trainer.data.tokens.encoding import SourceSpec
from trainium_trainer.data.tokens.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

NODE_TOKENS_PER_SECOND = 26_000
GOAL = 10.0
VOCABULARY = 32_000
LENGTH = 4096
BATCH = 8
ONLINE_STEPS, PREPARED_STEPS = 60, 600
REPEAT = 3


def texts() -> list[str]:
    """Real text that every machine has."""
    docs = open_source("python-docs", "text")
    found = [piece.text for block in docs.blocks(1) for piece in docs.read(block) if isinstance(piece, TextPiece)]
    root = Path(sysconfig.get_path("stdlib"))
    sources = (file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts)
    return found + [file.read_text(encoding="utf-8", errors="ignore") for file in sources]


def measured(action: Callable[[], int]) -> dict[str, float]:
    """Tokens per second of processor time of this process and those it has ended, and by the clock."""
    began, before = time.perf_counter(), _processor()
    tokens = action()
    seconds, clock = _processor() - before, time.perf_counter() - began
    return {"tokensPerCoreSecond": tokens / seconds, "tokensPerClockSecond": tokens / clock}


def _processor() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def tokenizer_alone(documents: list[str], tokenizer: Path) -> int:
    """The library by itself."""
    library = load_tokenizer(tokenizer)
    count = 0
    for start in range(0, len(documents), 512):
        batch = library.encode_batch_fast(documents[start : start + 512], add_special_tokens=False)
        count += sum(len(encoding) for encoding in batch)
    return count


def prepare(source: Path, tokenizer: Path, folder: Path) -> int:
    """`prepare-data` with one process."""
    recipe = PreparedRecipe((SourceSpec(str(source), "text"),), tokenizer, 0)
    return build(folder, recipe, "benchmark", workers=1).tokens


def train(config: DataConfig, steps: int) -> int:
    """What a rank does, but for the training."""
    loader = open_loader(
        open_data(config, BATCH), Share(global_size=BATCH, micro_size=1, dp_rank=0, dp_size=1), ahead=2
    )
    tokens = 0
    try:
        for step in range(steps):
            tokens += sum(micro.valid_tokens for micro in loader.batch_at(step * BATCH).micro_batches)
    finally:
        loader.close()
    return tokens


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    documents = texts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "text.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        tokenizer = learned([SourceSpec(str(source), "text")], VOCABULARY, folder)
        common = {"tokenizer": {"path": str(tokenizer)}, "sequence_length": LENGTH, "cache_directory": str(folder)}
        online = DataConfig.model_validate({**common, "source": str(source), "tokenization": Tokenization.ONLINE})
        ready = DataConfig.model_validate({**common, "source": str(folder / "made-0")})
        runs: dict[str, Callable[[int], int]] = {
            "tokenizer alone": lambda _: tokenizer_alone(documents, tokenizer),
            "prepare-data, one process": lambda number: prepare(source, tokenizer, folder / f"made-{number}"),
            "online: read, tokenise, pack": lambda _: train(online, ONLINE_STEPS),
            "from prepared files": lambda _: train(ready, PREPARED_STEPS),
        }
        rows = {
            title: [measured(lambda action=action, number=number: action(number)) for number in range(REPEAT)]  # type: ignore[misc]
            for title, action in runs.items()
        }
        size = {"textBytes": source.stat().st_size, "tokens": Prepared(folder / "made-0").tokens}
    report(rows, size, options.json)


def report(rows: dict[str, list[dict[str, float]]], size: dict[str, int], file: Path) -> None:
    """A table on stdout and the figures in a file."""
    table = Table(title=f"Tokens/s of one core, against {NODE_TOKENS_PER_SECOND:,} of a trn1.32xlarge")
    for heading in ("what", "median", "lowest", "highest", "times a node's need", f"goal {GOAL:g} x"):
        table.add_column(heading, justify="right")
    figures = {}
    for title, values in rows.items():
        speeds = [value["tokensPerCoreSecond"] for value in values]
        median = statistics.median(speeds)
        ratio = median / NODE_TOKENS_PER_SECOND
        figures[title] = {"tokensPerCoreSecond": speeds, "ratio": ratio, "values": values}
        shown = (f"{speed:,.0f}" for speed in (median, min(speeds), max(speeds)))
        table.add_row(title, *shown, f"{ratio:.1f}", "met" if ratio >= GOAL else "missed")
    Console().print(table)
    document = {"nodeTokensPerSecond": NODE_TOKENS_PER_SECOND, "goalRatio": GOAL, **size, "figures": figures}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
