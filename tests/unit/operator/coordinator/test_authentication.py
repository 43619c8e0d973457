import asyncio
import base64
import json
from typing import Any

import pytest

from trainium_contract.wire.worker_env import TOKEN_AUDIENCE
from trainium_operator.coordinator.authentication import Authenticator
from trainium_operator.http.errors import ForbiddenError, ReviewUnavailableError, UnauthenticatedError
from trainium_operator.plan.model.names import JobId

JOB_A = JobId("team", "job-a", "uid-a")


def review_status(
    pod: str = "job-a-w-0", uid: str = "pod-uid", namespace: str = "team", **changes: Any
) -> dict[str, Any]:
    user = {
        "username": f"system:serviceaccount:{namespace}:default",
        "extra": {
            "authentication.kubernetes.io/pod-name": [pod],
            "authentication.kubernetes.io/pod-uid": [uid],
        },
    }
    return {"authenticated": True, "audiences": [TOKEN_AUDIENCE], "user": user, **changes}


class Pods:
    def find_job(self, namespace: str, pod_name: str, pod_uid: str) -> JobId | None:
        jobs = {
            ("team", "job-a-w-0", "pod-uid"): JobId("team", "job-a", "uid-a"),
            ("team", "job-b-w-0", "other"): JobId("team", "job-b", "uid-b"),
        }
        return jobs.get((namespace, pod_name, pod_uid))

    def is_orphaned(self, _namespace: str, _pod_name: str, _pod_uid: str) -> bool:
        return False


class AuthenticatorHarness:
    def __init__(self) -> None:
        self.now = 1000.0
        self.answers: dict[str, Any] = {"good": review_status()}
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

    async def authenticate(self, token: str = "good", **changes: Any) -> JobId:
        identity = {"namespace": "team", "job": "job-a", "pod_name": "job-a-w-0", "pod_uid": "pod-uid", **changes}
        return self.authenticator.check(await self.authenticator.identify(f"Bearer {token}"), **identity)


async def test_a_pod_is_authenticated_as_itself() -> None:
    harness = AuthenticatorHarness()
    assert await harness.authenticate() == JOB_A
    assert harness.specs[0]["audiences"] == [TOKEN_AUDIENCE]


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"pod_uid": "other"}, "speaks for another pod"),
        ({"pod_name": "job-b-w-0"}, "speaks for another pod"),
        ({"namespace": "elsewhere"}, "belongs to namespace team"),
        ({"job": "job-b"}, "works for job job-a, not for job-b"),
    ],
)
async def test_a_pod_cannot_impersonate_another(identity: dict[str, str], message: str) -> None:
    with pytest.raises(ForbiddenError, match=message):
        await AuthenticatorHarness().authenticate(**identity)


async def test_an_agent_that_presents_the_token_of_another_job_is_refused() -> None:
    harness = AuthenticatorHarness()
    harness.answers["stolen"] = review_status(pod="job-b-w-0", uid="other")
    with pytest.raises(ForbiddenError):
        await harness.authenticate("stolen")
    with pytest.raises(ForbiddenError, match="works for job job-b"):
        await harness.authenticate("stolen", pod_name="job-b-w-0", pod_uid="other")


async def test_a_deleted_pod_or_one_that_is_no_worker_is_refused() -> None:
    harness = AuthenticatorHarness()
    harness.answers["old"] = review_status(uid="previous")
    with pytest.raises(ForbiddenError, match="not a worker of any TrainingJob"):
        await harness.authenticate("old", pod_uid="previous")


@pytest.mark.parametrize(
    "answer",
    [
        {"authenticated": False, "error": "expired"},
        review_status(audiences=["https://kubernetes.default.svc"]),
        review_status(user={"username": "system:serviceaccount:team:default"}),
        review_status(user={"username": "alice", "extra": review_status()["user"]["extra"]}),
    ],
)
async def test_a_token_that_is_invalid_for_another_audience_or_not_of_a_pod_is_not_accepted(
    answer: dict[str, Any],
) -> None:
    harness = AuthenticatorHarness()
    harness.answers["bad"] = answer
    with pytest.raises(UnauthenticatedError):
        await harness.authenticate("bad")


@pytest.mark.parametrize("header", ["", "Basic abc", "Bearer", "Bearer  ", "Bearer " + "x" * 20_000])
async def test_a_malformed_token_is_refused_without_a_review(header: str) -> None:
    harness = AuthenticatorHarness()
    with pytest.raises(UnauthenticatedError):
        await harness.authenticator.identify(header)
    assert harness.reviews == []


async def test_a_review_is_cached_for_a_minute() -> None:
    harness = AuthenticatorHarness()
    for _ in range(10):
        await harness.authenticate()
    harness.now += 59
    await harness.authenticate()
    assert len(harness.reviews) == 1
    harness.now += 2
    await harness.authenticate()
    assert len(harness.reviews) == 2


async def test_a_cached_review_in_use_is_renewed_in_the_background() -> None:
    harness = AuthenticatorHarness()
    await harness.authenticate()
    for _ in range(300):
        harness.now += 1.0
        began = len(harness.reviews)
        await harness.authenticate()
        assert len(harness.reviews) == began  # not asked yet when the answer was given
        await asyncio.sleep(0.001)
    assert 5 <= len(harness.reviews) - 1 <= 10


async def test_a_review_is_not_cached_beyond_the_expiry_of_the_token() -> None:
    harness = AuthenticatorHarness()
    claims = base64.urlsafe_b64encode(json.dumps({"exp": 1020}).encode()).rstrip(b"=").decode()
    token = f"header.{claims}.signature"
    harness.answers[token] = review_status()
    await harness.authenticate(token)
    harness.now += 21
    harness.answers[token] = {"authenticated": False}
    with pytest.raises(UnauthenticatedError):
        await harness.authenticate(token)


async def test_a_refusal_is_cached_for_seconds() -> None:
    harness = AuthenticatorHarness()
    for _ in range(5):
        with pytest.raises(UnauthenticatedError):
            await harness.authenticate("late")
    assert len(harness.reviews) == 1
    harness.now += 6
    harness.answers["late"] = review_status()
    assert await harness.authenticate("late") == JOB_A


async def test_concurrent_messages_with_one_token_share_a_review() -> None:
    harness = AuthenticatorHarness()
    assert await asyncio.gather(*(harness.authenticate() for _ in range(50))) == [JOB_A] * 50
    assert len(harness.reviews) == 1


async def test_during_an_api_outage_only_known_tokens_are_accepted() -> None:
    harness = AuthenticatorHarness()
    await harness.authenticate()
    harness.now += 120
    harness.answers["good"] = ReviewUnavailableError("away")
    harness.answers["new"] = ReviewUnavailableError("away")
    assert await harness.authenticate() == JOB_A
    with pytest.raises(ReviewUnavailableError):
        await harness.authenticate("new")
    harness.now += 700
    with pytest.raises(ReviewUnavailableError):
        await harness.authenticate()


async def test_tokens_are_kept_as_digests_only() -> None:
    harness = AuthenticatorHarness()
    await harness.authenticate()
    assert "good" not in repr(vars(harness.authenticator))
