"""Read the command lines of torchrun, of its older names, and of programs that start without it.

Options as in PyTorch's torch/distributed/run.py; variables `PET_*` are defaults of the options of the same name. The
agents take the place of the launcher: they start the ranks, agree on a rendezvous and restart.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_client.importing.shell import OptionParser, Word, parse_words, quote, read_assignments, split_statements
from trainium_client.importing.source_job import Note, Program
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


LAUNCHERS = ("torchrun", "hyperpodrun")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_OTHER_LAUNCHERS = ("accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "colossalai", "composer")
_SHELLS = ("sh", "bash", "dash", "zsh", "ash")
_PREFIXES = ("exec", "time", "nohup", "env", "command")
_RENDEZVOUS = (
    "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "node-rank", "master-addr", "master-port", "local-addr",
)  # fmt: skip
_REPLACED = (
    "monitor-interval", "start-method", "role", "log-dir", "redirects", "tee", "event-log-handler", "logs-specs",
    "local-ranks-filter", "numa-binding", "signals-to-handle", "duplicate-stdout-filters", "duplicate-stderr-filters",
    "server-port", "server-host", "shutdown-signal", "shutdown-timeout", "pre-train-script", "post-train-script",
    "pre-train-args", "post-train-args", "tmux",
)  # fmt: skip
"""Options of torchrun and hyperpodrun that have no effect on what is trained."""
_FLAGS = ("standalone", "run-path", "use-env", "virtual-local-rank", "inprocess-restart")
_SHORT = {"role": (), "redirects": ("-r",), "tee": ("-t",)}


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launcher and its command line, from the first option to the last argument of the script."""

    options: argparse.Namespace
    script: int
    """Index of the script among the words."""
    first: int
    """Index of the launcher among the words."""
    python: str
    environment: tuple[tuple[str, str], ...]
    """Variables that are assigned before the launcher."""


