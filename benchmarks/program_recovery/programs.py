"""The programs of others that go through all faults, and their jobs."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.program_recovery.launchers import RECORDER, TrainingJobLauncher
from trainium_devcluster.demos.frame import DemoJob
from trainium_devcluster.demos.session import NAMESPACE

if TYPE_CHECKING:
    from trainium_devcluster.program import ProgramDemo

_LOOPS = Path(__file__).with_name("loops.py")
_PAGE = Path(__file__).parents[2] / "docs/program-library.md"
FAULTS = ("killed rank", "lost node", "stopped rank", "killed operator", "resize to 1", "resize to 2")
_TRAINER = (
    "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2",
    "--learning_rate", "0.001", "--logging_steps", "1", "--save_steps", "10", "--save_total_limit", "2", "--use_cpu",
    "--bf16", "False", "--gradient_checkpointing", "False", "--disable_tqdm", "True", "--report_to", "none",
)  # fmt: skip
_EPOCHS = 4
_ROWS = {"data": 1120, "answers": 1120, "pairs": 1120, "prompts": 280}
"""Rows of each data set that the programs read: 70 steps an epoch."""
_TITAN_VOCABULARY, _TITAN_SAMPLES = 2048, 1500
"""Tokens of torchtitan's small model, and samples that have one."""
_CHECKPOINTS = "checkpoint-{step}/trainer_state.json"
_SHELL = """
folder=$1; step=$(ls $folder | sed -n 's/^done-//p' | sort -n | tail -n 1); step=${step:-0}; start=$(date +%s.%N)
file=$folder/samples-0-$start.jsonl
while [ $step -lt 420 ]; do
  sleep 0.4; step=$((step + 1)); echo "step: $step"
  [ $RANK = 0 ] || continue
  where="\\"start\\": $start, \\"time\\": $(date +%s.%N)"
  echo "{$where, \\"step\\": $step, \\"samples\\": [$step], \\"loss\\": 1, \\"ranks\\": 1}" >>$file
  touch $folder/done-$step
done
[ $RANK != 0 ] || echo "{\\"trainingEnded\\": true}" >>$file
"""


@dataclass(frozen=True, slots=True)
class Program:
    """A program and how its job differs from that of `make program`."""

    title: str
    arguments: tuple[str, ...]
    """Of Python; `{folder}` stands for the folder of the run."""
    first_fault: int = 75
    """Step of the first fault, in the second epoch or later."""
    committed: str = _CHECKPOINTS
    keeps_batch: bool = True
    """Whether the job has `program.batch`."""
    resizes: bool = True


def _call_trl(script: str, data: str, *options: str, model: str = "model", epochs: int = _EPOCHS) -> tuple[str, ...]:
    data_set = ("--dataset_name", f"/checkpoints/short/{data}")
    model_folder = ("--model_name_or_path", f"/checkpoints/{model}", "--dtype", "float32")
    return _call_recorded(f"trl.scripts.{script}", *model_folder, *data_set, *options, epochs=epochs)


def _call_recorded(program: str, *options: str, epochs: int = _EPOCHS) -> tuple[str, ...]:
    run = ("--output_dir", "{folder}", "--num_train_epochs", str(epochs))
    return (f"/src/{RECORDER.name}", "--elastic", program, *options, *run, *_TRAINER)


_PACKING = (
    "--packing", "--max_length", "128", "--use_peft", "--lora_dropout", "0", "--lora_target_modules", "q_proj",
    "v_proj",
)  # fmt: skip
_FSDP = ("--fsdp", "full_shard", "--fsdp_config", '{{"fsdp_version": 2}}')
_GRPO = (
    "--reward_funcs", "loops.reward_variety", "--num_generations", "4", "--max_completion_length", "8", "--beta", "0",
)  # fmt: skip
_TORCHTITAN = (
    "--module", "llama3", "--config", "llama3_debugmodel", "--hf_assets_path", "/checkpoints/titan",
    "--dataloader.dataset_path", "/checkpoints/titan/data", "--training.seq_len", "64", "--debug.seed", "1",
    "--training.local_batch_size", "1", "--training.steps", "100", "--dump_folder", "{folder}", "--checkpoint.enable",
    "--checkpoint.interval", "10", "--training.disable_cuda_graphs", "--validator.freq", "1000",
    "--parallelism.spmd_backend", "partial_dtensor",
)  # fmt: skip
_LOOP: dict[str, Any] = {"committed": "step-{step}/.metadata", "keeps_batch": False}
PROGRAMS = {
    "sft": Program("TRL, `sft.py`", _call_trl("sft", "data")),
    "packing": Program("TRL, `sft.py`, packing and LoRA", _call_trl("sft", "data", *_PACKING, epochs=2 * _EPOCHS)),
    "fsdp": Program("TRL, `sft.py`, FSDP2", _call_trl("sft", "data", *_FSDP)),
    "dpo": Program("TRL, `dpo.py`", _call_trl("dpo", "answers")),
    "reward": Program("TRL, `reward.py`", _call_trl("reward", "pairs", model="classifier", epochs=6)),
    "grpo": Program("TRL, `grpo.py`", _call_trl("grpo", "prompts", *_GRPO)),
    "trainer": Program("`Trainer` of transformers", _call_recorded(_LOOPS.name, "plain")),
    "accelerate": Program("loop with accelerate", ("/src/accelerate_loop.py",), **_LOOP),
    "ddp": Program("loop with DDP", ("/src/ddp_loop.py",), **_LOOP),
    "fsdp2": Program("loop with FSDP2", ("/src/fsdp2_loop.py",), **_LOOP),
    "lightning": Program("Lightning", ("/src/lightning_loop.py",), committed="last.ckpt", keeps_batch=False),
    "torchtitan": Program(
        "torchtitan, FSDP2",
        (f"/src/{_LOOPS.name}", "torchtitan", *_TORCHTITAN),
        first_fault=10,
        committed="checkpoint/step-{step}/.metadata",
        keeps_batch=False,
        resizes=False,
    ),
    "shell": Program("shell script", (), first_fault=20, committed="done-{step}", keeps_batch=False),
}


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
