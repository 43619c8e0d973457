"""Metrics over HTTPS on a real API server: the chart's rights and arguments, real tokens, the operator as a process."""

import base64
import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tests.cluster.definition.conftest import Api
from tests.testing.operator.local_operator import LocalOperator, request_token, run_local_operator
from tests.testing.suite.timeouts import scaled, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SYSTEM, PEOPLE = "read-system", "read-monitoring"
RELEASE = "read"
ACCOUNT = f"{RELEASE}-trainium-operator"
SETTINGS = (
    "metrics.secure=true,metrics.readers[0].kind=ServiceAccount,metrics.readers[0].name=prometheus,"
    f"metrics.readers[0].namespace={PEOPLE}"
)


@pytest.fixture(scope="module")
def readable(crd_api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalOperator]:
    if crd_api.is_existing:
        pytest.skip("this test installs an operator, which an existing cluster does not allow")
    crd_api.make_namespaces(SYSTEM, PEOPLE)
    crd_api.kubectl("create", "serviceaccount", "prometheus", "-n", PEOPLE)
    crd_api.kubectl("create", "serviceaccount", "tenant", "-n", PEOPLE)
    with run_local_operator(crd_api, tmp_path_factory.mktemp("readable"), RELEASE, SYSTEM, SETTINGS) as running:
        yield running
    crd_api.delete_namespaces(SYSTEM, PEOPLE)


def test_only_listed_readers_get_metrics(readable: LocalOperator) -> None:
    status, text = readable.get(request_token(readable.api, "prometheus", PEOPLE))
    assert status == 200, readable.log.read_text()
    assert "trainingjob_operator_leader" in text
    tenant = f"system:serviceaccount:{PEOPLE}:tenant"
    assert readable.get(request_token(readable.api, "tenant", PEOPLE)) == (
        403,
        f"{tenant} may not get the nonResourceURL /metrics\n",
    )
    assert readable.get()[0] == 401
    assert readable.get("forged")[0] == 401


def test_tokens_of_other_audiences_expired_or_of_deleted_accounts_are_refused(
    readable: LocalOperator,
) -> None:
    api = readable.api
    agents = api.kubectl("create", "token", "prometheus", "-n", PEOPLE, "--audience=trainium-coordinator").strip()
    assert readable.get(agents)[0] == 401
    good = request_token(api, "prometheus", PEOPLE)
    key = Path(api.variables["KUBECONFIG"]).parent / "pki" / "service-account.key"
    assert readable.get(with_expiry(good, key, ends_in=600))[0] == 200, "the API server signs with its own key"
    assert readable.get(with_expiry(good, key, ends_in=-60))[0] == 401
    api.kubectl("create", "serviceaccount", "gone", "-n", PEOPLE)
    missing = request_token(api, "gone", PEOPLE)
    assert readable.get(missing)[0] == 403
    api.kubectl("delete", "serviceaccount", "gone", "-n", PEOPLE)
    new_token = request_token(api, "tenant", PEOPLE)
    assert (readable.get(new_token)[0], readable.get(with_expiry(missing, key, ends_in=500))[0]) == (403, 401)


def with_expiry(token: str, key: Path, *, ends_in: float) -> str:
    """Return the token with another expiry, signed with the key of the API server."""
    header, payload, _ = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    now = int(time.time())
    claims.update(iat=now - 1000, nbf=now - 1000, exp=now + int(ends_in))
    body = f"{header}.{encode_base64url(json.dumps(claims).encode())}"
    signer = load_pem_private_key(key.read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    first, second = decode_dss_signature(signer.sign(body.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{body}.{encode_base64url(first.to_bytes(32, 'big') + second.to_bytes(32, 'big'))}"


def encode_base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def read_renewal(api: Api) -> tuple[str, str]:
    """Return the holder of the Lease and the time of its renewal."""
    spec = json.loads(api.kubectl("get", "lease", ACCOUNT, "-n", SYSTEM, "-o", "json"))["spec"]
    return spec["holderIdentity"], spec["renewTime"]


@pytest.mark.long
def test_bad_tokens_delay_neither_the_lease_nor_scrapes(readable: LocalOperator) -> None:
    good = request_token(readable.api, "prometheus", PEOPLE)
    assert readable.get(good)[0] == 200
    over = threading.Event()
    refused: list[int] = []

    def flood(source: str, part: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            try:
                refused.append(readable.get(f"bad-{part}-{number}", source)[0])
            except (OSError, http.client.HTTPException):
                refused.append(0)  # closed without an answer

    threads = [threading.Thread(target=flood, args=(f"127.0.0.{9 + number % 3}", number)) for number in range(12)]
    holder, first = read_renewal(readable.api)
    for thread in threads:
        thread.start()
    renewals = {first}
    try:
        answers = set()

        def is_renewed_often() -> bool:
            answers.add(readable.get(good)[0])
            renewals.add(read_renewal(readable.api)[1])
            return len(renewals) > 3 and len(refused) > 200

        until(is_renewed_often, lambda: f"{renewals} {len(refused)}")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert answers == {200}
    assert set(refused) <= {0, 401, 429}
    assert refused.count(401) <= 3 * 10 + 12, "few of them reached the API server"
    assert read_renewal(readable.api)[0] == holder
    assert readable.process.poll() is None


def test_access_reviews_are_allowed_only_for_readers(readable: LocalOperator) -> None:
    account = f"--as=system:serviceaccount:{SYSTEM}:{ACCOUNT}"
    command = ("kubectl", "auth", "can-i", "create", "subjectaccessreviews.authorization.k8s.io", account)
    assert readable.api.run(*command).stdout.strip() == "yes"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus on PATH")
def test_prometheus_scrapes_with_its_token_and_the_operators_authority(readable: LocalOperator, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(request_token(readable.api, "prometheus", PEOPLE))
    (tmp_path / "ca.crt").write_text(readable.authority)
    scrape = {
        "job_name": "operator",
        "scheme": "https",
        "authorization": {"credentials_file": str(tmp_path / "token")},
        "tls_config": {
            "ca_file": str(tmp_path / "ca.crt"),
            "server_name": f"{ACCOUNT}-coordinator.{SYSTEM}.svc",
        },
        "static_configs": [{"targets": [f"127.0.0.1:{readable.port}"]}],
    }
    (tmp_path / "prometheus.yaml").write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]})
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    query = urllib.parse.urlencode({"query": "trainingjob_operator_leader"})

    def run_query() -> list[Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=scaled(5)) as answer:
                result: list[Any] = json.load(answer)["data"]["result"]
        except OSError:
            return []
        return result

    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            (figure,) = until(run_query, log.read_text)
        finally:
            process.terminate()
    assert figure["value"][1] == "1"
