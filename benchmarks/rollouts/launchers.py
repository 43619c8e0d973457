"""Start the example as a TrainingJob with a role and as a JobSet of two replicated jobs, and kill its processes."""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from benchmarks.harness import launchers
from trainium_devcluster.demos.frame import Demo, DemoJob
from trainium_devcluster.demos.session import NAMESPACE, REPOSITORY
from trainium_devcluster.jobs.metrics import StepLog

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXAMPLES = REPOSITORY / "manifests" / "examples"
_JOB = Path(__file__).with_name("job.yaml")
_FILES = ("grpo_rollout.py", "rollout_server.py")
_CONFIG_MAP = "rollout"
PORT = 18_080
_MASTER_PORT = 29400
SERVERS = 2
_STEPS_BETWEEN = 30
"""Steps between a recovery and the next fault."""
RANKS = 2
_SOURCE_MOUNT = {"name": "source", "mountPath": "/src", "readOnly": True}
_SOURCE = {"name": "source", "configMap": {"name": _CONFIG_MAP}}


@dataclass(frozen=True, slots=True)
class Training:
    """Arguments of a run of the example."""

    name: str
    steps: int
    seed: int = 0
    learning_rate: float = 0.02
    ranks: int = RANKS

    @property
    def command(self) -> list[str]:
        """The command of a rank."""
        options = ["--seed", str(self.seed), "--learning-rate", str(self.learning_rate)]
        return ["python", "/src/grpo_rollout.py", f"/checkpoints/{self.name}", str(self.steps), *options]


