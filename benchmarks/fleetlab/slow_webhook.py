"""A webhook that keeps every write of the operator waiting, and refuses the pods of some jobs.

Invariant: only what the operator's own account writes is kept waiting; fake kubelets and the benchmark are not.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

import trustme
from aiohttp import web

from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_devcluster.controlplane.components import HOST

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from benchmarks.fleetlab.kube import Kube

Json = dict[str, Any]
_PATH = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


class SlowWebhook:
    """Serves within its `async with` block."""

    def __init__(self, folder: Path, account: str, *, seconds: float) -> None:
        """`account`: the user whose writes wait for so many `seconds`."""
        self._folder = folder
        self._account = account
        self._seconds = seconds
        self._runner: web.AppRunner | None = None
        self.refuses: Collection[str] = ()
        """Jobs whose pods are refused."""
        self.delayed = 0
        self.refused: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.router.add_post("/", self._review)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def install(self, kube: Kube) -> None:
        """Begin to listen, and have the API server ask."""
        assert self._runner is not None
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(HOST).configure_cert(context)
        site = web.TCPSite(self._runner, HOST, 0, ssl_context=context)
        await site.start()
        port = self._runner.addresses[0][1]
        rule = {"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE", "DELETE"], "scope": "*"}
        resources = ["pods", "configmaps", "services", "trainingjobs", "trainingjobs/status"]
        bundle = base64.b64encode(authority.cert_pem.bytes()).decode()
        webhook = {
            "name": "slow.benchmarks.trainium.dev",
            "clientConfig": {"url": f"https://{HOST}:{port}/", "caBundle": bundle},
            "rules": [{**rule, "resources": resources}],
            "matchConditions": [{"name": "operator", "expression": f"request.userInfo.username == '{self._account}'"}],
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Fail",
            "timeoutSeconds": 10,
        }
        kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
        await kube.request("POST", _PATH, {**kind, "metadata": {"name": "slow"}, "webhooks": [webhook]})

    async def _review(self, request: web.Request) -> web.Response:
        asked: Json = json.loads(await request.text())["request"]
        self.delayed += 1
        await asyncio.sleep(self._seconds)
        job = ((asked.get("object") or {}).get("metadata", {}).get("labels") or {}).get(LABEL_JOB, "")
        refused = asked["resource"]["resource"] == "pods" and asked["operation"] == "CREATE" and job in self.refuses
        answer: Json = {"uid": asked["uid"], "allowed": not refused}
        if refused:
            self.refused[job] += 1
            answer["status"] = {"code": 403, "message": "pods of this job are not wanted here"}
        return web.json_response(
            {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
        )  # fmt: skip
