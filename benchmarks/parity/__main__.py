"""Run the references and all rows; write JSON, docs/parity.md and its picture (`python -m benchmarks.parity`).

Exits with 1 if a row fails, and prints it. A row takes about 20 s on one core. Rows that are not run again keep their
results in benchmarks/parity/results.json, if the steps and the versions of the peers are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import peft
import torch
import transformers

from benchmarks.harness.conditions import ROOT, read_versions
from benchmarks.harness.ranks import RunFailedError
from benchmarks.parity import document, inputs, preferences, reference, tuned
from benchmarks.parity.rows import (
    ADAPTER_TOLERANCE,
    BASE,
    FAMILY_STEPS,
    GROUPS,
    LOGITS_TOLERANCE,
    MERGED_TOLERANCE,
    SETTINGS,
    TOLERANCE,
    Row,
    Settings,
    write_config,
)
from benchmarks.parity.trainer_runs import compare_curves, export_newest, run_trainer
from trainium_trainer.configuration import config as configuration

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.trainer.config import TrainingConfig

RESULTS = Path(__file__).with_name("results.json")
_REPORT_GROUPS = {
    "settings": "pretraining",
    "tunings": "tuning",
    "preferences": "preferences",
    "families": "families",
}
"""Groups of rows by their key in the report."""
ResultT = TypeVar("ResultT", reference.Reference, tuned.TuningResult)


def main() -> int:
    """Run the requested rows and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=BASE["steps"], help="steps of every run (default %(default)s)")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "out/parity", help="folder of runs")
    peer = os.environ.get("PEER_PYTHON", sys.executable)
    parser.add_argument("--peer-python", default=peer, help="the interpreter that has trl (PEER_PYTHON)")
    parser.add_argument("--no-document", action="store_true", help="write JSON to the folder of runs, and no page")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    all_rows = [row for group in GROUPS.values() for row in group]
    rows = [row for row in all_rows if options.rows in row.name]
    if not rows:
        _print(f"No row has {options.rows!r} in its name; there are {', '.join(row.name for row in all_rows)}.")
        return 64
    trl = read_versions(options.peer_python, "trl").get("trl")
    if trl is None and any(row.settings in SETTINGS["preferences"] for row in rows):
        _print(f"Preferences are not compared: trl is not installed beside {options.peer_python} (--peer-python).")
        rows = [row for row in rows if row.settings not in SETTINGS["preferences"]]
    for name in ("runs", "bases"):
        shutil.rmtree(options.out / name, ignore_errors=True)
    report = _read_initial_report(options)
    report["trl"] = trl or report.get("trl")
    for settings in (settings for group in SETTINGS.values() for settings in group):
        selected = [row for row in rows if row.settings == settings]
        if not selected:
            continue
        run = _run_pretraining if settings.base is None else _run_tuning
        comparison = run(settings, selected, options)
        if comparison.adapter_difference is not None:
            report["adaptersOfPeft"][settings.name] = comparison.adapter_difference
        results = {row["name"]: row for row in (*report["rows"], *comparison.rows)}
        report["rows"] = [results[row.name] for row in all_rows if row.name in results]
        find_results_file(options).write_text(_format_json(report))
    if not options.no_document:
        document.write_report(report, ROOT / "docs/parity.md", ROOT / "docs/images/parity.png")
    return _print_verdict(report, {row.name for row in rows})


def find_results_file(options: argparse.Namespace) -> Path:
    """Return the JSON file of the rows: that of the page, or one in the folder of runs."""
    folder: Path = options.out
    return folder / RESULTS.name if options.no_document else RESULTS


def _read_initial_report(options: argparse.Namespace) -> dict[str, Any]:
    """Return a report with the results of earlier runs of the same number of steps."""
    report: dict[str, Any] = {
        "benchmark": "parity",
        "versions": {"transformers": transformers.__version__, "peft": peft.__version__},
        "steps": options.steps,
        "tolerance": TOLERANCE,
        "logitsTolerance": LOGITS_TOLERANCE,
        "adapterTolerance": ADAPTER_TOLERANCE,
        "mergedTolerance": MERGED_TOLERANCE,
        **{
            name: {settings.name: settings.description for settings in SETTINGS[group]}
            for name, group in _REPORT_GROUPS.items()
        },
        "familySteps": min(options.steps, FAMILY_STEPS),
        "adaptersOfPeft": {},
        "rows": [],
    }
    file = find_results_file(options)
    previous = json.loads(file.read_text()) if file.exists() else {}
    if any(previous.get(name) != report[name] for name in ("steps", "versions")):
        return report
    return report | {name: previous[name] for name in ("adaptersOfPeft", "rows", "trl") if name in previous}


def _format_json(report: dict[str, Any]) -> str:
    """Return the report as JSON with one row a line."""
    rows = ",\n  ".join(json.dumps(row) for row in report["rows"])
    others = json.dumps({name: value for name, value in report.items() if name != "rows"}, indent=1)
    return others.removesuffix("\n}") + f',\n "rows": [\n  {rows}\n ]\n}}\n'


