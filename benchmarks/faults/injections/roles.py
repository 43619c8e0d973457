"""Inject faults into the servers of a role, beside ranks that ask them (`manifests/examples/grpo_rollout.py`)."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.rollouts.rewards import read_rewards
from trainium_devcluster.jobs.metrics import read_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.faults.recovery import Run
    from benchmarks.faults.target import Json

_STEPS_AFTER = 20
_SECONDS = 180.0
_AVOIDED_SECONDS = 30.0
"""AVOID_SECONDS of grpo_rollout.py."""


def kill_server(run: Run) -> None:
    """Send SIGKILL to a random server."""
    name = _choose_server(run)["metadata"]["name"]
    kill = partial(run.env.faults.kill_container, run.target.namespace, name)
    _follow(run, kill, partial(_is_whole, run, without=name), name)


def lose_node_of_server(run: Run) -> None:
    """Power off the node of a random server, which has no member."""
    server, env = _choose_server(run), run.env
    name, node = server["metadata"]["name"], server["spec"]["nodeName"]
    if env.move_operator_off(node):
        run.target.wait_until_stable(_STEPS_AFTER, _SECONDS)
    try:
        _follow(run, partial(env.cluster.power_off, node), partial(_is_whole, run, without=name), node)
    finally:
        env.replace_node(node)


def break_role(run: Run) -> None:
    """Replace a server by one whose command fails; once the status reports it, give the right command again."""
    target, name = run.target, _choose_server(run)["metadata"]["name"]
    roles = target.read_object()["spec"]["roles"]
    broken = copy.deepcopy(roles)
    broken[0]["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", "exit 3"]

    def inject() -> None:
        target.patch({"spec": {"roles": broken}})
        target.delete_pod(name, force=True)
        target.wait_for(
            "the reason in the status", lambda: "in a row ended" in _read_role(run).get("message", ""), _SECONDS
        )
        target.patch({"spec": {"roles": roles}})

    _follow(run, inject, partial(_is_whole, run, without=name), name)


def spoil_answers(run: Run, how: str) -> None:
    """Let a random server answer garbage, or slowly; check that each rank asks it once and then avoids it."""
    server, target = _choose_server(run), run.target
    switch = target.folder / f"{how}-{server['status']['podIP']}"
    ranks = int(target.read_status()["membership"]["size"])

    def inject() -> None:
        # A server writes into it as another user.
        switch.touch(mode=0o666)
        switch.chmod(0o666)

    try:
        _follow(run, inject, lambda: len(_read_times(switch)) >= ranks, f"{how} of {server['metadata']['name']}")
        requests = _read_times(switch)
        allowed = ranks * int((time.time() - requests[0]) // _AVOIDED_SECONDS + 1)
        run.expect(len(requests) <= allowed, f"the server got {len(requests)} requests, expected at most {allowed}")
    finally:
        switch.unlink(missing_ok=True)


def _read_times(switch: Path) -> list[float]:
    """Return when requests met the fault of a server (Unix seconds)."""
    return [float(line) for line in switch.read_text().splitlines()]


def _list_servers(run: Run) -> list[Json]:
    return [
        pod
        for pod in run.target.list_pods()
        if pod["metadata"]["labels"]["trainium.dev/role"] == "rollout" and "deletionTimestamp" not in pod["metadata"]
    ]


def _read_role(run: Run) -> Json:
    return next(iter(run.target.read_status().get("roles") or []), {})


def _is_whole(run: Run, without: str = "") -> bool:
    """Return whether all servers are ready, and none of them is the named one."""
    role, names = _read_role(run), {pod["metadata"]["name"] for pod in _list_servers(run)}
    return bool(role) and role.get("readyReplicas", 0) == role["replicas"] and without not in names


def _choose_server(run: Run) -> Json:
    """Wait until ranks train with all servers, and for a random moment; return a random server."""
    run.target.wait_for("ready servers", partial(_is_whole, run), _SECONDS)
    run.target.wait_until_stable(_STEPS_AFTER, _SECONDS)
    time.sleep(run.rng.uniform(0.0, 0.5))
    server: Json = run.rng.choice(_list_servers(run))
    return server


def _follow(run: Run, inject: Callable[[], object], is_over: Callable[[], bool], note: str) -> None:
    """Inject a fault of a server; check that training goes on, uninterrupted, with the same prompts.

    The detection is the time until the fault is over, the recovery the longest pause between two steps.
    """
    target, before, injected_at = run.target, run.target.read_status(), time.time()
    inject()
    target.wait_for(f"the end of the fault ({note})", is_over, _SECONDS)
    run.result.detection_seconds = round(time.time() - injected_at, 3)
    target.wait_for_step(target.read_newest_step() + _STEPS_AFTER, _SECONDS)
    records, after = read_lines(target.folder / "rewards.jsonl"), target.read_status()
    for field in ("generation", "attempt"):
        values = [status["membership"].get(field) for status in (before, after)]
        run.expect(values[0] == values[1], f"the {field} of the training changed from {values[0]} to {values[1]}")
    run.expect(before.get("history") == after.get("history"), "the fault is in the history of the training")
    steps = [record["step"] for record in records]
    run.expect(steps == list(range(1, len(steps) + 1)), "a step is missing, or was computed twice")
    run.result.recovery_seconds = round(read_rewards(target.folder).find_longest_pause(injected_at), 3)
    run.result.steps_lost = len(steps) - len(set(steps))
    run.result.note = note
