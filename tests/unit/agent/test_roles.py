"""Addresses of roles in the agent and in programs: the file, the variables, and time that is no stall."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import trainium_worker
from tests.unit.agent.hang.test_agent_hang import build_stall
from trainium_agent.hang.detection import RankSample, StallTracker
from trainium_agent.roles import RoleDirectory
from trainium_contract.wire.messages import RoleEndpoints
from trainium_contract.wire.worker_env import MAX_ROLE_VARIABLE

MANY = tuple(f"10.0.{number >> 8}.{number & 255}:8000" for number in range(512))


def test_ranks_get_the_addresses_of_their_start_and_a_file_with_the_newest(tmp_path: Path) -> None:
    roles = RoleDirectory(tmp_path / "memory")
    assert (roles.build_environment(), roles.is_waiting) == ({}, False)
    roles.update(RoleEndpoints(addresses={"rollout": ("a:1", "b:1"), "reward-model": ()}, is_waiting=True))
    environment = roles.build_environment()
    path = Path(environment.pop("TRAINIUM_ROLES_FILE"))
    assert environment == {"TRAINIUM_ROLE_ROLLOUT": "a:1,b:1", "TRAINIUM_ROLE_REWARD_MODEL": ""}
    assert roles.is_waiting
    before = path.stat().st_ino
    roles.update(RoleEndpoints(addresses={"rollout": ("c:1",)}))
    assert json.loads(path.read_text()) == {"rollout": ["c:1"]}
    assert path.stat().st_ino != before, "the file is replaced, so no reader sees a part"
    assert [each.name for each in path.parent.iterdir()] == ["roles.json"]


def test_more_addresses_than_fit_a_variable_are_in_the_file_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = RoleDirectory(tmp_path)
    roles.update(RoleEndpoints(addresses={"rollout": MANY, "judge": MANY[:9]}))
    environment = roles.build_environment()
    assert set(environment) == {"TRAINIUM_ROLES_FILE", "TRAINIUM_ROLE_JUDGE"}
    assert "TRAINIUM_ROLE_ROLLOUT is not set, because the 512 addresses of role rollout" in caplog.text
    assert f"more than {MAX_ROLE_VARIABLE} characters" in caplog.text
    monkeypatch.setenv("TRAINIUM_ROLES_FILE", environment["TRAINIUM_ROLES_FILE"])
    assert trainium_worker.endpoints("rollout") == MANY
    with pytest.raises(LookupError, match=r"no role 'judges', only \['judge', 'rollout'\]: add it to spec.roles"):
        trainium_worker.endpoints("judges")


def test_without_an_agent_a_variable_has_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINIUM_ROLES_FILE", raising=False)
    monkeypatch.setenv("TRAINIUM_ROLE_REWARD_MODEL", "localhost:1,localhost:2")
    assert trainium_worker.endpoints("reward-model") == ("localhost:1", "localhost:2")
    monkeypatch.setenv("TRAINIUM_ROLE_REWARD_MODEL", "")
    assert trainium_worker.endpoints("reward-model") == ()
    with pytest.raises(LookupError, match="the job has no role"):
        trainium_worker.endpoints("rollout")


def test_time_in_which_training_waits_for_a_role_is_no_stall() -> None:
    tracker, sample = StallTracker(), RankSample(replace(build_stall(0), seconds=0.0), (1, 1))
    stalls = [tracker.sample(float(second), [sample], excused=second < 10)[0].seconds for second in range(13)]
    assert stalls == [0.0] * 10 + [1.0, 2.0, 3.0]
