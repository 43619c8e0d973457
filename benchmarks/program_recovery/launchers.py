"""Start one script of TRL on two nodes in three ways, and inject the same faults into each."""

from __future__ import annotations

import contextlib
import json
import signal
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.harness import launchers
from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.demos.frame import OPERATOR_NAMESPACE
from trainium_devcluster.demos.session import NAMESPACE
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.program import ProgramDemo

SCRIPT = Path(__file__).with_name("sft.py")
RECORDER = Path(__file__).parents[2] / "devcluster/trainium_devcluster/demos/recorded_program.py"
_PORT = 29400
_RANK_PATTERN = f"-u /src/{RECORDER.name}"
"""Matches the rank that torchrun starts, and not torchrun."""


class Launcher(launchers.Launcher[ProgramDemo]):
    """A way to start the script on several nodes."""

    first_fault = 210
    """Step of the first fault: in the second epoch."""

    @abstractmethod
    def start(self, size: int) -> None:
        """Start the script on `size` nodes."""

    @abstractmethod
    def find_pod(self) -> dict[str, Any]:
        """Return the pod of the second rank."""

    @abstractmethod
    def resize(self, size: int) -> None:
        """Change the number of nodes as a user would."""

    def kill_rank(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the second rank."""
        self.kill_process(self.find_pod(), number, match=_RANK_PATTERN)

    def kill_operator(self) -> None:
        """Send SIGKILL to the operator."""
        pods = self.demo.cluster.api.get(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods")["items"]
        self.demo.cluster.faults.kill_container(OPERATOR_NAMESPACE, pods[0]["metadata"]["name"])

    def check(self) -> None:
        """Raise ClusterError if the training has failed."""

    def describe(self) -> str:
        """Describe the state of the training in a few lines, for an error."""
        return ""

    def read_step(self) -> int:
        """Return the step that a controller has recorded."""
        raise NotImplementedError(f"{self.title} records no steps")

    def power_off_node(self) -> str:
        """Power off the node of the second rank; return its name."""
        node: str = self.find_pod()["spec"]["nodeName"]
        self.demo.cluster.faults.kill_node(node)
        return node

    def build_pod(self, command: str, *arguments: str) -> dict[str, Any]:
        """Return the spec of a pod that runs torchrun with these options, and the script with more arguments."""
        job = self.demo.create_manifest(self.name)
        spec = job["spec"]["workers"]["template"]["spec"]
        worker, program = spec["containers"][0], job["spec"]["program"]
        address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        script = f"/src/{RECORDER.name} sft.py"
        worker |= {
            "image": program["image"],
            "command": ["sh", "-c", f'exec python -m torch.distributed.run {command} {script} "$@"', "sh"],
            "args": [*program["args"], *arguments],
            "env": [*worker["env"], address, {"name": "OMP_NUM_THREADS", "value": "1"}],
            "volumeMounts": [*worker["volumeMounts"], {"name": "checkpoints", "mountPath": "/checkpoints"}],
        }
        volume = {"name": "checkpoints", "hostPath": {"path": str(self.demo.out / "checkpoints")}}
        source = {"name": "source", "configMap": {"name": "peer-sft"}}
        return {"containers": [worker], "volumes": [source, volume]}


class TrainingJobLauncher(Launcher):
    """A TrainingJob with a warm spare, and the elastic line in the script."""

    title = "TrainingJob, `elastic`"

    def start(self, size: int) -> None:
        """Start the script."""
        job = self.demo.create_manifest(self.name)
        job["spec"]["workers"]["replicas"] = size
        self.run = self.demo.apply(job)

    def find_pod(self) -> dict[str, Any]:
        """Return the pod of the second rank."""
        name = self.run.list_members()[-1]["podName"]
        return self.demo.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")

    def kill_rank(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the last rank, which the agent knows."""
        self.run.signal_rank(self.run.list_members()[-1]["podName"], str(int(number)))

    def check(self) -> None:
        """Show the job; raises ClusterError if it has failed."""
        with contextlib.suppress(ApiError, OSError):
            self.run.observe()

    def describe(self) -> str:
        """Describe the state of the job in a few lines."""
        return self.run.describe()

    def read_step(self) -> int:
        """Return the step that the operator has written into the status."""
        return int((self.run.read_status().get("progress") or {}).get("step", 0))

    def resize(self, size: int) -> None:
        """Change the number of nodes."""
        self.run.scale(size)

    def stop(self) -> None:
        """Write the status and the end of the workers' logs to the folder of results; delete everything."""
        folder = self.demo.out
        with contextlib.suppress(ApiError, ClusterError, OSError):
            (folder / f"{self.name}-status.json").write_text(json.dumps(self.run.read_status(), indent=1))
            for pod in self.run.list_pods():
                name = pod["metadata"]["name"]
                text = self.demo.cluster.kubectl("logs", name, "-n", NAMESPACE, "--all-containers", "--tail=200")
                (folder / f"{name}.log").write_text(text)
        self.delete(f"trainingjob/{self.name}")


class JobSetLauncher(launchers.JobSetLauncher[ProgramDemo], Launcher):
    """A JobSet that recreates all pods at a failure; at a resize the user deletes it and applies another one."""

    failure_policy: ClassVar[dict[str, Any]] = {"maxRestarts": 20}

    def start(self, size: int) -> None:
        """Start the script."""
        steps = 2 // size  # the user keeps the global batch
        command = (
            f"--nnodes={size} --nproc-per-node=1 --node-rank=$JOB_COMPLETION_INDEX "
            f"--master-addr={self.name}-workers-0-0.{self.name} --master-port={_PORT}"
        )
        pod = self.build_pod(command, "--gradient_accumulation_steps", str(2 * steps))
        self.apply_jobset({"workers": (1, size, pod)})

    def find_pod(self) -> dict[str, Any]:
        """Return the pod of the second rank."""
        return self.find_running_pod(self.select("workers", index=1))

    def resize(self, size: int) -> None:
        """Change the number of nodes."""
        self.stop()
        self.start(size)


class TorchrunLauncher(Launcher):
    """`torchrun --nnodes=1:2 --max-restarts` in the pods of a StatefulSet, which is scaled."""

    title = "`torchrun --max-restarts`"

    def start(self, size: int) -> None:
        """Start the script."""
        command = (
            f"--nnodes=1:2 --nproc-per-node=1 --max-restarts=20 --rdzv-backend=c10d --rdzv-id={self.name} "
            f"--rdzv-endpoint={self.name}-0.{self.name}:{_PORT} --local-addr=$POD_IP"
        )
        labels = {"app": self.name}
        meta = {"name": self.name, "namespace": NAMESPACE}
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
        }
        spec = {
            "replicas": size,
            "serviceName": self.name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": self.build_pod(command)},
        }
        self.apply(service, {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": spec})

    def find_pod(self) -> dict[str, Any]:
        """Return the pod of the second rank."""
        return self.find_running_pod(f"app={self.name}")

    def resize(self, size: int) -> None:
        """Change the number of nodes."""
        self.demo.cluster.kubectl("scale", f"statefulset/{self.name}", "-n", NAMESPACE, f"--replicas={size}")

    def stop(self) -> None:
        """Delete everything."""
        self.delete(f"statefulset/{self.name}", f"service/{self.name}")


def install_script(demo: ProgramDemo) -> None:
    """Create the peers' script."""
    files = [f"--from-file=sft.py={SCRIPT}", f"--from-file={RECORDER}"]
    demo.cluster.kubectl("create", "configmap", "peer-sft", *files, "-n", NAMESPACE)
