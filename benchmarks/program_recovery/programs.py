"""Read the programs of others that go through all faults from programs.yaml, and start them as TrainingJobs."""

from __future__ import annotations

import json
import re
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.program_recovery.launchers import RECORDER, TrainingJobLauncher
from trainium_devcluster.demos.frame import DemoJob
from trainium_devcluster.demos.session import NAMESPACE

if TYPE_CHECKING:
    from trainium_devcluster.program import ProgramDemo

_LOOPS = Path(__file__).with_name("loops.py")
_PAGE = Path(__file__).parents[2] / "docs/program-library.md"
FAULTS = ("killed rank", "lost node", "stopped rank", "killed operator", "resize to 1", "resize to 2")
_EPOCHS = 4
_ROWS = {"data": 1120, "answers": 1120, "pairs": 1120, "prompts": 280}
"""Rows of each data set that the programs read: 70 steps an epoch."""
_TITAN_VOCABULARY, _TITAN_SAMPLES = 2048, 1500
"""Tokens of torchtitan's small model, and samples that have one."""
_CHECKPOINTS = "checkpoint-{step}/trainer_state.json"
_SHELL = Path(__file__).with_name("count.sh").read_text()
"""Counts steps and samples, and resumes at the newest one; it reports its steps by its output."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program and how its job differs from that of `make program`."""

    title: str
    arguments: tuple[str, ...]
    """Arguments of Python; `{folder}` stands for the folder of the run."""
    first_fault: int = 75
    """Step of the first fault, in the second epoch or later."""
    committed: str = _CHECKPOINTS
    keeps_batch: bool = True
    """Whether the job has `program.batch`."""
    resizes: bool = True


def _read_programs(file: Path) -> dict[str, Program]:
    document = yaml.safe_load(file.read_text())
    common = shlex.split(document["trainer"])
    return {name: _build_program(common, **entry) for name, entry in document["programs"].items()}


def _build_program(
    common: list[str],
    *,
    trl: str = "",
    data: str = "",
    model: str = "model",
    recorded: str = "",
    options: str = "",
    epochs: int = _EPOCHS,
    arguments: str = "",
    **fields: Any,
) -> Program:
    """Return a program from its entry in programs.yaml."""
    own = shlex.split(options)
    if trl:
        model_folder = ("--model_name_or_path", f"/checkpoints/{model}", "--dtype", "float32")
        own = [*model_folder, "--dataset_name", f"/checkpoints/short/{data}", *own]
        recorded = f"trl.scripts.{trl}"
    if not recorded:
        return Program(arguments=tuple(shlex.split(arguments)), **fields)
    run = ("--output_dir", "{folder}", "--num_train_epochs", str(epochs))
    return Program(arguments=(f"/src/{RECORDER.name}", "--elastic", recorded, *own, *run, *common), **fields)


PROGRAMS = _read_programs(Path(__file__).with_name("programs.yaml"))


class ProgramLauncher(TrainingJobLauncher):
    """Starts one of the programs as a TrainingJob with a warm spare."""

    def __init__(self, demo: ProgramDemo, name: str, program: Program) -> None:
        super().__init__(demo, name)
        self.program, self.title, self.first_fault = program, program.title, program.first_fault

    def start(self, size: int) -> None:
        """Start the program."""
        job = self.demo.create_manifest(self.name)
        job["spec"]["workers"]["replicas"] = size
        job["spec"]["recovery"] = {"hang": {"saveSeconds": 10, "stepFloorSeconds": 8}}
        pod, folder = job["spec"]["workers"]["template"]["spec"], f"/checkpoints/{self.name}"
        pod["volumes"] = [{"name": "source", "configMap": {"name": "programs"}}]
        variables = {"LEDGER": folder, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        pod["containers"][0]["env"] += [{"name": name, "value": value} for name, value in variables.items()]
        spec, program = job["spec"]["program"], self.program
        spec["command"] = ["python", *(argument.format(folder=folder) for argument in program.arguments)]
        spec["checkpoints"] = {"path": folder, "committed": program.committed}
        del spec["args"]
        if not program.arguments:
            spec["command"], spec["progress"] = (
                ["sh", "-c", _SHELL, "count", folder],
                {"pattern": r"step: (?P<step>\d+)"},
            )
        if not program.keeps_batch:
            del spec["batch"]
        if not program.resizes:
            spec["resize"] = "Never"
            del job["spec"]["workers"]["minReplicas"]
        self.folder.mkdir(exist_ok=True)
        self.run = DemoJob(self.demo.cluster, self.name, self.folder, self.demo.view, {})
        self.run.apply_manifest(job)

    def kill_rank(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the last rank."""
        if self.program.arguments:
            super().kill_rank(number)
        else:  # the agent has the record of its steps
            self.kill_process(self.find_pod(), number, match="count /checkpoints")


def read_loops() -> dict[str, str]:
    """Return the sources of the loops on the page of the library: `ddp`, `fsdp2`, `accelerate` and `lightning`."""
    page = _PAGE.read_text()
    blocks = [block.partition("```")[0] for block in page.split("```python\n")]
    loops = dict(zip(("ddp", "accelerate", "lightning"), (b for b in blocks if "PositionSampler(" in b), strict=True))
    changes = page.split("```diff\n")[1].partition("```")[0]
    loops["fsdp2"] = loops["ddp"]
    for removed, added in re.findall(r"((?:-.*\n)+)((?:\+.*\n)+)", changes):
        old, new = (re.sub("(?m)^[-+]", "", lines) for lines in (removed, added))
        if old not in loops["ddp"]:
            raise ValueError(f"{_PAGE} changes lines that its DDP loop does not have: {old}")
        loops["fsdp2"] = loops["fsdp2"].replace(old, new)
    return loops


def install_programs(demo: ProgramDemo) -> None:
    """Create the ConfigMap with the programs, their data sets, and the small tokenizer of torchtitan's model."""
    files = {name: demo.out / f"{name}_loop.py" for name in ("ddp", "accelerate", "lightning", "fsdp2")}
    for name, loop in read_loops().items():
        source = re.sub(r'"/checkpoints/run(.*?)"', r'os.environ["LEDGER"] + "\1"', loop)
        source = source.replace("from my_project import", "from loops import")
        source = source.replace("BATCH, FOLDER = 2, 64", f"BATCH, FOLDER = {_EPOCHS}, 16")
        files[name].write_text("import os\n" + source)
    sources = [f"--from-file={path}" for path in (RECORDER, _LOOPS, *files.values())]
    demo.cluster.kubectl("create", "configmap", "programs", *sources, "-n", NAMESPACE)
    folder = demo.out / "checkpoints"
    (folder / "titan/data").mkdir(parents=True)
    tokenizer = json.loads((folder / "model/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: token for word, token in vocabulary.items() if token < _TITAN_VOCABULARY}
    (folder / "titan/tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "titan/tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    for copy, name, rows in [("titan/data", "data", _TITAN_SAMPLES), *((f"short/{n}", n, r) for n, r in _ROWS.items())]:
        (folder / copy).mkdir(parents=True, exist_ok=True)
        lines = (folder / name / "train.jsonl").read_text().splitlines(keepends=True)
        (folder / copy / "train.jsonl").write_text("".join(lines[:rows]))
