"""Starts of a run of an elastic trainer on real processes, forked from a server that has imported transformers."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.testing.suite.timeouts import scaled

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def start_server() -> Iterator["subprocess.Popen[str]"]:
    """Start the process from which ranks are forked."""
    environment = {
        **os.environ, "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.worker.elastic_ranks"], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@dataclass
class Run:
    """The starts of one run: a folder of output, and a memory folder for each node."""

    server: "subprocess.Popen[str]"
    root: Path
    attempt: int = 0
    errors: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return self.root / "output"

    def start(
        self,
        nodes: list[int],
        *,
        agent: bool = False,
        batch: int | None = None,
        requested: int = 2,
        processes: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Start a rank on each node, and return the exit codes; `processes`: those of the agents, with a launcher."""
        self.attempt += 1
        results = self.root / f"results-{self.attempt}"
        results.mkdir()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        environments = [
            {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "TRAINIUM_RUN_ID": "run", "TRAINIUM_ATTEMPT": str(self.attempt),
                "TRAINIUM_MEMORY_DIR": str(self.root / f"node-{node}"), "TRAINIUM_REQUESTED_WORLD_SIZE": str(requested),
                **({"TRAINIUM_PROGRESS_FILE": str(self.progress(node))} if agent else {}),
                **({"TRAINIUM_GLOBAL_BATCH": str(batch)} if batch else {}),
                **({"TRAINIUM_WORLD_SIZE": str(processes)} if processes else {}),
            }
            for rank, node in enumerate(nodes)
        ]  # fmt: skip
        arguments = {"output_dir": str(self.output), **options.pop("arguments", {})}
        order = {
            "environments": environments, "results": str(results), "seconds": scaled(90),
            "options": {"arguments": arguments, **options},
        }  # fmt: skip
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        codes: list[int] = json.loads(self.server.stdout.readline())
        self.errors = "".join(path.read_text() for path in sorted(results.glob("errors-*")))
        self.reports = [json.loads(path.read_text()) for path in sorted(results.glob("rank-*.json"))]
        return codes

    def progress(self, node: int) -> Path:
        path = self.root / f"node-{node}" / "progress"
        path.mkdir(parents=True, exist_ok=True)
        return path / "g1-r0"

    def lose_node(self, node: int) -> None:
        shutil.rmtree(self.root / f"node-{node}")

    @property
    def losses(self) -> dict[int, float]:
        return {int(step): loss for step, loss in self.reports[0]["losses"].items()}

    @property
    def answers(self) -> dict[int, list[list[Any]]]:
        """The prompts of each step of this start, with their answers and rewards, over all ranks."""
        steps: dict[int, list[list[Any]]] = {}
        for report in self.reports:
            for step, answers in report["answers"].items():
                steps.setdefault(int(step), []).extend(answers)
        return {step: sorted(answers) for step, answers in steps.items()}

    @property
    def ledger(self) -> dict[int, list[int]]:
        """The samples of each step of this start, over all ranks."""
        steps: dict[int, list[int]] = {}
        for report in self.reports:
            for step, numbers in report["ledger"].items():
                steps.setdefault(int(step), []).extend(numbers)
        return {step: sorted(numbers) for step, numbers in steps.items()}
