"""Tokens of agents: only the pod that a token names is accepted, and few readings of the cluster's keys."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm

from tests.testing.api.token_issuer import TokenIssuer
from trainium_operator.coordinator import token_verifier
from trainium_operator.coordinator.authentication import Authenticator
from trainium_operator.coordinator.token_verifier import KeysUnavailableError, TokenVerifier
from trainium_operator.http.errors import AuthenticationUnavailableError, ForbiddenError, UnauthenticatedError
from trainium_operator.plan.model.names import JobId

JOB_A = JobId("team", "job-a", "uid-a")
ISSUER = TokenIssuer()
POD = ("job-a-w-0", "pod-uid")


def find_worker_job(namespace: str, pod_name: str, pod_uid: str) -> JobId | None:
    jobs = {("team", *POD): JOB_A, ("team", "job-b-w-0", "other"): JobId("team", "job-b", "uid-b")}
    return jobs.get((namespace, pod_name, pod_uid))


class AuthenticatorHarness:
    def __init__(self) -> None:
        self.issuer = ISSUER
        self.extra_keys: list[dict[str, Any]] = []
        self.outage = ""
        self.reads = 0
        self.verifier = TokenVerifier(self.read)
        self.authenticator = Authenticator(self.verifier.verify, find_worker_job)

    async def read(self) -> tuple[str, dict[str, Any]]:
        self.reads += 1
        await asyncio.sleep(0)
        if self.outage:
            raise KeysUnavailableError(self.outage)
        return self.issuer.url, {"keys": [*self.issuer.key_set()["keys"], *self.extra_keys]}

    def let_pause_pass(self) -> None:
        self.verifier._read_at = float("-inf")

    async def authenticate(self, token: str = "", **changes: Any) -> JobId:
        identity = {"namespace": "team", "job": "job-a", "pod_name": POD[0], "pod_uid": POD[1], **changes}
        caller = await self.authenticator.identify(f"Bearer {token or self.issuer.token(*POD)}")
        return self.authenticator.check(caller, SimpleNamespace(**identity))


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"pod_uid": "other"}, "speaks for another pod"),
        ({"pod_name": "job-b-w-0"}, "speaks for another pod"),
        ({"namespace": "elsewhere"}, "belongs to namespace team"),
        ({"job": "job-b"}, "works for job job-a, not for job-b"),
    ],
)
async def test_a_pod_is_authenticated_as_itself_and_as_no_other(identity: dict[str, str], message: str) -> None:
    harness = AuthenticatorHarness()
    assert await harness.authenticate() == JOB_A
    with pytest.raises(ForbiddenError, match=message):
        await harness.authenticate(**identity)


@pytest.mark.parametrize(
    ("pod", "uid", "namespace", "message"),
    [
        ("job-b-w-0", "other", "team", "issued to pod job-b-w-0"),  # another job's worker
        (POD[0], "previous", "team", "not a worker of any TrainingJob"),  # deleted, and created again by its name
        (*POD, "elsewhere", "not a worker of any TrainingJob"),
        ("web-0", "web-uid", "team", "not a worker of any TrainingJob"),
    ],
)
async def test_a_valid_token_of_another_pod_is_refused(pod: str, uid: str, namespace: str, message: str) -> None:
    with pytest.raises(ForbiddenError, match=message):
        await AuthenticatorHarness().authenticate(ISSUER.token(pod, uid, namespace))


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": ["https://kubernetes.default.svc"]},
        {"aud": None},
        {"iss": "https://elsewhere.example"},
        {"exp": 1_000_000_000},
        {"exp": None},
        {"iat": 4_000_000_000},
        {"nbf": 4_000_000_000},
        {"sub": "alice"},
        {"sub": "system:serviceaccount:elsewhere:default"},
        {"kubernetes.io": None},
        {"kubernetes.io": {"namespace": "team", "serviceaccount": {"name": "default"}}},  # not bound to a pod
        {"kubernetes.io": {"namespace": "team", "pod": {"name": 7, "uid": ["pod-uid"]}}},
    ],
    ids=str,
)
async def test_a_token_with_other_claims_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnauthenticatedError):
        await AuthenticatorHarness().authenticate(ISSUER.token(*POD, **changes))


async def test_a_clock_may_be_wrong_by_less_than_a_minute() -> None:
    now = time.time()
    for changes in ({"exp": now - 30}, {"iat": now + 30, "nbf": now + 30}):
        assert await AuthenticatorHarness().authenticate(ISSUER.token(*POD, **changes)) == JOB_A
    for changes in ({"exp": now - 90}, {"iat": now + 90}, {"nbf": now + 90}):
        with pytest.raises(UnauthenticatedError):
            await AuthenticatorHarness().authenticate(ISSUER.token(*POD, **changes))


def encode(part: Any) -> str:
    return base64.urlsafe_b64encode(part if isinstance(part, bytes) else json.dumps(part).encode()).decode().rstrip("=")


def sign_with_public_key(claims: dict[str, Any]) -> str:
    """Return a token whose HMAC key is the published key, which everybody knows."""
    secret = ISSUER.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signed = f"{encode({'alg': 'HS256', 'kid': ISSUER.key_id})}.{encode(claims)}"
    return f"{signed}.{encode(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


CLAIMS = ISSUER.claims(*POD)
GOOD = ISSUER.sign(CLAIMS)
HEAD, BODY, SIGNATURE = GOOD.split(".")
FORGED = {
    "no algorithm": f"{encode({'alg': 'none', 'kid': ISSUER.key_id})}.{BODY}.",
    "HMAC with the public key": sign_with_public_key(CLAIMS),
    "another key's signature": TokenIssuer(ISSUER.key_id).sign(CLAIMS),
    "other claims": f"{HEAD}.{encode({**CLAIMS, 'sub': 'other'})}.{SIGNATURE}",
    "no key id": jwt.encode(CLAIMS, ISSUER.key, "ES256"),
    "a key id that is no text": f"{encode({'alg': 'ES256', 'kid': [1]})}.{BODY}.{SIGNATURE}",
    "a header that is deeply nested": f"{encode(b'[' * 5_000)}.{BODY}.{SIGNATURE}",
    "a header with a huge number": f"{encode(b'9' * 5_000)}.{BODY}.{SIGNATURE}",
    "no parts": "x",
    "too many parts": f"{GOOD}.{GOOD}",
    "an unpaired surrogate": "\udce9" * 20,
}


@pytest.mark.parametrize("forgery", FORGED)
async def test_a_forged_token_is_refused(forgery: str) -> None:
    with pytest.raises(UnauthenticatedError):
        await AuthenticatorHarness().authenticate(FORGED[forgery])


@pytest.mark.parametrize("header", ["", "Basic abc", "Bearer", "Bearer  ", "Bearer " + "x" * 20_000])
async def test_a_malformed_header_is_refused_before_it_is_parsed(header: str) -> None:
    harness = AuthenticatorHarness()
    with pytest.raises(UnauthenticatedError, match="send the pod's projected token"):
        await harness.authenticator.identify(header)
    assert harness.reads == 0


async def test_keys_of_each_asymmetric_kind_count_and_symmetric_ones_never() -> None:
    harness = AuthenticatorHarness()
    private = rsa.generate_private_key(65537, 2048)
    public = RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
    secret = "s" * 32
    shared = {"kty": "oct", "kid": "shared", "alg": "HS256", "k": encode(secret.encode())}
    harness.extra_keys = [{**public, "kid": "rsa", "alg": "RS256"}, shared, {"kty": "unknown", "kid": "new"}]
    assert await harness.authenticate(jwt.encode(CLAIMS, private, "RS256", {"kid": "rsa"})) == JOB_A
    for token in (
        jwt.encode(CLAIMS, secret, "HS256", {"kid": "shared"}),
        jwt.encode(CLAIMS, private, "PS256", {"kid": "rsa"}),
    ):
        with pytest.raises(UnauthenticatedError):
            await harness.authenticate(token)


async def test_a_thousand_agents_cost_one_reading_of_the_keys() -> None:
    harness = AuthenticatorHarness()
    assert await asyncio.gather(*(harness.authenticate() for _ in range(1_000))) == [JOB_A] * 1_000
    assert harness.reads == 1


async def test_a_new_key_or_issuer_is_read_when_a_token_names_it() -> None:
    harness, before = AuthenticatorHarness(), ISSUER.token(*POD)
    assert await harness.authenticate() == JOB_A
    harness.issuer = TokenIssuer("key-2")
    harness.let_pause_pass()
    assert await harness.authenticate() == JOB_A
    with pytest.raises(UnauthenticatedError):  # its key is published no more
        await harness.authenticate(before)
    moved = TokenIssuer("key-2", "https://new.example")
    moved.key, harness.issuer = harness.issuer.key, moved
    harness.let_pause_pass()
    assert await harness.authenticate() == JOB_A
    previous = moved.token(*POD, iss=ISSUER.url)
    assert await harness.authenticate(previous) == JOB_A  # valid until it expires


async def test_tokens_of_unknown_keys_cause_few_readings_and_delay_nobody() -> None:
    harness, stranger = AuthenticatorHarness(), TokenIssuer("unknown")
    await harness.authenticate()
    for number in range(100):
        with pytest.raises(UnauthenticatedError, match="no published key has signed it"):
            await harness.authenticate(stranger.sign(CLAIMS, kid=f"unknown-{number}"))
    assert harness.reads == 1
    async with harness.verifier._lock:  # while keys are read
        assert await harness.authenticate() == JOB_A


async def test_during_an_outage_known_keys_are_valid_and_a_new_one_gets_503() -> None:
    harness = AuthenticatorHarness()
    harness.outage = "the API server is away"
    with pytest.raises(AuthenticationUnavailableError):
        await harness.authenticate()
    assert not harness.verifier.has_keys
    harness.outage = ""
    harness.let_pause_pass()
    assert await harness.authenticate() == JOB_A
    harness.outage = "the API server is away"
    harness.let_pause_pass()
    with pytest.raises(AuthenticationUnavailableError):
        await harness.authenticate(TokenIssuer("key-2").token(*POD))
    assert await harness.authenticate() == JOB_A
    with pytest.raises(UnauthenticatedError):  # no key would help
        await harness.authenticate(ISSUER.token(*POD, exp=time.time() - 61))


async def test_why_keys_are_missing_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_verifier, "PAUSE_SECONDS", 0.0)
    harness = AuthenticatorHarness()
    harness.outage = "start it with an https URL as --service-account-issuer"
    for _ in range(3):
        await harness.verifier.refresh()
    assert [record.message for record in caplog.records] == [harness.outage] == [harness.verifier.problem]
    harness.outage = ""
    harness.issuer = TokenIssuer()
    harness.issuer.key_set = lambda: {"keys": []}  # type: ignore[method-assign]
    await harness.verifier.refresh()
    assert "publishes no usable key" in harness.verifier.problem
