"""Group relative policy optimization (GRPO) whose answers the pods of role `rollout` generate (rollout_server.py).

A tiny policy learns a rule: each token is followed by the next one. What a step asks for follows from its number alone,
so a step that is repeated after a fault has the same prompts, the same answers and the same rewards.
"""

# ruff: noqa: INP001 - a user's program, in no package
from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainium_worker

VOCABULARY, PROMPTS, SAMPLES, TOKENS = 12, 8, 4, 8
PUBLISH_EVERY = 4
"""Steps between two published policies: answers of a step are at most so many updates old."""
REQUEST_SECONDS = 5.0
"""Limit of a request; a step must end before the job takes it for a hang (15 s unless it sets more)."""
AVOID_SECONDS = 30.0
"""Time in which a server that has failed is asked only if there is no other."""


class RefusedError(Exception):
    """A server refuses the request, so another attempt is refused too."""


class NotPublishedError(Exception):
    """Rank 0 has not published the policy yet."""


def ask(address: str, body: dict[str, Any]) -> list[list[int]]:
    """Return the answers of one server. Raises OSError, http.client.HTTPException and ValueError for a bad answer."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=REQUEST_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = json.loads(answer.read(1 << 20))
    finally:
        connection.close()
    if answer.status == http.client.BAD_REQUEST:
        raise RefusedError(content["error"]["message"])
    if answer.status == http.client.NOT_FOUND:
        raise NotPublishedError
    samples = [choice["token_ids"] for choice in content["choices"]]
    if len(samples) != SAMPLES or any(len(tokens) != TOKENS or not set(tokens) <= ALL_TOKENS for tokens in samples):
        raise ValueError(f"{address} answers with other samples than were asked for")
    return samples


ALL_TOKENS = frozenset(range(VOCABULARY))


FAILED_AT: dict[str, float] = {}
"""When a server failed last, by address."""


def list_servers() -> list[str]:
    """Return the ready servers without those that have failed lately, or all of them if all have."""
    ready = trainium_worker.endpoints("rollout")
    recent = time.monotonic() - AVOID_SECONDS
    return [address for address in ready if FAILED_AT.get(address, recent) <= recent] or list(ready)


def generate(version: int, prompt: int, seed: int) -> list[list[int]]:
    """Return the answers to a prompt from any server that has the policy; waits while none answers."""
    body = {"model": f"policy-{version}", "prompt": [prompt], "n": SAMPLES, "max_tokens": TOKENS, "seed": seed}
    attempt = seed // SAMPLES  # spreads the prompts over the servers
    while True:
        addresses = list_servers()
        if addresses:
            address = addresses[attempt % len(addresses)]
            try:
                return ask(address, body)
            except NotPublishedError:
                pass  # the server is right
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                FAILED_AT[address] = time.monotonic()
                sys.stderr.write(f"asking another server than {address}: {error!r}\n")
        attempt += 1
        time.sleep(0.05 if addresses else 0.5)


def reward(prompt: int, tokens: list[int]) -> float:
    """Return the share of tokens that follow the rule."""
    pairs = zip([prompt, *tokens], tokens, strict=False)
    return sum((before + 1) % VOCABULARY == after for before, after in pairs) / TOKENS


def compute_loss(
    policy: torch.nn.Embedding, prompt: int, samples: list[list[int]], rewards: list[float]
) -> torch.Tensor:
    """Return the loss of a group: the answers that are better than the group's mean become more likely."""
    values = torch.tensor(rewards)
    advantages = (values - values.mean()) / (values.std() + 1e-4)
    tokens = torch.tensor(samples)
    before = torch.cat([torch.full((SAMPLES, 1), prompt), tokens[:, :-1]], dim=1)
    likelihoods = policy(before).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return -(advantages.unsqueeze(1) * likelihoods).mean()


def publish(folder: Path, step: int, policy: torch.nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    """Write policy and training state under a new name: servers and a resume see them whole or not at all."""
    path = folder / f"policy-{step}.pt"
    state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path.with_suffix(f".{os.getpid()}"))
    path.with_suffix(f".{os.getpid()}").replace(path)
    trainium_worker.saved(step, path)


def resume(folder: Path, policy: torch.nn.Embedding, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest state that rank 0 finds; return its step, 0 for none."""
    steps = [int(path.stem.removeprefix("policy-")) for path in folder.glob("policy-*.pt")]
    newest = torch.tensor(max(steps, default=0))
    if dist.is_initialized():
        dist.broadcast(newest, 0)
    if newest > 0:
        state = torch.load(folder / f"policy-{int(newest)}.pt", weights_only=True)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
    return int(newest)


def train(folder: Path, last_step: int, seed: int, learning_rate: float) -> None:
    """Train to the last step; `seed` chooses the first policy and the answers."""
    start = time.time()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(seed)
    policy = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate)
    done = resume(folder, policy, optimizer)
    if done == 0 and rank == 0:
        publish(folder, 0, policy, optimizer)
    for step in range(done + 1, last_step + 1):
        version = (step - 1) // PUBLISH_EVERY * PUBLISH_EVERY
        rewards = torch.zeros(PROMPTS)
        optimizer.zero_grad()
        trainium_worker.stage("generate")  # slow servers are no hang
        for index in range(rank, PROMPTS, size):
            number = step * PROMPTS + index
            prompt = number % VOCABULARY
            samples = generate(version, prompt, ((seed << 32) + number) * SAMPLES)
            group = [reward(prompt, tokens) for tokens in samples]
            rewards[index] = sum(group) / SAMPLES
            (compute_loss(policy, prompt, samples, group) / PROMPTS).backward()
        gradient = policy.weight.grad if policy.weight.grad is not None else torch.zeros_like(policy.weight)
        if size > 1:
            dist.all_reduce(gradient)
            dist.all_reduce(rewards)
        policy.weight.grad = gradient
        optimizer.step()
        if rank == 0:
            with (folder / "rewards.jsonl").open("a") as log:
                record = {"step": step, "rewards": rewards.tolist(), "ranks": size, "start": start, "time": time.time()}
                log.write(json.dumps(record) + "\n")
            if step % PUBLISH_EVERY == 0:
                publish(folder, step, policy, optimizer)
        trainium_worker.step(step, loss=1.0 - float(rewards.mean()), samples=PROMPTS * SAMPLES, total_steps=last_step)
        if trainium_worker.should_stop():
            sys.exit(trainium_worker.STOPPED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="shared with the servers: policies, training state and rewards")
    parser.add_argument("steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        train(options.folder, options.steps, options.seed, options.learning_rate)
    except RefusedError as error:
        sys.exit(f"the servers refuse this policy: {error}")