class RolloutDemo(Demo):
    """A cluster with the operator and the example's programs."""

    def install(self) -> None:
        """Install the operator, and create the ConfigMap with the programs."""
        super().install()
        (self.out / "checkpoints").mkdir()
        sources = [f"--from-file={_EXAMPLES / name}" for name in _FILES]
        self.cluster.kubectl("create", "configmap", _CONFIG_MAP, *sources, "-n", NAMESPACE)

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Return a short job; use `build_job` for others."""
        return self.build_job(Training(name, steps=100))

    def build_job(self, training: Training) -> dict[str, Any]:
        """Return the TrainingJob of a run: ranks, a warm spare, and the role of servers."""
        job: dict[str, Any] = yaml.safe_load(_JOB.read_text())
        folder, spec = f"/checkpoints/{training.name}", job["spec"]
        job["metadata"]["name"] = training.name
        spec["workers"]["replicas"] = training.ranks
        checkpoints = {"path": folder, "committed": "policy-{step}.pt"}
        spec["program"] |= {"command": training.command, "checkpoints": checkpoints}
        spec["checkpoint"] = {"storage": {"hostPath": {"path": str(self.out / "checkpoints")}}}
        spec["roles"][0] |= {"replicas": SERVERS, "template": {"spec": self.build_server(folder)}}
        return job

    def build_server(self, folder: str) -> dict[str, Any]:
        """Return the spec of a server's pod."""
        container = {
            "name": "server",
            "command": ["python", "/src/rollout_server.py", folder],
            "volumeMounts": [_SOURCE_MOUNT, {"name": "data", "mountPath": "/checkpoints"}],
        }
        return {"containers": [container], "volumes": [_SOURCE, self.data_volume]}

    @property
    def data_volume(self) -> dict[str, Any]:
        """The folder that ranks and servers share."""
        return {"name": "data", "hostPath": {"path": str(self.out / "checkpoints")}}

    def create_trainer_settings(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the steps of the program."""
        return {"steps": int(job["spec"]["program"]["command"][3])}

    def apply(self, job: Mapping[str, Any]) -> DemoJob:
        """Apply a job; its steps are those of the rewards."""
        run = super().apply(job)
        run.log = StepLog(run.folder / "rewards.jsonl")
        return run

    def inject_faults(self, run: DemoJob) -> None:
        """Kill a rank twice, lose a node, and resize the role and the workers, one after the other."""
        run.wait_for_step(_STEPS_BETWEEN)
        more_servers = partial(self.scale_role, servers=SERVERS + 1)
        resizes = (partial(self.resize, size=size) for size in (1, RANKS))
        self.inject_in_turn(
            run, _STEPS_BETWEEN, self.kill_process, self.lose_node, more_servers, self.kill_process, *resizes
        )
        self.scale_role(run, SERVERS)

    def scale_role(self, run: DemoJob, servers: int) -> None:
        """Scale the role."""
        change = json.dumps([{"op": "replace", "path": "/spec/roles/0/replicas", "value": servers}])
        self.cluster.kubectl("patch", "trainingjob", run.name, "-n", NAMESPACE, "--type=json", f"-p={change}")
        self.view.log(f"role rollout scaled to {servers}")


class Launcher(launchers.Launcher[RolloutDemo]):
    """A way to start ranks and servers together."""

    restarts_all = False
    """Whether a killed server restarts the ranks too."""

    def __init__(self, demo: RolloutDemo, training: Training) -> None:
        super().__init__(demo, training.name)
        self.training = training

    @abstractmethod
    def start(self) -> None:
        """Start everything."""

    @abstractmethod
    def list_servers(self) -> list[dict[str, Any]]:
        """Return the pods of the servers."""

    @abstractmethod
    def kill_rank(self) -> None:
        """Send SIGKILL to the second rank."""


class TrainingJobLauncher(Launcher):
    """A TrainingJob with a role."""

    title = "TrainingJob, spec.roles"

    def start(self) -> None:
        """Apply the job."""
        self.run = self.demo.apply(self.demo.build_job(self.training))

    def list_servers(self) -> list[dict[str, Any]]:
        """Return the pods of the role."""
        return self.list_pods(f"trainium.dev/job-name={self.name},trainium.dev/role=rollout")

    def kill_rank(self) -> None:
        """Send SIGKILL to the last rank."""
        self.run.kill_rank(RANKS - 1)

    def stop(self) -> None:
        """Delete the job."""
        self.delete(f"trainingjob/{self.name}")


class JobSetLauncher(launchers.JobSetLauncher[RolloutDemo], Launcher):
    """A JobSet with a Job of both ranks and a Job for each server, and JobSet's default: a failure restarts all."""

    restarts_all = True

    def start(self) -> None:
        """Apply the JobSet."""
        name = self.name
        addresses = ",".join(f"{name}-rollout-{number}-0.{name}:{PORT}" for number in range(SERVERS))
        rank_variables = {
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": f"{name}-trainer-0-0.{name}",
            "MASTER_PORT": str(_MASTER_PORT),
            "TRAINIUM_ROLE_ROLLOUT": addresses,
            "OMP_NUM_THREADS": "1",
        }
        trainer = {
            "name": "trainer",
            "image": "registry.example.com/team/rl:1",
            "command": ["sh", "-c", 'RANK=$JOB_COMPLETION_INDEX exec "$@"', "sh", *self.training.command],
            "env": [{"name": key, "value": value} for key, value in rank_variables.items()],
            "volumeMounts": [_SOURCE_MOUNT, {"name": "data", "mountPath": "/checkpoints"}],
        }
        server = self.demo.build_server(f"/checkpoints/{name}")
        server["containers"][0] |= {
            "image": trainer["image"],
            "env": [
                {"name": "TRAINIUM_ROLE_PORT", "value": str(PORT)},
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            ],
            "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2},
        }
        ranks = {"containers": [trainer], "volumes": [_SOURCE, self.demo.data_volume]}
        # The ranks ignore SIGTERM as first processes of their containers, and would delay a restart by half a minute.
        end = {"terminationGracePeriodSeconds": 1}
        jobs = {"rollout": (SERVERS, 1, server | end), "trainer": (1, RANKS, ranks | end)}
        self.apply_jobset(jobs, completed_by=("trainer",))

    def list_servers(self) -> list[dict[str, Any]]:
        """Return the pods of the servers."""
        return self.list_pods(self.select("rollout"))

    def kill_rank(self) -> None:
        """Send SIGKILL to the second rank."""
        self.kill_process(self.find_running_pod(self.select("trainer", index=1)))


class JobSetRulesLauncher(JobSetLauncher):
    """The same with failure policy rules: a failed Job is recreated alone."""

    title = "JobSet, RestartJob rules"
    restarts_all = False
    failure_policy: ClassVar[dict[str, Any]] = {
        "maxRestarts": 100,
        "rules": [
            {
                "name": "alone",
                "action": "RestartJobAndIgnoreMaxRestarts",
                "targetReplicatedJobs": ["rollout", "trainer"],
            }
        ],
    }
