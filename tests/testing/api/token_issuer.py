"""Issue tokens of ServiceAccounts as an API server does, with a real key."""

import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from trainium_contract.wire.worker_env import TOKEN_AUDIENCE

Json = dict[str, Any]
LIFETIME_SECONDS = 3600


class TokenIssuer:
    """One signing key, and the issuer that it signs for."""

    def __init__(self, key_id: str = "key-1", url: str = "https://kubernetes.default.svc.cluster.local") -> None:
        self.key_id = key_id
        self.url = url
        self.key = ec.generate_private_key(ec.SECP256R1())

    def key_set(self) -> Json:
        """Return the JSON Web Key Set that the API server publishes."""
        public = ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        return {"keys": [{**public, "use": "sig", "kid": self.key_id, "alg": "ES256"}]}

    def documents(self) -> dict[str, Json]:
        """Return the published documents by path."""
        return {"/.well-known/openid-configuration": {"issuer": self.url}, "/openid/v1/jwks": self.key_set()}

    async def read(self) -> tuple[str, Json]:
        """Return issuer and keys, as `read_token_keys` does."""
        return self.url, self.key_set()

    def claims(self, pod: str, uid: str = "", namespace: str = "team", **changes: Any) -> Json:
        """Return the claims of a kubelet's token for a pod; None removes a claim."""
        now = int(time.time())
        bound = {
            "namespace": namespace,
            "node": {"name": "node-0", "uid": "node-uid"},
            "pod": {"name": pod, "uid": uid or f"uid-{pod}"},
            "serviceaccount": {"name": "default", "uid": "account-uid"},
        }
        claims = {
            "iss": self.url,
            "aud": [TOKEN_AUDIENCE],
            "sub": f"system:serviceaccount:{namespace}:default",
            "exp": now + LIFETIME_SECONDS,
            "iat": now,
            "nbf": now,
            "kubernetes.io": bound,
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def sign(self, claims: Json, **header: Any) -> str:
        """Return a token with these claims."""
        return jwt.encode(claims, self.key, "ES256", {"kid": self.key_id, **header})

    def token(self, pod: str, uid: str = "", namespace: str = "team", **changes: Any) -> str:
        """Return a kubelet's token for a pod."""
        return self.sign(self.claims(pod, uid, namespace, **changes))


ISSUER = TokenIssuer()
"""The issuer of all fake clusters."""
