"""A PyTorchJob of the form of minGPT's becomes a TrainingJob and trains, as docs/import.md shows."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from tests.testing.api.json_objects import merge
from tests.testing.cluster.jobs import Job

if TYPE_CHECKING:
    from pathlib import Path

    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EPOCHS, STEPS = 8, 10
PROGRAM = f"""
import os, sys, time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

options = dict(argument.split("=", 1) for argument in sys.argv[1:])
path, last = options["trainer_config.snapshot_path"], int(options["trainer_config.max_epochs"])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = int(os.environ["RANK"])
with open(f"{{path}}.rank-{{rank}}", "w") as file:
    file.write(str(os.getpid()))
torch.manual_seed(0)
network = nn.Sequential(nn.Embedding(64, 16), nn.Flatten(), nn.Linear(8 * 16, 64))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = 0
if os.path.exists(path):
    snapshot = torch.load(path)
    network.load_state_dict(snapshot["model_state"])
    optimizer.load_state_dict(snapshot["optimizer_state"])
    first = snapshot["finished_epoch"] + 1
for epoch in range(first, last):
    for step in range({STEPS}):
        generator = torch.Generator().manual_seed(epoch * {STEPS} + step * 2 + rank)
        tokens = torch.randint(64, (16, 8), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.1)
        if rank == 0:
            print(f"step: {{epoch * {STEPS} + step + 1}} loss: {{loss.item():.5f}}", flush=True)
    if rank == 0:
        state = {{"model_state": network.state_dict(), "optimizer_state": optimizer.state_dict()}}
        torch.save(state | {{"finished_epoch": epoch}}, path + ".part")
        os.replace(path + ".part", path)
"""
POD = """
containers:
  - name: pytorch
    image: registry.example.com/research/mingpt:7
    command: [torchrun, --rdzv-id=mingpt, main.py]
    workingDir: /src
    volumeMounts: [{name: source, mountPath: /src}, {name: data, mountPath: /data}]
"""


class ImportedJob(Job):
    """The job as `kubectl trn import` prints it, with what the page adds by hand."""

    @property
    def manifest(self) -> dict[str, Any]:
        imported = yaml.safe_load(import_with_plugin(self.cluster, self.folder))
        settings = self.cluster.settings
        spec = imported["spec"]
        spec["program"] |= {
            "image": (settings.get("chartValues") or {}).get("trainerImage", spec["program"]["image"]),
            "checkpoints": {"path": "/data", "committed": "snapshot.pt"},
            "progress": {"pattern": r"step: (?P<step>\d+) loss: (?P<loss>\S+)"},
        }
        spec["workers"]["template"] = merge(settings.get("workerTemplate") or {}, spec["workers"]["template"])
        return imported | {"metadata": {"name": self.name, "namespace": self.namespace}}


def import_with_plugin(cluster: SharedCluster, data: Path) -> str:
    """Run `kubectl trn import` on the PyTorchJob; return the TrainingJob."""
    pod: dict[str, Any] = yaml.safe_load(POD)
    snapshot = ["trainer_config.snapshot_path=/data/snapshot.pt", f"trainer_config.max_epochs={EPOCHS}"]
    pod["containers"][0]["args"] = snapshot
    pod["volumes"] = [
        {"name": "source", "configMap": {"name": "mingpt"}},
        {"name": "data", "hostPath": {"path": str(data)}},
    ]
    replica = {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "mingpt"},
        "spec": {
            "nprocPerNode": "1",
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": 5},
            "pytorchReplicaSpecs": {"Master": replica, "Worker": replica},
        },
    }
    plugin = [sys.executable, "-m", "trainium_client.commands.main", "import", "-"]
    done = cluster.run(*plugin, stdin=json.dumps(job))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_imported_job_of_mingpt_trains_and_resumes_after_a_killed_process(
    operator: SharedCluster, namespace: str
) -> None:
    source = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mingpt"}, "data": {"main.py": PROGRAM}}
    operator.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(source))
    job = ImportedJob(operator, namespace, "mingpt")
    job.apply()
    job.wait_until("a snapshot", lambda status: (status.get("progress") or {}).get("step", 0) > 2 * STEPS, seconds=180)
    pod = job.list_members()[1]["podName"]
    job.exec_in_pod(pod, "sh", "-c", "kill -9 $(cat /data/snapshot.pt.rank-1)")
    entry = job.wait_for_recovery(seconds=180)
    assert (entry["response"], entry["cause"], entry["pod"]) == ("InPlace", "Crash", pod)
    status = job.wait_for_phase("Completed", seconds=240)
    assert status["progress"]["step"] == EPOCHS * STEPS
    assert [entry["cause"] for entry in status["history"]] == ["Crash"]
    snapshot = torch.load(job.folder / "snapshot.pt")
    assert snapshot["finished_epoch"] == EPOCHS - 1
