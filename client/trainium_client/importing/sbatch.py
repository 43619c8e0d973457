"""Read scripts: those of Slurm with `#SBATCH` lines and `srun torchrun ...`, and plain ones with a line of torchrun.

Options as in the manual pages of sbatch and srun of Slurm 24; `--container-image` and `--container-mounts` are those of
the plugin pyxis. Slurm runs the script on the first node alone, so its other commands are listed and not imported.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainium_client.importing.pod import RANK_VARIABLES
from trainium_client.importing.shell import OptionParser, parse_words, quote, read_assignments, split_statements
from trainium_client.importing.source_job import Note, PodParts, Program, SourceJob
from trainium_client.importing.torchrun import LAUNCHERS, read_launcher, read_script
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from trainium_client.importing.shell import Statement, Word

_VALUES = {
    "job-name": "-J", "nodes": "-N", "ntasks": "-n", "cpus-per-task": "-c", "gpus": "-G", "time": "-t", "output": "-o",
    "error": "-e", "partition": "-p", "account": "-A", "qos": "-q", "chdir": "-D", "array": "-a", "dependency": "-d",
    "constraint": "-C", "nodelist": "-w", "exclude": "-x", "licenses": "-L", "begin": "-b", "ntasks-per-node": "",
    "gpus-per-node": "", "gpus-per-task": "", "gres": "", "signal": "", "mem": "", "mem-per-cpu": "", "mem-per-gpu": "",
    "mail-type": "", "mail-user": "", "export": "", "reservation": "", "container-image": "", "container-mounts": "",
    "container-name": "", "container-workdir": "", "cpu-bind": "", "gpu-bind": "", "mpi": "", "kill-on-bad-exit": "-K",
    "comment": "", "switches": "", "distribution": "-m", "wait": "-W", "open-mode": "", "input": "-i",
    "ntasks-per-gpu": "", "network": "", "hint": "", "nice": "", "priority": "", "time-min": "", "tasks-per-node": "",
}  # fmt: skip
_FLAGS = {
    "requeue": "", "no-requeue": "", "exclusive": "", "label": "-l", "unbuffered": "-u", "overlap": "", "verbose": "-v",
    "container-writable": "", "no-container-mount-home": "", "container-mount-home": "", "exact": "", "parsable": "",
}  # fmt: skip
_SENTENCES = {
    "array": "one TrainingJob is printed; create one for each index, because SLURM_ARRAY_TASK_ID is not set",
    "dependency": "a TrainingJob does not wait for another one",
    "output": "the output is in the pods' logs: kubectl trn logs",
    "error": "the output is in the pods' logs: kubectl trn logs",
    "partition": "the instance type and scheduling.queueName choose nodes",
    "account": "scheduling.queueName is the queue of a team (Kueue)",
    "qos": "scheduling.priorityClassName is the priority",
    "requeue": "the operator always resumes from the newest checkpoint of the program",
    "no-requeue": "the operator resumes after faults of nodes; recovery.budgets limits the failures",
    "exclusive": "a worker has a node to itself where it takes all of its devices",
    "constraint": "use workers.template.spec.nodeSelector",
    "nodelist": "use workers.template.spec.nodeSelector",
    "exclude": "bad nodes are put into quarantine by themselves (kubectl trn nodes)",
    "mail-type": "use alerts on the operator's metrics",
    "mail-user": "use alerts on the operator's metrics",
    "container-mounts": "mount volumes in workers.template",
}
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_MEMORY_UNITS = {"": "Mi", "K": "Ki", "M": "Mi", "G": "Gi", "T": "Ti"}
_RANK_SCRIPT = re.compile(r"SLURM_(?:PROCID|LOCALID|NODEID|NTASKS|NNODES|JOB_NUM_NODES)")


@dataclass(frozen=True, slots=True)
class _Found:
    """The statement of a script that starts training."""

    words: Sequence[Word]
    """Its words after srun and its options."""
    srun: argparse.Namespace | None
    launched: Program | None
    """The program after a launcher; None without one."""


def _build_parser() -> argparse.ArgumentParser:
    parser = OptionParser("an option of sbatch or srun")
    for name, short in _VALUES.items():
        parser.add_argument(*([short] if short else []), f"--{name}")
    for name, short in _FLAGS.items():
        parser.add_argument(*([short] if short else []), f"--{name}", nargs="?", const=True)
    return parser


def is_script(text: str) -> bool:
    """Return whether a text is a script or a command rather than YAML."""
    if text.lstrip().startswith("#!") or re.search(r"(?m)^#SBATCH\s", text):
        return True
    if re.search(r"(?m)^[\s{\"']*(?:apiVersion|kind)[\"']?\s*:", text):
        return False
    return bool(
        re.search(r"(?m)^\s*(?:\w+=\S*\s+)*(?:srun|torchrun|python[\d.]*\s+-m\s+torch\.distributed\.\w+)\s", text)
    )


def read_script_file(script: str, name: str) -> SourceJob:
    """Return the job of a script or a command line. Raises ClientError if nothing in it starts torchrun or srun."""
    lines = re.findall(r"(?m)^#SBATCH\s+(.*)$", script)
    try:
        options, unknown = _build_parser().parse_known_args(
            [word for line in lines for word in shlex.split(re.sub(r"\s#.*", "", line))]
        )
    except ValueError as error:
        raise ClientError(f"a line of #SBATCH cannot be read: {error}") from None
    notes = [Note(f"#SBATCH {option}: this option is not known to the import") for option in unknown]
    variables: dict[str, list[str]] = {}
    exported: dict[str, str] = {}
    training, ignored = _find_training(script, variables, exported)
    notes += ignored
    if training.srun is not None:
        for key, value in vars(training.srun).items():
            if value is not None:
                setattr(options, key, value)
    tasks = _parse_whole_number(options.ntasks_per_node or options.tasks_per_node)
    program = training.launched or _build_plain_program(training.words)
    notes += _explain(options)
    if not program.launched and _RANK_SCRIPT.search(script):
        notes.append(
            Note(
                "the program may read variables of Slurm: the agents set those of torchrun instead",
                "spec.program.command",
            )
        )
    least, nodes = _read_nodes(options, program, tasks)
    if not program.launched and tasks:
        program = replace(program, processes=tasks)
    return SourceJob(
        kind="sbatch script" if lines else "command of torchrun",
        name=options.job_name or name,
        nodes=nodes,
        min_nodes=least,
        max_nodes=nodes if least else None,
        program=program,
        pod=_build_pod(options, exported, tasks or 1),
        settings={
            "activeDeadlineSeconds": _read_time(options.time),
            "recovery.gracePeriodSeconds": _read_signal(options.signal),
        },
        notes=tuple(notes),
    )


def _find_training(script: str, variables: dict[str, list[str]], exported: dict[str, str]) -> tuple[_Found, list[Note]]:
    """Return the statement that trains; set the variables that the script assigns before, and note the others."""
    training: _Found | None = None
    ignored: list[Note] = []
    for statement in split_statements(script):
        text = script[statement.start : statement.end]
        assigned = read_assignments(script, statement, variables)
        if assigned is not None:
            variables.update(assigned)
            if text.startswith(("export", "declare -x")):
                exported.update({key: values[0] for key, values in assigned.items() if len(values) == 1})
            if not assigned:
                ignored.append(_ignore(statement, text))
            continue
        candidate = _read_statement(script, statement, variables) if training is None else None
        if candidate is not None:
            training = candidate
        elif not text.startswith(("set ", "echo ", "date", "wait", "hostname", "module list")):
            ignored.append(_ignore(statement, text))
    if training is None:
        raise ClientError("nothing in the script starts torchrun or srun: give a script or a command that does")
    return training, ignored


def _ignore(statement: Statement, text: str) -> Note:
    first = text.splitlines()[0]
    # A value may be a secret, so an assignment is named only.
    shown = first.split("=", 1)[0] + "=..." if re.match(r"(export\s+)?\w+=", first) else first[:60]
    return Note(
        f"line {statement.line}, `{shown}`: Slurm ran it on the first node; the image and the agents replace it"
    )


def _read_statement(script: str, statement: Statement, variables: dict[str, list[str]]) -> _Found | None:
    words = parse_words(script, statement, variables)
    texts = [word.text for word in words]
    srun = None
    if texts[0] == "srun":
        split = _find_command(texts)
        srun, _ = _build_parser().parse_known_args(texts[1:split])
        words = words[split:]
        if not words or not _is_training([word.text for word in words]):
            return None
    environment = {name: values[0] for name, values in variables.items() if len(values) == 1}
    texts = [word.text for word in words]
    if len(texts) > 2 and texts[0].rsplit("/", 1)[-1] in ("bash", "sh") and re.fullmatch(r"-\w*c", texts[1]):
        return _Found(words, srun, read_script(texts[:2], texts[2], [], environment))
    program = read_launcher(words, environment)
    return _Found(words, srun, program) if program is not None or srun is not None else None


def _find_command(texts: Sequence[str]) -> int:
    """Return the index of the first word after srun's options."""
    index = 1
    while index < len(texts) and texts[index].startswith("-"):
        takes_value = "=" not in texts[index] and (
            texts[index].lstrip("-") in _VALUES or texts[index] in _VALUES.values()
        )
        index += 2 if takes_value else 1
    return index


