"""Kubernetes objects and logs without secrets, for a bug report.

Invariants: values of environment variables, arguments that look like secrets, kubectl's copy of what was applied and
the managers' bookkeeping never get out; everything else that looks like a key, token or password is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainium_contract.redaction import redact_secrets

HIDDEN = "***"
_DROPPED = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
_SECRET_NAME = re.compile(r"(?i)secret|token|passw|credential|api[-_]?key|access[-_]?key|private")
_REFERENCES = frozenset({
    "secretName", "secretRef", "secretKeyRef", "serviceAccountToken", "automountServiceAccountToken", "tokenizer",
    "imagePullSecrets", "tokensPerSecond", "tokens", "tokenExpirationSeconds",
})  # fmt: skip
"""Names that speak of secrets and hold none."""


def redacted(value: Any) -> Any:
    """Copy a value without secrets."""
    if isinstance(value, Mapping):
        return {key: _field(str(key), each) for key, each in value.items() if key not in _DROPPED}
    if isinstance(value, list):
        return [redacted(each) for each in value]
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Text without what looks like a secret."""
    return "\n".join(redact_secrets(line) for line in text.split("\n"))


def _field(key: str, value: Any) -> Any:
    if key == "env" and isinstance(value, list):
        return [_variable(each) for each in value]
    if isinstance(value, str) and value and _SECRET_NAME.search(key) and key not in _REFERENCES:
        return HIDDEN
    return redacted(value)


def _variable(raw: Any) -> Any:
    """Copy an environment variable: its name, and the source of its value; the operator's own are not secret."""
    if not isinstance(raw, Mapping) or "value" not in raw:
        return redacted(raw)
    name = str(raw.get("name") or "")
    ours = name.startswith("TRAINIUM_") or name in {"POD_IP", "OMP_NUM_THREADS", "PYTHONPATH"}
    return {**raw, "value": redacted_text(str(raw["value"])) if ours else HIDDEN}
