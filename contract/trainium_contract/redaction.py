"""Remove secrets from text for a status, an event or a log, because a program's output may contain some.

Invariant: the result is never longer than the text, and text without secrets is returned unchanged.
"""

from __future__ import annotations

import re

_HIDDEN = "***"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), _HIDDEN),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), _HIDDEN),
    (re.compile(r"\b(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abp]|sk)[_-][A-Za-z0-9_-]{16,}"), _HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL), _HIDDEN),
    (re.compile(r"(?i)\b(bearer|basic) +[A-Za-z0-9+/_.=-]{8,}"), rf"\1 {_HIDDEN}"),
    (re.compile(r"(://[^\s/:@]{1,128}:)[^\s/@]{1,256}@"), rf"\1{_HIDDEN}@"),
    (
        re.compile(
            r"(?i)((?:secret|password|passwd|api[_-]?key|access[_-]?key|auth[_-]?token|session[_-]?token"
            r"|security-token|x-amz-signature|x-amz-credential)[\w-]{0,32}[\"']?\s{0,3}[:=]\s{0,3}[\"']?)[^\s\"',;&]{4,}"
        ),
        rf"\1{_HIDDEN}",
    ),
)


def redact_secrets(text: str) -> str:
    """Replace keys, tokens and passwords that have a known form by `***`."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
