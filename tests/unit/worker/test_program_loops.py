"""The loops on the page of the library: as they stand there, on real processes."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.program_recovery.programs import read_loops
from tests.testing.suite.timeouts import scaled

pytestmark = pytest.mark.xdist_group("elastic")
ROOT = Path(__file__).parents[3]
LOOPS = read_loops()
OUTPUTS = 3

MY_PROJECT = """
import atexit, json, os, signal
import torch

dataset = torch.utils.data.TensorDataset(torch.randn(22, 6, generator=torch.Generator().manual_seed(1)))
calls = []

def build_model():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, int(os.environ["OUTPUTS"]))
    atexit.register(write_result, model)
    return model

def write_result(model):
    weight = model.weight.to_local() if hasattr(model.weight, "to_local") else model.weight
    open(os.environ["RESULT"], "w").write(json.dumps([len(calls), weight.tolist()]))

def compute_mean_loss(model, batch):
    calls.append(1)
    if len(calls) == int(os.environ.get("KILL", 0)) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return model(batch[0]).pow(2).mean()
"""


def run(folder: Path, program: str, ranks: int, **variables: str) -> list[float]:
    """Run a program on a node for each rank; return the number of micro-batches of rank 0, and the weights."""
    folder.mkdir(exist_ok=True)
    (folder / "my_project.py").write_text(MY_PROJECT)
    script = folder / "train.py"
    script.write_text(program.replace('BATCH, FOLDER = 2, 64, "/checkpoints/run', f'BATCH, FOLDER = 2, 8, "{folder}'))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'worker'}", "GLOO_SOCKET_IFNAME": "lo",
            "ACCELERATE_USE_CPU": "true", "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks),
            "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": "run",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RESULT": str(folder / f"result-{rank}"),
            "TRAINIUM_PROGRESS_FILE": str(folder / f"progress-{rank}"), "OMP_NUM_THREADS": "1", "OUTPUTS": str(OUTPUTS),
            "TRAINIUM_MEMORY_DIR": str(folder / f"node-{rank}"), "TRAINIUM_RUN_ID": "run", **variables,
        }  # fmt: skip
        processes.append(subprocess.Popen([sys.executable, str(script)], env=environment))
    codes = [process.wait(scaled(60)) for process in processes]
    if "KILL" in variables:
        assert codes[1] == -9
        return []
    assert codes == [0] * ranks
    results = [json.loads((folder / f"result-{rank}").read_text()) for rank in range(ranks)]
    calls, weights = results[0]
    if len(weights) < OUTPUTS:  # each rank has a shard
        weights = [row for _, rows in results for row in rows]
    return [calls, *(value for row in weights for value in row)]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_the_page_resumes_at_another_size_with_the_same_result(tmp_path: Path, name: str) -> None:
    program = LOOPS[name]
    if name == "lightning":
        pytest.importorskip("lightning.pytorch")
    calls, *expected = run(tmp_path / "whole", program, 2)
    assert calls == 6, "two epochs of three steps, one micro-batch each"
    run(tmp_path / "killed", program, 2, KILL="5")
    calls, *weights = run(tmp_path / "killed", program, 1)
    batches = 1 if name == "lightning" else 2
    assert calls in {2 * batches, 3 * batches}, "step 3 or 4 was the last one that was complete"
    assert weights == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("saved_every", "ranks"), [(2, 1), (3, 2)], ids=["in an epoch", "at the end of an epoch"])
def test_the_lightning_loop_resumes_from_its_checkpoint_alone(tmp_path: Path, saved_every: int, ranks: int) -> None:
    pytest.importorskip("lightning.pytorch")
    program = LOOPS["lightning"].replace("every_n_train_steps=100", f"every_n_train_steps={saved_every}")
    _, *expected = run(tmp_path / "whole", program, 2)
    run(tmp_path / "killed", program, 2, KILL="5")
    for node in range(2):
        shutil.rmtree(tmp_path / "killed" / f"node-{node}")
    calls, *weights = run(tmp_path / "killed", program, ranks)
    assert calls == 6 - 4 // saved_every * saved_every, "each step after the checkpoint once"
    assert weights == pytest.approx(expected, rel=1e-5)
