"""`python -m benchmarks.parity`: run the references and all rows, write JSON, docs/parity.md and its picture.

Ends with 1 when a row fails, and says which. Takes about 20 s per row on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from benchmarks.parity import document, reference
from benchmarks.parity.ours import RunFailedError, export_newest, run_trainer
from benchmarks.parity.rows import BASE, LOGITS_TOLERANCE, ROWS, SETTINGS, TOLERANCE, Row, Settings

from trainium_trainer import config as configuration

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Measure what was asked for and write the documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=BASE["steps"], help="steps of every run (default %(default)s)")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "out/parity", help="folder of runs and JSON")
    parser.add_argument("--no-document", action="store_true", help="leave docs/ alone")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    rows = [row for row in ROWS if options.rows in row.name]
    if not rows:
        _say(f"No row has {options.rows!r} in its name; there are {', '.join(row.name for row in ROWS)}.")
        return 64
    shutil.rmtree(options.out / "runs", ignore_errors=True)
    references, results = {}, []
    for settings in SETTINGS:
        mine = [row for row in rows if row.settings is settings]
        if not mine:
            continue
        file = _write_config(settings, options.out, options.steps)
        config = configuration.load(file)
        began = time.monotonic()
        against = reference.train_reference(config)
        references[settings.name] = against.losses
        _say(f"reference {settings.name}: loss {against.losses[-1]:.4f}, {time.monotonic() - began:.0f} s")
        results += [_judge(row, file, against, options.out) for row in mine]
    report: dict[str, Any] = {
        "benchmark": "parity",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "steps": options.steps,
        "tolerance": TOLERANCE,
        "logitsTolerance": LOGITS_TOLERANCE,
        "settings": {settings.name: settings.about for settings in SETTINGS},
        "references": references,
        "rows": results,
    }
    (options.out / "parity.json").write_text(json.dumps(report, indent=1) + "\n")
    if not options.no_document:
        document.write(report, ROOT / "docs/parity.md", ROOT / "docs/images/parity.png")
    failed = [row["name"] for row in results if not row["passed"]]
    _say(
        f"{len(results) - len(failed)} of {len(results)} rows passed" + (f"; not {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def _write_config(settings: Settings, out: Path, steps: int) -> Path:
    """The YAML file of all runs of these settings."""
    content: dict[str, Any] = json.loads(json.dumps(BASE))
    content["steps"] = steps
    content["data"]["cacheDirectory"] = str(out / "cache")
    for path, value in settings.overrides.items():
        node = content
        *parents, last = path.split(".")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    file = out / f"{settings.name.lower().replace(' ', '-')}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content))
    return file


def _judge(row: Row, file: Path, against: reference.Reference, out: Path) -> dict[str, Any]:
    """Run one row and compare its curve and its exported model."""
    began = time.monotonic()
    result: dict[str, Any] = {
        "name": row.name,
        "settings": row.settings.name,
        "data": row.data,
        "tensor": row.tensor,
        "pipeline": row.pipeline,
        "accumulation": row.accumulation,
        "overrides": list(row.overrides),
    }
    folder = out / "runs" / row.name
    try:
        losses = run_trainer(file, row.set_options, ranks=row.ranks, folder=folder)
    except RunFailedError as error:
        _say(f"{row.name}: {error}")
        return result | {"passed": False, "problem": str(error)}
    differences = [abs(own - other) / other for own, other in zip(losses, against.losses, strict=True)]
    config = configuration.load(file)
    exported, model = export_newest(folder, reference.shape_of(config))
    tokens, _ = next(reference.batches(config))
    with torch.no_grad():
        own = model(tokens)
        trained = against.model(tokens).logits
    theirs = reference.exported_logits(exported, tokens)
    spread = float(theirs.std())
    result |= {
        "losses": losses,
        "loss": losses[-1],
        "greatestDifference": max(differences),
        "step": differences.index(max(differences)) + 1,
        "exportedLogits": float((own - theirs).abs().max()) / spread,
        "trainedLogits": float((trained - theirs).abs().max()) / spread,
        "seconds": round(time.monotonic() - began, 1),
    }
    result["passed"] = max(differences) <= TOLERANCE and result["exportedLogits"] <= LOGITS_TOLERANCE
    shutil.rmtree(folder)
    _say(
        f"{row.name}: loss {losses[-1]:.4f}, greatest difference {max(differences):.1e} at step {result['step']}, "
        f"exported logits {result['exportedLogits']:.1e}, {'passed' if result['passed'] else 'FAILED'}"
    )
    return result


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
