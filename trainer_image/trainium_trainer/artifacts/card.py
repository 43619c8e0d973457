"""The model card (`README.md`) of an artifact: its sources, training and results.

Guarantees:
- Unknown facts are left out; they are no error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_contract.trainer.tuning import TuningConfig, TuningMethod
from trainium_trainer.artifacts.manifest import CARD_NAME
from trainium_trainer.artifacts.store import ArtifactStore
from trainium_trainer.monitor.json_lines import read_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


_BEGIN, _END = "<!-- evaluation -->", "<!-- end of evaluation -->"
_MAX_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The facts on a model card."""

    kind: ArtifactKind
    step: int
    tokens: int
    """The number of valid tokens trained on."""
    settings: Mapping[str, Any]
    """The fixed settings in the checkpoint."""
    tuning: TuningConfig
    base: str | None
    """The location of the base."""
    precision: str
    history: tuple[dict[str, Any], ...] = ()
    """The lines of metrics.jsonl."""
    added_rows: int = 0
    """The number of rows of the vocabulary that the base lacks."""

    def to_markdown(self) -> str:
        """Return the text with the metadata header for model hubs."""
        lora = self.tuning.method is TuningMethod.LORA
        head: dict[str, Any] = {"library_name": "peft" if self.kind is ArtifactKind.ADAPTER else "transformers"}
        if self.base:
            head["base_model"] = self.base
        head |= {"pipeline_tag": "text-generation"}
        what = "LoRA adapter" if self.kind is ArtifactKind.ADAPTER else "Model"
        origin = f"tuned from `{self.base}`" if self.base else "trained"
        merged = ", the adapter merged in float32" if lora and self.kind is ArtifactKind.MODEL else ""
        lines = [
            "---",
            *(f"{name}: {json.dumps(value)}" for name, value in head.items()),
            "---",
            "",
            f"# {what} of step {self.step}",
            "",
            f"{origin[0].upper()}{origin[1:]} by trainium-trainer{merged}.",
            "",
            *_format_table(("setting", "value"), self._format_settings()),
            *self._format_losses(),
            *self._format_usage(),
            _BEGIN,
            _END,
            "",
        ]
        return "\n".join(lines)

    def _format_settings(self) -> list[tuple[str, str]]:
        lora = self.tuning.lora
        rows = [("steps", f"{self.step:,}"), ("tokens trained on", f"{self.tokens:,}"), ("weights", self.precision)]
        if self.tuning.method is TuningMethod.LORA:
            rows += [
                (
                    "DoRA" if lora.dora else "LoRA",
                    f"rank {lora.rank}, alpha {lora.alpha:g}{', rank-stabilised' if lora.rank_stabilized else ''}",
                ),
                *((f"rank of {pattern}", str(rank)) for pattern, rank in lora.rank_pattern.items()),
                *((f"alpha of {pattern}", f"{alpha:g}") for pattern, alpha in lora.alpha_pattern.items()),
                ("LoRA targets", ", ".join(lora.targets)),
                ("LoRA dropout", f"{lora.dropout:g}"),
            ]
        if self.tuning.objective is not None:
            rows.append(("objective", f"{self.tuning.objective.kind}, beta {self.tuning.objective.beta:g}"))
        if self.tuning.trainable is not None:
            rows.append(("trained weights", ", ".join(self.tuning.trainable)))
        names = {
            "globalBatch": "samples of a step",
            "sequenceLength": "tokens of a sample",
            "seed": "seed",
            "data": "digest of the data",
            "weights": "digest of the base",
        }
        return rows + [(text, str(self.settings[name])) for name, text in names.items() if name in self.settings]

    def _format_losses(self) -> list[str]:
        """Return the losses of some steps from first to last, the time in steps, and the validation loss."""
        measured = [line for line in self.history if line.get("loss") is not None and line["step"] <= self.step]
        if not measured:
            return []
        indices = sorted({round(at * (len(measured) - 1) / (_MAX_ROWS - 1)) for at in range(_MAX_ROWS)})
        rows = [(f"{measured[index]['step']:,}", f"{measured[index]['loss']:.4f}") for index in indices]
        lines = ["## Losses", "", *_format_table(("step", "loss"), rows)]
        validation = [line for line in measured if line.get("validationLoss") is not None]
        if validation:
            newest = validation[-1]
            lines += [f"Loss on held-back data after step {newest['step']:,}: {newest['validationLoss']:.4f}.", ""]
        if (share := measured[-1].get("timeInSteps")) is not None:
            lines += [f"Time in steps of this history, of all time since the first step: {100 * share:.1f} %.", ""]
        return lines

    def _format_usage(self) -> list[str]:
        if self.kind is ArtifactKind.ADAPTER:
            base = self.base or "BASE"
            resize = (
                f"\nbase.resize_token_embeddings(base.config.vocab_size + {self.added_rows})" if self.added_rows else ""
            )
            code = (
                "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
                f"base = AutoModelForCausalLM.from_pretrained({base!r}){resize}\n"
                'model = PeftModel.from_pretrained(base, "this folder")'
            )
        else:
            code = (
                "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
                'model = AutoModelForCausalLM.from_pretrained("this folder")\n'
                'tokenizer = AutoTokenizer.from_pretrained("this folder")'
            )
        return ["## Use", "", "```python", code, "```", ""]


def read_lines(file: Path) -> tuple[dict[str, Any], ...]:
    """Read the complete lines of a metrics.jsonl; empty without the file."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return ()
    return tuple(json.loads(line) for line in lines if read_step(line) is not None)


def add_evaluation(location: str, markdown: str) -> None:
    """Write the result of an evaluation into the card of the artifact at `location`, replacing an earlier one.

    A missing or foreign card is left alone. Raises StorageError.
    """
    store = ArtifactStore(location)
    data = store.read(CARD_NAME)
    text = "" if data is None else data.decode(errors="replace")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        return
    new = f"{before}{_BEGIN}\n\n## Evaluation\n\n{markdown.strip()}\n\n{_END}{after}"
    if new != text:
        store.write(CARD_NAME, new.encode())


def _format_table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return [*lines, *(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows), ""]
