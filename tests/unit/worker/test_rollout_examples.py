"""The example of GRPO with rollout servers, in real processes: killed servers, a killed trainer, bad answers."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testing.suite.timeouts import scaled, until
from trainium_agent.roles import RoleDirectory
from trainium_contract.wire.messages import RoleEndpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[3] / "manifests/examples"
STEPS = 60


class Rollout:
    """Servers of one role, whose ready ones are in the file that an agent would write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policies = folder / "policies"
        self.policies.mkdir()
        self.servers: dict[str, subprocess.Popen[str]] = {}
        self.roles = RoleDirectory(folder)
        self.publish()

    def start_server(self) -> str:
        """Start a server; return its address."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, str(EXAMPLES / "rollout_server.py"), str(self.policies)]
        variables = {**os.environ, "TRAINIUM_ROLE_PORT": str(port), "POD_IP": "127.0.0.1"}
        server = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        address = f"127.0.0.1:{port}"
        self.servers[address] = server
        return address

    def until_ready(self, address: str) -> None:
        stdout = self.servers[address].stdout
        assert stdout is not None
        with stdout:
            assert stdout.readline().startswith("serves at port")

    def publish(self, *others: str) -> None:
        """Write the file of addresses."""
        self.roles.update(RoleEndpoints(addresses={"rollout": (*self.servers, *others)}))

    def train(self, steps: int = STEPS) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLES / "grpo_rollout.py"), str(self.policies), str(steps)]
        variables = {**os.environ, **self.roles.build_environment()}
        return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)

    def rewards(self) -> list[tuple[int, list[float]]]:
        path = self.policies / "rewards.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(entry["step"], entry["rewards"]) for entry in map(json.loads, lines)]

    def until_step(self, step: int) -> None:
        until(lambda: any(done >= step for done, _ in self.rewards()), f"step {step}", scaled(60), pause=0.02)

    def kill_servers(self, *addresses: str) -> None:
        """Kill these servers, whose addresses stay in the file until it is written."""
        for address in addresses:
            server = self.servers.pop(address)
            server.kill()
            server.wait()


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[Rollout]:
    opened = Rollout(tmp_path)
    yield opened
    opened.kill_servers(*opened.servers)


def finish(trainer: subprocess.Popen[str], code: int = 0) -> str:
    _, errors = trainer.communicate(timeout=scaled(120))
    assert trainer.returncode == code, errors
    return errors


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_servers_and_a_killed_trainer_change_no_reward(rollout: Rollout, tmp_path: Path) -> None:
    first, second = rollout.start_server(), rollout.start_server()
    for address in (first, second):
        rollout.until_ready(address)
    rollout.publish()
    finish(rollout.train())
    undisturbed = rollout.rewards()
    assert [step for step, _ in undisturbed] == list(range(1, STEPS + 1))
    assert sum(undisturbed[-1][1]) / len(undisturbed[-1][1]) > 0.7, "it learns the rule"

    rollout.policies.rename(tmp_path / "undisturbed")
    rollout.policies.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as garbage:
        garbage_address = f"127.0.0.1:{garbage.getsockname()[1]}"
        trainer = rollout.train()
        rollout.until_step(5)
        rollout.kill_servers(first)  # its address stays for a while
        rollout.until_step(12)
        replacement = rollout.start_server()
        rollout.publish(garbage_address)
        connection, _ = garbage.accept()
        connection.recv(1 << 16)
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"choices": []}')
        connection.close()
        rollout.publish()
        rollout.until_ready(replacement)
        rollout.until_step(22)
        trainer.send_signal(signal.SIGKILL)
        finish(trainer, -signal.SIGKILL)
        rollout.kill_servers(*rollout.servers)
        rollout.publish()
        newest = max(rollout.policies.glob("policy-*.pt"), key=lambda path: int(path.stem.removeprefix("policy-")))
        newest.unlink()  # as if it had been killed before it wrote it
        trainer = rollout.train()
        time.sleep(1)  # without any server
        assert trainer.poll() is None
        last = rollout.start_server()
        rollout.until_ready(last)
        rollout.publish()
        finish(trainer)

    disturbed = rollout.rewards()
    assert len(disturbed) > STEPS, "the resumed trainer repeats the steps since its checkpoint"
    assert dict(disturbed) == dict(undisturbed), "each prompt counts once, bit for bit"
    by_step = dict(undisturbed)
    assert all(rewards == by_step[step] for step, rewards in disturbed), "repeated steps get the same answers"


def test_a_server_that_does_not_answer_costs_one_timeout(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("grpo_rollout")
    monkeypatch.setattr(example, "REQUEST_SECONDS", 0.5)
    address = rollout.start_server()
    rollout.until_ready(address)
    torch.save({"policy": {"weight": torch.zeros(12, 12)}}, rollout.policies / "policy-0.pt")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts for it
        silent_address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("TRAINIUM_ROLE_ROLLOUT", f"{address},{silent_address}")
        monkeypatch.setattr(example, "FAILED_AT", {})
        answers = [example.generate(0, 1, seed) for seed in range(0, 16, 4)]
        assert list(example.FAILED_AT) == [silent_address]
        failed_at = example.FAILED_AT[silent_address]
        assert [example.generate(0, 1, seed) for seed in range(0, 16, 4)] == answers
        assert example.FAILED_AT[silent_address] == failed_at, "it is asked no more"
        monkeypatch.setenv("TRAINIUM_ROLE_ROLLOUT", silent_address)
        assert example.list_servers() == [silent_address], "unless there is no other"


def test_a_server_refuses_weights_of_another_shape_with_a_sentence(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("grpo_rollout")
    address = rollout.start_server()
    rollout.until_ready(address)
    torch.save({"policy": {"weight": torch.zeros(3, 3)}}, rollout.policies / "policy-8.pt")
    body = {"model": "policy-8", "prompt": [1], "n": 4, "max_tokens": 8, "seed": 0}
    with pytest.raises(example.RefusedError, match=r"shape \(3, 3\), and this server serves \(12, 12\)"):
        example.ask(address, body)


def test_a_policy_that_is_not_published_yet_is_no_failure_of_the_server(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("grpo_rollout")
    address, ask, refusals = rollout.start_server(), example.ask, []
    rollout.until_ready(address)

    def ask_and_publish(*arguments: object) -> object:
        try:
            return ask(*arguments)
        except example.NotPublishedError as refusal:
            refusals.append(refusal)
            torch.save({"policy": {"weight": torch.zeros(12, 12)}}, rollout.policies / "policy-4.pt")
            raise

    monkeypatch.setenv("TRAINIUM_ROLE_ROLLOUT", address)
    monkeypatch.setattr(example, "FAILED_AT", {})
    monkeypatch.setattr(example, "ask", ask_and_publish)
    assert len(example.generate(4, 1, 0)) == example.SAMPLES
    assert (len(refusals), example.FAILED_AT) == (1, {})
