"""The loops on the page of the library: as they stand there, on real processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.suite.timeouts import scaled

pytestmark = pytest.mark.xdist_group("elastic")
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "program-library.md").read_text()
LOOPS = [block.partition("```")[0] for block in PAGE.split("```python\n") if "PositionSampler(" in block]

MY_PROJECT = """
import atexit, json, os, signal
import torch

dataset = torch.utils.data.TensorDataset(torch.randn(22, 6, generator=torch.Generator().manual_seed(1)))
calls = []

def build_model():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    atexit.register(lambda: open(os.environ["RESULT"], "w").write(json.dumps([len(calls), model.weight.tolist()])))
    return model

def compute_mean_loss(model, batch):
    calls.append(1)
    if len(calls) == int(os.environ.get("KILL", 0)) and os.environ["RANK"] == "0":
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
            "TRAINIUM_PROGRESS_FILE": str(folder / f"progress-{rank}"), "OMP_NUM_THREADS": "1",
            "TRAINIUM_MEMORY_DIR": str(folder / f"node-{rank}"), "TRAINIUM_RUN_ID": "run", **variables,
        }  # fmt: skip
        processes.append(subprocess.Popen([sys.executable, str(script)], env=environment))
    codes = []
    for process in processes:
        codes.append(process.wait(scaled(60)))
        if codes[0]:
            processes[-1].kill()
    if "KILL" in variables:
        assert codes[0] == -9
        return []
    assert codes == [0] * ranks
    calls, weights = json.loads((folder / "result-0").read_text())
    return [calls, *(value for row in weights for value in row)]


@pytest.mark.parametrize("program", LOOPS, ids=["ddp", "accelerate", "lightning"])
def test_a_loop_of_the_page_resumes_at_another_size_with_the_same_result(tmp_path: Path, program: str) -> None:
    if "lightning" in program:
        pytest.importorskip("lightning.pytorch")
    calls, *expected = run(tmp_path / "whole", program, 2)
    assert calls == 6, "two epochs of three steps, one micro-batch each"
    run(tmp_path / "killed", program, 2, KILL="5")
    calls, *weights = run(tmp_path / "killed", program, 1)
    batches = 1 if "lightning" in program else 2
    assert calls in {2 * batches, 3 * batches}, "step 3 or 4 was the last one that was complete"
    assert weights == pytest.approx(expected, rel=1e-5)