def _is_training(texts: Sequence[str]) -> bool:
    """Return whether the command of an srun trains, and does not only ask for a name or copy files."""
    joined = " ".join(texts)
    return any(name in joined for name in (*LAUNCHERS, "torch.distributed", "python", ".sh", "accelerate", "deepspeed"))


def _build_plain_program(words: Sequence[Word]) -> Program:
    """Return the program that srun starts once for each task."""
    if all(word.is_literal and not word.is_operator for word in words):
        return Program(tuple(word.text for word in words[:2]), tuple(word.text for word in words[2:]))
    text = " ".join(["exec", *(word.text if word.is_operator else quote(word.text) for word in words)])
    return Program(("bash", "-c"), (text,))


def _explain(options: argparse.Namespace) -> list[Note]:
    """Return a note for each option without a counterpart."""
    handled = {
        "job_name", "nodes", "ntasks", "ntasks_per_node", "tasks_per_node", "cpus_per_task", "gpus", "gpus_per_node",
        "gpus_per_task", "gres", "time", "signal", "mem", "chdir", "container_image", "container_workdir",
    }  # fmt: skip
    notes = []
    for key, value in vars(options).items():
        name = key.replace("_", "-")
        if value is not None and key not in handled:
            notes.append(Note(f"--{name}: {_SENTENCES.get(name, 'it has no counterpart')}"))
    return notes


