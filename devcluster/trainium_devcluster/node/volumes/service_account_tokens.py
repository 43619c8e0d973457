"""Request projected service account tokens, bound to the pod and an audience, and renew them before they expire.

Guarantees:
- The API server issues all tokens.
- It is renewed after 80 % of its life or 24 hours, as by a kubelet.
- If a renewal fails the old token is kept.
"""

import time
from dataclasses import dataclass, field

from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json, get_name, get_namespace, get_uid, parse_time

_RENEW_SHARE = 0.8
_MAX_AGE_SECONDS = 24 * 3600.0
_RETRY_SECONDS = 5.0
_DEFAULT_LIFETIME_SECONDS = 3600


@dataclass(slots=True)
class TokenSource:
    """A serviceAccountToken source of a projected volume."""

    api: Api
    pod: Json
    source: Json
    _token: str = ""
    _renew_at: float = field(default=0.0)

    async def get(self) -> str:
        """Return the token, after a renewal if it is due.

        Raises:
            ApiError: when there is no token yet and none can be had.
        """
        if self._token and time.time() < self._renew_at:
            return self._token
        try:
            await self._request()
        except ApiError:
            if not self._token:
                raise
            self.postpone()
        return self._token

    def renew_in(self) -> float:
        """Return the seconds until the next renewal."""
        return max(0.1, self._renew_at - time.time())

    def postpone(self) -> None:
        """Delay the next renewal by some seconds."""
        self._renew_at = max(self._renew_at, time.time() + _RETRY_SECONDS)

    async def _request(self) -> None:
        account = self.pod["spec"].get("serviceAccountName") or "default"
        audience = self.source.get("audience")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [audience] if audience else [],
                "expirationSeconds": self.source.get("expirationSeconds") or _DEFAULT_LIFETIME_SECONDS,
                "boundObjectRef": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": get_name(self.pod),
                    "uid": get_uid(self.pod),
                },
            },
        }
        asked = time.time()
        answer = await self.api.create(
            f"/api/v1/namespaces/{get_namespace(self.pod)}/serviceaccounts/{account}/token", body
        )
        life = parse_time(answer["status"]["expirationTimestamp"]) - asked
        self._token = answer["status"]["token"]
        self._renew_at = asked + min(life * _RENEW_SHARE, _MAX_AGE_SECONDS)
