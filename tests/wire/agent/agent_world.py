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
from tests.wire.agent.coordinator_server import Authority, Jobs, Server
from trainium_contract.wire.messages import HeartbeatRequest, ProcessFailure

HERE = Path(__file__).parent
T = TypeVar("T")
_addresses = itertools.count(1)
_BLOCK = os.getpid() % 200 + 20


class Agent:
    def __init__(self, name: str, ip: str, pid: int, log: Path, memory: Path) -> None:
        self.name, self.ip, self.pid, self.log_path, self.memory = name, ip, pid, log, memory
        self.code: int | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Factory:
    """A client of the process that forks agents."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "agent_factory.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.agents: dict[int, Agent] = {}
        self._read()
        os.set_blocking(self.process.stdout.fileno(), False)
        self._buffer = b""

    def _read(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def start(self, name: str, ip: str, env: dict[str, str], log: Path, memory: Path) -> Agent:
        self.process.stdin.write(json.dumps({"env": env, "log": str(log)}).encode() + b"\n")
        self.process.stdin.flush()
        started = None
        while started is None:
            started = self.poll()
            time.sleep(0.001)
        agent = Agent(name, ip, started, log, memory)
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

    def __init__(self, folder: Path, factory: Factory) -> None:
        self.folder, self.factory = folder, factory
        self.authority = Authority()
        self.jobs = Jobs()
        self.servers: list[Server] = []
        self.agents: dict[str, Agent] = {}
        self.control = folder / "control"
        self.control.mkdir()
        self.ca, self.token = folder / "ca.crt", folder / "token"
        self.ca.write_bytes(self.authority.pem)
        self.token.write_text(self.jobs.token)
        (folder / "trainer.yaml").write_text("model: {}\n")

    def fresh_ip(self) -> str:
        number = next(_addresses)
        return f"127.{_BLOCK}.{number // 250 + 1}.{number % 250 + 1}"

    async def server(self) -> Server:
        server = Server(self.jobs, self.fresh_ip(), self.authority)
        await server.start()
        self.servers.append(server)
        return server

    def environment(self, name: str, ip: str, **extra: str) -> dict[str, str]:
        memory = self.folder / f"memory-{name}"
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(HERE / "fakes"),
            "OMP_NUM_THREADS": "1",
            "TRAINIUM_COORDINATOR": ",".join(f"{server.ip}:{server.port}" for server in self.servers),
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

    def start(self, *names: str, **extra: str) -> list[Agent]:
        started = []
        for name in names:
            ip = self.fresh_ip()
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

    def command(self, name: str, text: str = "") -> None:
        """Command the fake ranks. They read the folder at any time, so the file appears complete or not at all."""
        draft = self.control / f"draft-of-{name}"
        draft.write_text(text)
        draft.rename(self.control / name)

    def starts(self, **wanted: int | str) -> list[dict]:
        path = self.control / "starts.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    async def until(self, condition: Callable[[], T], what: str, seconds: float = 30) -> T:
        def polled() -> T:
            self.factory.poll()
            return condition()

        def logs() -> str:
            parts = [f"--- {name}\n{agent.log[-3000:]}" for name, agent in self.agents.items()]
            return "\n".join([what, *parts])

        return await async_until(polled, logs, seconds, pause=0.01)

    async def registered(self, *names: str) -> None:
        await self.until(lambda: set(names) <= set(self.jobs.registered), f"{names} registered")

    async def ready(self, *names: str) -> None:
        await self.until(
            lambda: all((beat := self.jobs.last(name)) is not None and beat.ready for name in names), f"{names} ready"
        )

    async def training(self, *names: str, generation: int = 1, attempt: int = 0, step: int = 0) -> None:
        def trains(name: str) -> bool:
            beat = self.jobs.last(name)
            return (
                beat is not None
                and (beat.generation, beat.attempt, beat.phase) == (generation, attempt, "Training")
                and beat.progress is not None
                and beat.progress.step > step
            )

        await self.until(
            lambda: all(trains(name) for name in names), f"{names} training, generation {generation}, attempt {attempt}"
        )

    async def train(
        self, *members: str, spares: tuple[str, ...] = (), processes: int = 1, step: int = 0, **extra: str
    ) -> None:
        """Start pods, and let the members train as generation 1."""
        self.start(*members, *spares, **extra)
        await self.ready(*members, *spares)
        await self.jobs.publish([*members], processes=processes)
        await self.training(*members, step=step)

    async def heartbeat(
        self, name: str, condition: Callable[[HeartbeatRequest], object], what: str
    ) -> HeartbeatRequest:
        """Return the newest heartbeat of a pod once it fulfils the condition."""

        def newest() -> HeartbeatRequest | None:
            beat = self.jobs.last(name)
            return beat if beat is not None and condition(beat) else None

        return await self.until(newest, f"{name}: {what}", 60)

    async def verdict(self, name: str) -> ProcessFailure:
        """Return the verdict of a pod once it has one."""
        return (await self.heartbeat(name, lambda beat: beat.verdict, "a verdict")).verdict

    async def phase(self, phase: str, *names: str) -> None:
        await self.until(
            lambda: all((beat := self.jobs.last(name)) is not None and beat.phase == phase for name in names),
            f"{names} in phase {phase}",
            60,
        )

    async def ended(self, *names: str) -> None:
        await self.until(lambda: all(self.agents[name].code is not None for name in names), f"{names} ended")

    async def close(self) -> None:
        for agent in self.agents.values():
            if agent.code is None:
                with contextlib.suppress(ProcessLookupError):
                    agent.signal(signal.SIGKILL)
        await self.ended(*self.agents)
        for server in self.servers:
            await server.stop()


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