def _read_nodes(options: argparse.Namespace, program: Program, tasks: int | None) -> tuple[int | None, int]:
    """Return the fewest nodes, if the job takes several sizes, and the nodes."""
    given = re.fullmatch(r"(\d+)(?:-(\d+))?", options.nodes or "")
    if given:
        least, most = int(given[1]), int(given[2] or given[1])
        return (least, most) if most > least else (None, least)
    total = _parse_whole_number(options.ntasks)
    if total:
        return None, max(1, total // (tasks or 1))
    return program.min_nodes, program.max_nodes or 1


def _build_pod(options: argparse.Namespace, exported: dict[str, str], tasks: int) -> PodParts:
    """Return what the workers keep: variables, memory, processors, image and folder."""
    requests: dict[str, str] = {}
    cpus, memory = (
        _parse_whole_number(options.cpus_per_task),
        re.fullmatch(r"(\d+)([KMGT]?)B?", options.mem or "", re.IGNORECASE),
    )
    if cpus:
        requests["cpu"] = str(cpus * tasks)
    if memory and int(memory[1]):
        requests["memory"] = f"{memory[1]}{_MEMORY_UNITS[memory[2].upper()]}"
    env = [{"name": name, "value": value} for name, value in exported.items() if not RANK_VARIABLES.fullmatch(name)]
    parts: dict[str, Any] = {"env": env, "resources": {"requests": requests} if requests else {}}
    container = {key: value for key, value in parts.items() if value}
    template = {"spec": {"containers": [{"name": "worker", **container}]}} if container else {}
    folder = options.container_workdir or options.chdir or ""
    notes = [
        Note(f"env {name}: the agents set the variables of ranks")
        for name in exported
        if RANK_VARIABLES.fullmatch(name)
    ]
    if folder and not folder.startswith("/"):
        notes.append(Note(f"--chdir {folder}: give program.workingDirectory as an absolute path of the image"))
        folder = ""
    return PodParts(
        image=(options.container_image or "").replace("#", "/"),
        working_directory=folder,
        template=template,
        devices=_read_devices(options, tasks),
        notes=tuple(notes),
    )


def _read_devices(options: argparse.Namespace, tasks: int) -> dict[str, str] | None:
    """Return the devices of a node; None if the script does not name any."""
    for value, factor in ((options.gpus_per_node, 1), (options.gpus_per_task, tasks)):
        if value and (count := _parse_whole_number(value.rsplit(":", 1)[-1])):
            return {"nvidia.com/gpu": str(count * factor)}
    gres = re.search(r"\bgpu(?::[\w.-]+)?:(\d+)", options.gres or "")
    if gres:
        return {"nvidia.com/gpu": gres[1]}
    if options.gpus:
        nodes = _parse_whole_number((options.nodes or "1").split("-")[-1]) or 1
        total = _parse_whole_number(options.gpus.rsplit(":", 1)[-1]) or 0
        return {"nvidia.com/gpu": str(max(1, total // nodes))}
    return None


def _read_time(value: str | None) -> int | None:
    """Return the seconds of a limit in one of Slurm's forms, from minutes to days-hours:minutes:seconds."""
    match = _TIME.fullmatch(value or "")
    if match is None:
        return None
    days, *given = match.groups()
    parts = [int(part) for part in given if part is not None]
    if days is None:
        # One or two parts start with minutes.
        parts = parts if len(parts) == 3 else [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


def _read_signal(value: str | None) -> int | None:
    """Return the seconds before the end at which Slurm sends a signal: the time to save."""
    match = re.fullmatch(r"(?:[RB]+:)?\w+@(\d+)", value or "")
    return int(match[1]) if match else None


def _parse_whole_number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 8 else None