def _build_parser() -> argparse.ArgumentParser:
    parser = OptionParser("the command of torchrun")
    for name in ("nnodes", "nproc-per-node", "max-restarts", *_RENDEZVOUS, *_REPLACED):
        parser.add_argument(*_SHORT.get(name, ()), *_list_spellings(name))
    for name in _FLAGS:
        parser.add_argument(*_list_spellings(name), action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument(*_list_spellings("no-python"), action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _list_spellings(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))


def read_command(command: Sequence[str], args: Sequence[str], environment: Mapping[str, str]) -> Program:
    """Return the program of a container; `environment` has its variables of known value."""
    words = [*command, *args]
    if len(words) > 2 and words[0].rsplit("/", 1)[-1] in _SHELLS and re.fullmatch(r"-\w*c", words[1]):
        return read_script(words[:2], words[2], words[3:], environment)
    expanded = [_replace_references(word, environment) for word in words]
    launch = _find_launch(expanded)
    if launch is None:
        return _build_unlaunched_program(expanded, len(command))
    program = _describe(launch, environment)
    kept = [*_build_interpreter(launch), *expanded[launch.script :]]
    return _set_command(program, kept, len(kept) - len(launch.options.arguments))


def read_script(
    shell: Sequence[str], script: str, parameters: Sequence[str], environment: Mapping[str, str]
) -> Program:
    """Return the program of a shell, without the shell if the script only starts the launcher.

    `shell` is the command before the script.
    """
    variables = {name: [value] for name, value in environment.items()}
    statements = split_statements(script)
    for number, statement in enumerate(statements):
        if assigned := read_assignments(script, statement, variables):
            variables.update(assigned)
            continue
        words = parse_words(script, statement, variables)
        launch = _find_launch(words)
        if launch is None:
            continue
        program = _describe(launch, environment)
        kept, notes = _drop_tee(words[launch.script :])
        prefix = _build_interpreter(launch)
        is_simple = all(word.is_literal and not word.is_operator for word in kept)
        only_assignments = all(
            read_assignments(script, other, variables) is not None for other in statements if other != statement
        )
        # Exported variables reach the program only through the shell.
        if is_simple and only_assignments and not re.search(r"\bexport\b", script) and not parameters:
            return _set_command(program, [*prefix, *(word.text for word in kept)], len(prefix) + 1, notes)
        # The script still assigns what is before the launcher.
        program = replace(program, environment=())
        text = " ".join(["exec", *map(quote, prefix), script[kept[0].start : kept[-1].end]])
        is_last = number == len(statements) - 1
        text = text if is_last else text.removeprefix("exec ")
        rewritten = script[: words[launch.first].start] + text + script[statement.end :]
        if not is_last and not re.search(r"\bset\s+-\w*e", script):
            rewritten = f"set -e\n{rewritten}"
            notes += (
                Note("set -e is added: else the code of the last command would hide a failure", "spec.program.command"),
            )
        return replace(program, command=tuple(shell), args=(rewritten, *parameters), notes=program.notes + notes)
    program = _build_unlaunched_program([*shell, script, *parameters], len(shell))
    return replace(
        program,
        notes=(
            *program.notes,
            Note("start the program with exec, so that it gets SIGTERM itself", "spec.program.command"),
        ),
    )


def read_launcher(words: Sequence[Word], environment: Mapping[str, str]) -> Program | None:
    """Return the program of a statement that starts torchrun without a shell around it; None without torchrun."""
    launch = _find_launch(words)
    if launch is None:
        return None
    program = _describe(launch, environment)
    kept, notes = _drop_tee(words[launch.script :])
    prefix = _build_interpreter(launch)
    if all(word.is_literal and not word.is_operator for word in kept):
        return _set_command(program, [*prefix, *(word.text for word in kept)], len(prefix) + 1, notes)
    text = " ".join(
        ["exec", *map(quote, prefix), *(word.text if word.is_operator else quote(word.text) for word in kept)]
    )
    unknown = sorted({name for word in kept for name in re.findall(r"\$\{?(\w+)", word.text)})
    if unknown:
        notes += (
            Note(
                f"set {', '.join(unknown)} in the env of the container: nothing in the input assigns it",
                "spec.program.command",
            ),
        )
    return replace(program, command=("bash", "-c"), args=(text,), notes=program.notes + notes)


def _find_launch(words: Sequence[Word] | Sequence[str]) -> _Launch | None:
    """Find the launcher in a command line, and its options; None without one."""
    texts = [word if isinstance(word, str) else word.text for word in words]
    first = 0
    while first < len(texts) and (texts[first] in _PREFIXES or re.match(r"[A-Za-z_]\w*=", texts[first])):
        first += 1
    if first >= len(texts):
        return None
    name, python, options = texts[first].rsplit("/", 1)[-1], "python", first + 1
    if re.fullmatch(r"python[\d.]*", name):
        module = next((index for index in range(first + 1, len(texts) - 1) if texts[index] == "-m"), 0)
        flags_before = module and all(text.startswith("-") for text in texts[first + 1 : module])
        if not flags_before or texts[module + 1] not in _MODULES:
            return None
        python, options = texts[first], module + 2
    elif name not in LAUNCHERS:
        return None
    parsed, unknown = _build_parser().parse_known_args(texts[options:])
    if unknown:
        raise ClientError(
            f"the command of torchrun has the unknown option {unknown[0]}: remove it, or check its spelling"
        )
    if parsed.script.startswith("$"):
        raise ClientError(
            f"options of torchrun come from {parsed.script}, whose value the input does not have: write them out"
        )
    assigned = [text.partition("=") for text in texts[:first] if "=" in text]
    environment = tuple((name, value) for name, _, value in assigned)
    return _Launch(parsed, len(texts) - len(parsed.arguments) - 1, first, python, environment)


def _build_interpreter(launch: _Launch) -> list[str]:
    """Return what torchrun would start before the script."""
    return [] if launch.options.no_python else [launch.python, *(["-m"] if launch.options.module else [])]


def _describe(launch: _Launch, environment: Mapping[str, str]) -> Program:
    """Return the sizes that the launcher was given, and notes on its options."""
    options, notes = launch.options, []

    def find_value(name: str) -> str:
        given = getattr(options, name.replace("-", "_")) or environment.get(f"PET_{name.replace('-', '_').upper()}")
        return str(given or "")

    given = [name for name in _RENDEZVOUS if find_value(name)] + [
        name for name in ("standalone",) if options.standalone
    ]
    if given:
        notes.append(Note(f"torchrun {_list_options(given)}: the agents agree on a rendezvous by themselves"))
    replaced = [name for name in _REPLACED if find_value(name)]
    if replaced:
        notes.append(
            Note(f"torchrun {_list_options(replaced)}: the agents start and watch the ranks, logs are the pods'")
        )
    if options.virtual_local_rank:
        notes.append(Note("torchrun --virtual-local-rank: each rank has LOCAL_RANK by its place on the node"))
    nodes = re.fullmatch(r"(\d+)(?::(\d+))?", "1" if options.standalone else find_value("nnodes"))
    processes = find_value("nproc-per-node")
    restarts = find_value("max-restarts")
    return Program(
        min_nodes=int(nodes[1]) if nodes and nodes[2] else None,
        max_nodes=int(nodes[2] or nodes[1]) if nodes else None,
        launched=True,
        processes=int(processes) if processes.isdigit() else None,
        one_for_each_device=processes in {"auto", "gpu", "cpu"},
        max_restarts=int(restarts) if restarts.isdigit() else None,
        environment=launch.environment,
        notes=tuple(notes),
    )


def _build_unlaunched_program(words: list[str], command_length: int) -> Program:
    """Return the program of a container that starts one process, or a launcher that is not replaced."""
    joined = " ".join(words)
    launcher = next((name for name in _OTHER_LAUNCHERS if re.search(rf"(?:^|[\s/]){name}\b", joined)), "")
    notes: tuple[Note, ...] = ()
    if launcher:
        notes = (
            Note(
                f"{launcher} still starts the ranks of its node: it needs WORLD_SIZE and RANK of the nodes as its own "
                "options (docs/program.md, Start another number of processes)",
                "spec.program.command",
            ),
        )
    return _set_command(Program(), words, command_length, notes)


def _replace_references(word: str, environment: Mapping[str, str]) -> str:
    """Replace $(NAME) as a kubelet does; it does not replace those of `program.command`."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), word)


def _set_command(program: Program, words: list[str], command_length: int, notes: tuple[Note, ...] = ()) -> Program:
    """Return the program with its command; a shell replaces $(NAME), because a kubelet does not."""
    command, args = tuple(words[:command_length]), tuple(words[command_length:])
    if any(re.search(r"\$\(\w+\)", word) for word in words):
        text = "exec " + " ".join(quote(re.sub(r"\$\((\w+)\)", r"${\1}", word)) for word in words)
        command, args = ("sh", "-c"), (text,)
    return replace(program, command=command, args=args, notes=program.notes + notes)


def _drop_tee(words: Sequence[Word]) -> tuple[Sequence[Word], tuple[Note, ...]]:
    """Leave out a copy of the output in a file at the end: a pipe would hide a failure of the program."""
    pipe = next((number for number, word in enumerate(words) if word.is_operator and word.text == "|"), None)
    if pipe is None or [word.text for word in words[pipe + 1 : pipe + 2]] != ["tee"]:
        return words, ()
    while pipe and words[pipe - 1].is_operator and words[pipe - 1].text == "2>&1":
        pipe -= 1
    return words[:pipe], (
        Note("`| tee`: the output is in the pods' logs (kubectl trn logs), and a pipe hides failures"),
    )


def _list_options(names: Sequence[str]) -> str:
    return ", ".join(f"--{name}" for name in names)
