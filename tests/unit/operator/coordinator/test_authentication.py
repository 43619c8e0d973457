from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from trainium_contract.wire.worker_env import TOKEN_AUDIENCE
from trainium_operator.coordinator.authentication import Authenticator
from trainium_operator.http.errors import RefusedError, ReviewUnavailableError, UnauthenticatedError
from trainium_operator.plan.model.names import JobId

JOB_A = JobId("team", "job-a", "uid-a")


def status(pod: str = "job-a-w-0", uid: str = "pod-uid", namespace: str = "team", **changes: Any) -> dict[str, Any]:
    user = {
        "username": f"system:serviceaccount:{namespace}:default",
        "extra": {
            "authentication.kubernetes.io/pod-name": [pod],
            "authentication.kubernetes.io/pod-uid": [uid],
        },
    }
    return {"authenticated": True, "audiences": [TOKEN_AUDIENCE], "user": user, **changes}


class Pods:
    def job_of(self, namespace: str, pod_name: str, pod_uid: str) -> JobId | None:
        known = {
            ("team", "job-a-w-0", "pod-uid"): JobId("team", "job-a", "uid-a"),
            ("team", "job-b-w-0", "other"): JobId("team", "job-b", "uid-b"),
        }
        return known.get((namespace, pod_name, pod_uid))

    def is_orphaned(self, _namespace: str, _pod_name: str, _pod_uid: str) -> bool:
        return False


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.answers: dict[str, Any] = {"good": status()}
        self.reviews: list[str] = []
        self.specs: list[dict[str, Any]] = []
        self.authenticator = Authenticator(self.review, Pods(), wall_clock=lambda: self.now)

    async def review(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.reviews.append(spec["token"])
        self.specs.append(spec)
        await asyncio.sleep(0)
        answer = self.answers.get(spec["token"], {"authenticated": False})
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def admit(self, token: str = "good", **changes: Any) -> JobId:
        identity = {"namespace": "team", "job": "job-a", "pod_name": "job-a-w-0", "pod_uid": "pod-uid", **changes}
        return self.authenticator.check(await self.authenticator.identify(f"Bearer {token}"), **identity)


async def test_a_pod_may_send_messages_as_itself_in_its_job() -> None:
    world = World()
    assert await world.admit() == JOB_A
    assert world.specs[0]["audiences"] == [TOKEN_AUDIENCE]


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"pod_uid": "other"}, "speaks for another pod"),
        ({"pod_name": "job-b-w-0"}, "speaks for another pod"),
        ({"namespace": "elsewhere"}, "belongs to namespace team"),
        ({"job": "job-b"}, "works for job job-a, not for job-b"),
    ],
)
async def test_a_pod_may_not_send_messages_as_another(identity: dict[str, str], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        await World().admit(**identity)


async def test_an_agent_that_presents_the_token_of_another_job_is_refused() -> None:
    world = World()
    world.answers["stolen"] = status(pod="job-b-w-0", uid="other")
    with pytest.raises(RefusedError):
        await world.admit("stolen")
    with pytest.raises(RefusedError, match="works for job job-b"):
        await world.admit("stolen", pod_name="job-b-w-0", pod_uid="other")


async def test_a_deleted_pod_or_one_that_is_no_worker_is_refused() -> None:
    world = World()
    world.answers["old"] = status(uid="previous")
    with pytest.raises(RefusedError, match="not a worker of any TrainingJob"):
        await world.admit("old", pod_uid="previous")


@pytest.mark.parametrize(
    "answer",
    [
        {"authenticated": False, "error": "expired"},
        status(audiences=["https://kubernetes.default.svc"]),
        status(user={"username": "system:serviceaccount:team:default"}),
        status(user={"username": "alice", "extra": status()["user"]["extra"]}),
    ],
)
async def test_a_token_that_is_invalid_for_another_audience_or_not_of_a_pod_is_not_accepted(
    answer: dict[str, Any],
) -> None:
    world = World()
    world.answers["bad"] = answer
    with pytest.raises(UnauthenticatedError):
        await world.admit("bad")


@pytest.mark.parametrize("header", ["", "Basic abc", "Bearer", "Bearer  ", "Bearer " + "x" * 20_000])
async def test_without_a_usable_token_nobody_is_asked(header: str) -> None:
    world = World()
    with pytest.raises(UnauthenticatedError):
        await world.authenticator.identify(header)
    assert world.reviews == []


async def test_an_answer_is_remembered_for_a_minute() -> None:
    world = World()
    for _ in range(10):
        await world.admit()
    world.now += 59
    await world.admit()
    assert len(world.reviews) == 1
    world.now += 2
    await world.admit()
    assert len(world.reviews) == 2


async def test_an_answer_in_use_is_renewed_before_it_is_too_old_and_nobody_waits_for_that() -> None:
    world = World()
    await world.admit()
    for _ in range(300):
        world.now += 1.0
        began = len(world.reviews)
        await world.admit()
        assert len(world.reviews) == began  # not asked yet when the answer was given
        await asyncio.sleep(0.001)
    assert 5 <= len(world.reviews) - 1 <= 10


async def test_an_answer_is_not_remembered_past_the_expiry_of_the_token() -> None:
    world = World()
    claims = base64.urlsafe_b64encode(json.dumps({"exp": 1020}).encode()).rstrip(b"=").decode()
    token = f"header.{claims}.signature"
    world.answers[token] = status()
    await world.admit(token)
    world.now += 21
    world.answers[token] = {"authenticated": False}
    with pytest.raises(UnauthenticatedError):
        await world.admit(token)


async def test_a_refusal_is_remembered_for_a_moment_only() -> None:
    world = World()
    for _ in range(5):
        with pytest.raises(UnauthenticatedError):
            await world.admit("late")
    assert len(world.reviews) == 1
    world.now += 6
    world.answers["late"] = status()
    assert await world.admit("late") == JOB_A


async def test_many_messages_with_one_token_ask_once() -> None:
    world = World()
    assert await asyncio.gather(*(world.admit() for _ in range(50))) == [JOB_A] * 50
    assert len(world.reviews) == 1


async def test_while_the_api_server_is_away_a_known_token_goes_on_and_an_unknown_one_waits() -> None:
    world = World()
    await world.admit()
    world.now += 120
    world.answers["good"] = ReviewUnavailableError("away")
    world.answers["new"] = ReviewUnavailableError("away")
    assert await world.admit() == JOB_A
    with pytest.raises(ReviewUnavailableError):
        await world.admit("new")
    world.now += 700
    with pytest.raises(ReviewUnavailableError):
        await world.admit()


async def test_tokens_are_kept_as_digests_only() -> None:
    world = World()
    await world.admit()
    assert "good" not in repr(vars(world.authenticator))
