"""Compile a program's graphs before a worker joins: `python -m trainium_agent.precompile --sizes 2,1`.

The operator runs it in an init container with the image, devices and volumes of the worker. It runs
`program.precompile.command` for each size that neither this node nor another one has compiled.

Guarantees:
- A command that fails, or takes longer than `timeoutSeconds`, ends the container with one sentence and code 64, and no
  process of it is left.
- Files of a size are shared only after its command has ended with 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_agent.linux import kernel
from trainium_agent.ranks.processes import kill_descendants
from trainium_contract.exit_codes import ExitCode
from trainium_contract.program_output import find_error, strip_margin
from trainium_contract.redaction import redact_secrets
from trainium_contract.spec.program import ProgramSpec
from trainium_contract.wire import worker_env
from trainium_contract.wire.log_line import LogSource
from trainium_contract.worker_process import log_lines
from trainium_contract.worker_process.compile_cache import LocalCache, SharedCache, fill_cache
from trainium_contract.worker_process.write_access import FORBIDDEN, explain_forbidden

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO

    from trainium_contract.spec.program import ProgramPrecompile

_log = logging.getLogger("trainium.compile")
_IN_KEY = ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG", "XLA_FLAGS")
"""Variables that change what a compiler produces."""
_LENGTH = 32
_CHUNK_BYTES = 1 << 16
_TAIL_CHUNKS = 2
_SHOWN_CHARACTERS = 300
_END_SECONDS = 5.0


class CompileError(Exception):
    """The command did not compile; the text is a sentence for the user."""


def compute_key(program: ProgramSpec, nodes: int, processes: int, environment: Mapping[str, str]) -> str:
    """Return the key of the graphs of one size; equal only for equal images, commands and options of the compiler."""
    parts = program.model_dump(mode="json", include={"image", "command", "args", "precompile", "batch"})
    parts |= {"nodes": nodes, "processes": processes, "variables": {name: environment.get(name) for name in _IN_KEY}}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_LENGTH]


def run_command(precompile: ProgramPrecompile, environment: Mapping[str, str], directory: str | None) -> None:
    """Run the command to its end, with its output in this process's. Raises CompileError."""
    nodes = environment[worker_env.ENV_NODES]
    try:
        process = subprocess.Popen(
            precompile.command, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise CompileError(
            f"program.precompile.command {precompile.command[0]} cannot be executed ({error.strerror}): correct it"
        ) from error
    tail: deque[bytes] = deque(maxlen=_TAIL_CHUNKS)
    assert process.stdout is not None
    reader = threading.Thread(target=_copy_output, args=(process.stdout, tail), daemon=True)
    reader.start()
    try:
        code = process.wait(precompile.timeout_seconds)
    except subprocess.TimeoutExpired:
        raise CompileError(
            f"program.precompile.command has not ended after {precompile.timeout_seconds} s at {nodes} nodes: raise "
            "timeoutSeconds, or have it run fewer steps"
        ) from None
    finally:
        kill_descendants(_END_SECONDS)  # a process that it left may hold its output open
    reader.join(_END_SECONDS)
    if code:
        raise CompileError(
            f"program.precompile.command ended with code {code} at {nodes} nodes: {_find_reason(b''.join(tail))}"
        )


def _copy_output(output: IO[bytes], tail: deque[bytes]) -> None:
    while chunk := os.read(output.fileno(), _CHUNK_BYTES):
        tail.append(chunk)
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _find_reason(output: bytes) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return "it wrote nothing"
    position = find_error(lines)
    line = lines[-1] if position is None else lines[position]
    return redact_secrets(strip_margin(line))[:_SHOWN_CHARACTERS]


def precompile_sizes(sizes: Sequence[int], processes: int, environment: Mapping[str, str]) -> None:
    """Compile every size, or copy what was compiled. Raises CompileError, and OSError for the folders."""
    program = ProgramSpec.model_validate_json(environment[worker_env.ENV_PROGRAM])
    precompile = program.precompile
    assert precompile is not None, "the operator adds this container for it"
    local = LocalCache(Path(environment[worker_env.ENV_COMPILE_CACHE]))
    local.folder.mkdir(parents=True, exist_ok=True)
    folder = environment.get(worker_env.ENV_SHARED_COMPILE_CACHE)
    shared = SharedCache(Path(folder)) if folder else None
    for nodes in sizes:
        size = {worker_env.ENV_NODES: str(nodes), worker_env.ENV_WORLD_SIZE: str(nodes * processes)}
        key, began = compute_key(program, nodes, processes, environment), time.monotonic()

        def compile_size(size: Mapping[str, str] = size) -> None:
            run_command(precompile, {**environment, **size}, program.working_directory)

        outcome = fill_cache(key, local, shared, compile_size)
        _log.info("graphs of %s nodes: %s in %.1f s (key %s)", nodes, outcome.value, time.monotonic() - began, key)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the sizes of the arguments, and end the process with an exit code of the contract."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", required=True, type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--cores-per-node", required=True, type=int)
    options = parser.parse_args(arguments)
    # Process 1 of a container ignores SIGTERM by default; this releases the lease.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.YIELDING))
    kernel.adopt_orphans()
    log_lines.configure_agent_logging()
    try:
        precompile_sizes(options.sizes, options.cores_per_node, os.environ)
    except CompileError as error:
        _end(str(error))
    except OSError as error:
        reason = explain_forbidden(error.errno) if error.errno in FORBIDDEN else "make room"
        _end(f"the folder of compiled graphs: {error.strerror or error} ({error.filename}): {reason}")


def _end(sentence: str) -> None:
    log_lines.report_exit(f"trainium-agent: {sentence}", source=LogSource.AGENT)
    sys.exit(ExitCode.USER_ERROR)


if __name__ == "__main__":
    main()
