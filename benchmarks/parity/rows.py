"""Read the comparisons from rows.yaml: settings, each with a reference run, and layouts.

To compare another layout, add it there; no code lists the rows. Pretraining starts from random weights, the others from
a model that `transformers` trained briefly or, for families, created.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TOLERANCE = 1e-4
"""Allowed relative difference of the losses of a step, in float32."""
LOGITS_TOLERANCE = 1e-3
"""Allowed difference of logits, in units of their standard deviation."""
ADAPTER_TOLERANCE = 1e-4
"""Allowed difference of a trained parameter."""
MERGED_TOLERANCE = 1e-5
"""Allowed difference of the logits of an adapter merged here and by peft."""
FAMILY_STEPS = 100
_TEMPLATE = "data.examples.chat.template"

_DOCUMENT: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())
BASE: dict[str, Any] = _DOCUMENT["base"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a training run."""

    name: str
    description: str
    overrides: dict[str, Any] = field(default_factory=dict)
    base: Settings | None = None
    """Settings whose model is the base of a fine-tuning run."""
    records: str = ""
    """Function of `inputs` that creates the examples of a fine-tuning run; empty for text."""
    family: dict[str, Any] = field(default_factory=dict)
    """Fields of `transformers`' configuration of a base with random weights, instead of a briefly trained one."""
    max_steps: int | None = None
    """Steps of a run, if fewer than those of the other settings are enough."""

    @property
    def slug(self) -> str:
        """Name of the settings in files and on the command line."""
        return self.name.lower().replace(" ", "-").replace(",", "")


def write_config(settings: Settings, out: Path, steps: int, base: Path | None = None, data: Path | None = None) -> Path:
    """Write the YAML file of these settings, for runs that start from the model in `base` and read `data`."""
    content: dict[str, Any] = json.loads(json.dumps(BASE))
    content["steps"] = steps
    content["data"]["cacheDirectory"] = str(out / "cache")
    for path, value in settings.overrides.items():
        node = content
        *parents, last = path.split(".")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    if base is not None:
        content["model"] = {"weights": str(base)}
        del content["data"]["tokenizer"]  # the base has one
        content["artifacts"] = {"precision": "Float32"}
    if data is not None:
        content["data"]["source"] = str(data)
    file = out / f"{settings.slug}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content))
    return file


@dataclass(frozen=True, slots=True)
class Row:
    """A run of the trainer."""

    settings: Settings
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    accumulation: int = 1
    """Micro-batches of a step; some have empty rows if data_parallel x accumulation does not divide the batch."""
    overrides: tuple[str, ...] = ()
    """Additional `--set` options."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def name(self) -> str:
        """Name of the row in files and on the command line."""
        parts = [f"dp{self.data_parallel}", f"tp{self.tensor_parallel}", f"pp{self.pipeline_parallel}"]
        parts += [f"cp{self.context_parallel}"] if self.context_parallel > 1 else []
        parts += [f"accumulation{self.accumulation}"] if self.accumulation > 1 else []
        parts += [override.rpartition(".")[2].replace("=", "-").lower() for override in self.overrides]
        return "-".join([self.settings.slug, *parts])

    @property
    def set_options(self) -> list[str]:
        """Return the `--set` options of the row."""
        micro_size = -(-BASE["batch"]["globalSize"] // (self.data_parallel * self.accumulation))
        degrees = [f"parallelism.tensor={self.tensor_parallel}", f"parallelism.pipeline={self.pipeline_parallel}"]
        degrees += [f"parallelism.context={self.context_parallel}"] if self.context_parallel > 1 else []
        return [f"batch.microSize={micro_size}", *degrees, *self.overrides]


def _read_groups() -> dict[str, tuple[Row, ...]]:
    """Return the rows of each group."""
    families = _DOCUMENT["families"]
    settings: dict[str, Settings] = {}
    groups: dict[str, list[Row]] = {}
    for group in ("pretraining", "tuning", "preferences"):
        rows = groups.setdefault(group, [])
        for entry in _DOCUMENT[group]:
            layouts, base = entry.pop("layouts"), entry.pop("base", None)
            template = entry.get("overrides", {}).get(_TEMPLATE)
            if template is not None:
                entry["overrides"][_TEMPLATE] = str(Path(__file__).with_name(template))
            kind = settings[entry["name"]] = Settings(**entry, base=settings[base] if base else None)
            rows += [_build_row(kind, layout) for layout in layouts]
    bases = {
        model["name"]: Settings(f"{model['name']} base", "", family=families["common"] | model["fields"])
        for model in families["models"]
    }
    groups["families"] = [
        _build_row(
            Settings(
                f"{model['name']}, {tuning['name']}",
                f"{model['description']}; {tuning['description']}",
                tuning.get("overrides", {}),
                bases[model["name"]],
                max_steps=FAMILY_STEPS,
            ),
            layout,
        )
        for tuning in families["tunings"]
        for model in families["models"]
        for layout in families["layouts"]
    ]
    return {name: tuple(rows) for name, rows in groups.items()}


def _build_row(settings: Settings, layout: dict[str, Any]) -> Row:
    degrees = {f"{name}_parallel": layout[name] for name in ("data", "tensor", "pipeline", "context") if name in layout}
    return Row(settings, **degrees, accumulation=layout.get("accumulation", 1), overrides=tuple(layout.get("set", ())))


def _list_settings(rows: tuple[Row, ...]) -> tuple[Settings, ...]:
    """Return the settings of rows, each once."""
    return tuple({row.settings.name: row.settings for row in rows}.values())


GROUPS = _read_groups()
"""Rows of pretraining, tuning, preferences and families."""
SETTINGS = {group: _list_settings(rows) for group, rows in GROUPS.items()}
