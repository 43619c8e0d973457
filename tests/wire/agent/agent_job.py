"""Pods of one job on loopback: forked agents, a coordinator in the event loop of the test, and fake ranks."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.testing.suite.timeouts import async_until, scaled
from tests.wire.agent.coordinator_server import Authority, CoordinatorReplica, CoordinatorState
from trainium_contract.wire.messages import HeartbeatRequest, ProcessFailure

HERE = Path(__file__).parent
T = TypeVar("T")
_addresses = itertools.count(1)
_BLOCK = os.getpid() % 200 + 20


class AgentProcess:
    """A forked agent: its address, log and exit code."""

    def __init__(self, name: str, ip: str, pid: int, log: Path, memory: Path) -> None:
        self.name, self.ip, self.pid, self.log_path, self.memory = name, ip, pid, log, memory
        self.code: int | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def termination_message(self) -> str:
        return self.log_path.with_suffix(".termination").read_text()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class AgentFactory:
    """A client of the process that forks agents."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "agent_factory.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.agents: dict[int, AgentProcess] = {}
        self._read()
        os.set_blocking(self.process.stdout.fileno(), False)
        self._buffer = b""

    def _read(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def start(self, name: str, ip: str, env: dict[str, str], log: Path, memory: Path) -> AgentProcess:
        self.process.stdin.write(json.dumps({"env": env, "log": str(log)}).encode() + b"\n")
        self.process.stdin.flush()
        started = None
        while started is None:
            started = self.poll()
            time.sleep(0.001)
        agent = AgentProcess(name, ip, started, log, memory)
        self.agents[started] = agent
        return agent

    def poll(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            self._buffer += os.read(self.process.stdout.fileno(), 65536)
        started = None
        while b"\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\n", 1)
            message = json.loads(line)
            if "started" in message:
                started = message["started"]
            elif message["ended"] in self.agents:
                self.agents[message["ended"]].code = message["code"]
        return started

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(scaled(10))
        self.process.stdout.close()


class AgentJob:
    """One job: its pods, coordinator and started ranks."""

    def __init__(self, folder: Path, factory: AgentFactory) -> None:
        self.folder, self.factory = folder, factory
        self.authority = Authority()
        self.coordinator = CoordinatorState()
        self.coordinators: list[CoordinatorReplica] = []
        self.agents: dict[str, AgentProcess] = {}
        self.control = folder / "control"
        self.control.mkdir()
        self.ca, self.token = folder / "ca.crt", folder / "token"
        self.ca.write_bytes(self.authority.pem)
        self.token.write_text(self.coordinator.token)
        (folder / "trainer.yaml").write_text("model: {}\n")

    def allocate_ip(self) -> str:
        number = next(_addresses)
        return f"127.{_BLOCK}.{number // 250 + 1}.{number % 250 + 1}"

    async def add_coordinator(self) -> CoordinatorReplica:
        """Start one more replica of the coordinator."""
        replica = CoordinatorReplica(self.coordinator, self.allocate_ip(), self.authority)
        await replica.start()
        self.coordinators.append(replica)
        return replica

    def environment(self, name: str, ip: str, **extra: str) -> dict[str, str]:
        memory = self.folder / f"memory-{name}"
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(HERE / "fakes"),
            "OMP_NUM_THREADS": "1",
            "TRAINIUM_COORDINATOR": ",".join(f"{replica.ip}:{replica.port}" for replica in self.coordinators),
            "TRAINIUM_NAMESPACE": "team",
            "TRAINIUM_JOB": "job",
            "TRAINIUM_POD_NAME": name,
            "TRAINIUM_POD_UID": f"uid-{name}",
            "POD_IP": ip,
            "TRAINIUM_NODE_NAME": f"node-{name}",
            "TRAINIUM_PROCESSES_PER_NODE": "1",
            "TRAINIUM_MAX_IN_PLACE_RESTARTS": "3",
            "TRAINIUM_GRACE_SECONDS": "5",
            "TRAINIUM_CONFIG": str(self.folder / "trainer.yaml"),
            "TRAINIUM_MEMORY_DIR": str(memory),
            "TRAINIUM_TOKEN_PATH": str(self.token),
            "TRAINIUM_CA_PATH": str(self.ca),
            "TRAINIUM_RANK_ENTRY": "fake_rank:main",
            "FAKE_CONTROL": str(self.control),
            **extra,
        }

    def start(self, *names: str, **extra: str) -> list[AgentProcess]:
        started = []
        for name in names:
            ip = self.allocate_ip()
            agent = self.factory.start(
                name,
                ip,
                self.environment(name, ip, **extra),
                self.folder / f"{name}.log",
                self.folder / f"memory-{name}",
            )
            self.agents[name] = agent
            started.append(agent)
        return started

    def command_ranks(self, name: str, text: str = "") -> None:
        """Write a command for the fake ranks, atomically, because they read it at any time."""
        draft = self.control / f"draft-of-{name}"
        draft.write_text(text)
        draft.rename(self.control / name)

    def rank_starts(self, **fields: int | str) -> list[dict]:
        """Return the records of started ranks with these fields."""
        path = self.control / "starts.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if all(row[key] == value for key, value in fields.items())]

    async def until(self, condition: Callable[[], T], description: str, seconds: float = 30) -> T:
        def poll() -> T:
            self.factory.poll()
            return condition()

        def describe() -> str:
            parts = [f"--- {name}\n{agent.log[-3000:]}" for name, agent in self.agents.items()]
            return "\n".join([description, *parts])

        return await async_until(poll, describe, seconds, pause=0.01)

    def last_heartbeat(self, name: str) -> HeartbeatRequest | None:
        received = self.coordinator.heartbeats.get(name)
        return received[-1] if received else None

    async def until_registered(self, *names: str) -> None:
        await self.until(lambda: set(names) <= set(self.coordinator.registered), f"{names} registered")

    async def until_ready(self, *names: str) -> None:
        await self.until(
            lambda: all((heartbeat := self.last_heartbeat(name)) is not None and heartbeat.ready for name in names),
            f"{names} ready",
        )

    async def until_training(self, *names: str, generation: int = 1, attempt: int = 0, step: int = 0) -> None:
        def trains(name: str) -> bool:
            heartbeat = self.last_heartbeat(name)
            return (
                heartbeat is not None
                and (heartbeat.generation, heartbeat.attempt, heartbeat.phase) == (generation, attempt, "Training")
                and heartbeat.progress is not None
                and heartbeat.progress.step > step
            )

        await self.until(
            lambda: all(trains(name) for name in names), f"{names} training, generation {generation}, attempt {attempt}"
        )

    async def train(
        self, *members: str, spares: tuple[str, ...] = (), processes: int = 1, step: int = 0, **extra: str
    ) -> None:
        """Start pods, and let the members train as generation 1."""
        self.start(*members, *spares, **extra)
        await self.until_ready(*members, *spares)
        await self.coordinator.publish([*members], processes=processes)
        await self.until_training(*members, step=step)

    async def until_heartbeat(
        self, name: str, condition: Callable[[HeartbeatRequest], object], description: str
    ) -> HeartbeatRequest:
        """Return the newest heartbeat of a pod once it fulfils the condition."""

        def newest() -> HeartbeatRequest | None:
            heartbeat = self.last_heartbeat(name)
            return heartbeat if heartbeat is not None and condition(heartbeat) else None

        return await self.until(newest, f"{name}: {description}", 60)

    async def until_verdict(self, name: str) -> ProcessFailure:
        """Return the verdict of a pod once it has one."""
        return (await self.until_heartbeat(name, lambda heartbeat: heartbeat.verdict, "a verdict")).verdict

    async def until_phase(self, phase: str, *names: str) -> None:
        await self.until(
            lambda: all(
                (heartbeat := self.last_heartbeat(name)) is not None and heartbeat.phase == phase for name in names
            ),
            f"{names} in phase {phase}",
            60,
        )

    async def until_ended(self, *names: str) -> None:
        await self.until(lambda: all(self.agents[name].code is not None for name in names), f"{names} ended")

    async def close(self) -> None:
        for agent in self.agents.values():
            if agent.code is None:
                with contextlib.suppress(ProcessLookupError):
                    agent.signal(signal.SIGKILL)
        await self.until_ended(*self.agents)
        for replica in self.coordinators:
            await replica.stop()
