"""Time of `kubectl trn` commands on jobs of 2, 128 and 1,000 workers: processor seconds of the command, and wall time.

The API server is another process on loopback that serves recorded objects, multiplied. The floor is the interpreter
with the imports of every command (`kubectl trn --help`). Wall time moves with the machine's load: quote processor time.
"""

from __future__ import annotations

import argparse
import base64
import copy
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.testing.api.recorded_jobs import CORE, ApiServer, recorded_answers
from trainium_contract.wire.recorded_membership import recorded_membership

SIZES = (2, 128, 1000)
COMMANDS = ("status llama", "ranks llama --no-steps", "why llama", "goodput llama", "sizes llama")
ROUNDS = 5
GOAL_SECONDS = 0.7
"""Of `status` on 1,000 workers."""


def answers(workers: int) -> dict[str, Any]:
    """The recorded job as one of so many workers."""
    found = recorded_answers()
    table = found[f"{CORE}/pods"]
    one = table["rows"][0]
    membership = recorded_membership(found[f"{CORE}/configmaps/llama-membership"])
    member = membership["members"][0]
    table["rows"], membership["members"] = [], []
    for number in range(workers):
        row = copy.deepcopy(one)
        row["cells"][0] = f"llama-w-{number}"
        table["rows"].append(row)
        membership["members"].append(
            member
            | {"nodeRank": number, "podName": f"llama-w-{number}", "podUid": f"uid-{number}", "node": f"node-{number}"}
        )
    text = gzip.compress(json.dumps(membership).encode())
    found[f"{CORE}/configmaps/llama-membership"]["binaryData"] = {"membership.json.gz": base64.b64encode(text).decode()}
    for job in (found["/apis/trainium.dev/v1alpha1/namespaces/team/trainingjobs/llama"],):
        job["spec"]["workers"]["replicas"] = workers
        job["status"] |= {"replicas": workers, "readyReplicas": workers, "desired": workers}
    return found


def serve(workers: int, folder: str) -> None:
    """Serve until standard input ends."""
    with ApiServer(answers(workers), Path(folder)).running():
        print("ready", flush=True)
        sys.stdin.read()


def measure(command: str, kubeconfig: Path) -> tuple[float, float]:
    """Processor and wall seconds of one command."""
    arguments = [sys.executable, "-m", "trainium_client.commands.main", *command.split()]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "COLUMNS": "120"}
    began = time.perf_counter()
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime, wall


def rows_of(workers: int) -> list[dict[str, Any]]:
    """Every command on a job of this size."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.client.client", "--serve", str(workers), folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            server.stdout.readline()
            rows = []
            for said in ("--help", *COMMANDS):
                taken = [measure(said, Path(folder) / "kubeconfig") for _ in range(ROUNDS)]
                row = {"workers": workers, "command": said}
                for at, name in enumerate(("cpuSeconds", "wallSeconds")):
                    values = sorted(each[at] for each in taken)
                    row |= {
                        name: round(statistics.median(values), 3),
                        f"{name}Range": [round(v, 3) for v in (values[0], values[-1])],
                    }
                rows.append(row)
            server.stdin.close()  # type: ignore[union-attr]
    return rows


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("WORKERS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(int(options.serve[0]), options.serve[1])
        return
    machine = f"{os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.1f}"
    rows = [row for workers in SIZES for row in rows_of(workers)]
    print(f"{'workers':>8}  {'command':<24}{'CPU s':>8}{'to floor':>10}{'wall s':>8}")
    for row in rows:
        floor = next(each["cpuSeconds"] for each in rows if each["workers"] == row["workers"])
        row["ratioToFloor"] = round(row["cpuSeconds"] / floor, 2)
        cells = (row["cpuSeconds"], row["ratioToFloor"], row["wallSeconds"])
        print("{:>8}  {:<24}{:>8.2f}{:>10.2f}{:>8.2f}".format(row["workers"], row["command"], *cells))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"goalSeconds": GOAL_SECONDS, "machine": machine, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