def _print_verdict(report: dict[str, Any], names: set[str]) -> int:
    """Print the failed rows; return 1 if there are any."""
    rows = [row for row in report["rows"] if row["name"] in names]
    failed = [row["name"] for row in rows if not row["passed"]] + sorted(names - {row["name"] for row in rows})
    settings = {row["settings"] for row in rows}
    failed += [
        f"peft's adapter of {name}"
        for name, difference in report["adaptersOfPeft"].items()
        if name in settings and difference > TOLERANCE
    ]
    passed = sum(row["passed"] for row in rows)
    _print(f"{passed} of {len(names)} rows passed" + (f"; not {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of the rows with the same settings."""

    rows: list[dict[str, Any]]
    adapter_difference: float | None = None
    """Relative difference of the first loss of a run that starts from peft's saved adapter."""


def _run_pretraining(settings: Settings, rows: list[Row], options: argparse.Namespace) -> Comparison:
    """Run a reference of pretraining and its rows."""
    file = write_config(settings, options.out, options.steps)
    expected = _run_reference(settings, reference.train_reference, configuration.load(file))
    results = [
        _run_row(row, options.out, lambda row, folder: _compare_row(row, file, expected, folder)) for row in rows
    ]
    return Comparison(results)


def _run_tuning(settings: Settings, rows: list[Row], options: argparse.Namespace) -> Comparison:
    """Run a reference of fine-tuning and its rows."""
    assert settings.base is not None
    base = inputs.create_base(settings.base, options.out)
    records = None
    if settings.records:
        records = getattr(inputs, f"write_{settings.records}")(options.out / f"{settings.records}.jsonl")
    steps = min(options.steps, settings.max_steps or options.steps)
    file = write_config(settings, options.out, steps, base, records)
    folder = options.out / "runs" / settings.slug

    def train(config: TrainingConfig) -> tuned.TuningResult:
        if settings in SETTINGS["preferences"]:
            return preferences.run_preferences(config, folder, options.peer_python)
        return tuned.run_reference(config, folder)

    expected = _run_reference(settings, train, configuration.load(file))
    results = [
        _run_row(row, options.out, lambda row, folder: tuned.compare_row(row, file, expected, folder)) for row in rows
    ]
    difference = None
    if expected.adapter is not None:
        difference = tuned.compute_first_loss_difference(file, expected, folder / "from-adapter")
        _print(f"{settings.name}: first loss with peft's adapter differs by {difference:.1e}")
    shutil.rmtree(folder)
    return Comparison(results, difference)


def _run_reference(settings: Settings, train: Callable[[TrainingConfig], ResultT], config: TrainingConfig) -> ResultT:
    """Run a reference and print a line."""
    started_at = time.monotonic()
    expected = train(config)
    _print(f"reference {settings.name}: loss {expected.losses[-1]:.4f}, {time.monotonic() - started_at:.0f} s")
    return expected


def _run_row(row: Row, out: Path, compare_row: Callable[[Row, Path], dict[str, Any]]) -> dict[str, Any]:
    """Run a row in a temporary folder and print a line."""
    result: dict[str, Any] = {
        "name": row.name,
        "settings": row.settings.name,
        "data": row.data_parallel,
        "tensor": row.tensor_parallel,
        "pipeline": row.pipeline_parallel,
        "context": row.context_parallel,
        "accumulation": row.accumulation,
        "overrides": list(row.overrides),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }
    folder = out / "runs" / row.name
    try:
        result |= compare_row(row, folder)
    except RunFailedError as error:
        _print(f"{row.name}: {error}")
        return result | {"passed": False, "problem": str(error)}
    shutil.rmtree(folder)
    figures = ("exportedLogits", "trainedParameters", "mergedLogits", "trainedLogits")
    details = "".join(f", {name} {result[name]:.1e}" for name in figures if name in result)
    details += f", accuracy {result['accuracy']:.3f}" if "accuracy" in result else ""
    _print(
        f"{row.name}: loss {result['loss']:.4f}, greatest difference {result['greatestDifference']:.1e} at step "
        f"{result['step']}{details}, {'passed' if result['passed'] else 'FAILED'}, {result['seconds']:.0f} s"
    )
    return result


def _compare_row(row: Row, file: Path, expected: reference.Reference, folder: Path) -> dict[str, Any]:
    """Run a row of pretraining; compare its curve and its exported model. Raises RunFailedError."""
    started_at = time.monotonic()
    losses = run_trainer(file, row.set_options, ranks=row.ranks, folder=folder)
    config = configuration.load(file)
    exported, model = export_newest(folder, reference.build_shape(config))
    tokens, _ = next(reference.iterate_batches(config))
    with torch.no_grad():
        logits = model(tokens)
    exported_logits = reference.compute_logits(reference.load_model(exported), tokens)
    spread = float(exported_logits.std())
    result = compare_curves(losses, expected.losses) | {
        "exportedLogits": float((logits - exported_logits).abs().max()) / spread,
        "trainedLogits": float((reference.compute_logits(expected.model, tokens) - exported_logits).abs().max())
        / spread,
        "seconds": round(time.monotonic() - started_at, 1),
    }
    result["passed"] = result["greatestDifference"] <= TOLERANCE and result["exportedLogits"] <= LOGITS_TOLERANCE
    return result


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
