"""Render `docs/causes.md`, the fault table for users, from the table in the code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.markdown_table import render_table
from trainium_contract.faults.causes import CAUSES
from trainium_contract.faults.classify import classify_sign, get_default_responses
from trainium_contract.faults.responses import Response, Responses
from trainium_contract.faults.signs import (
    CLAIM_HEALTH,
    CONDITIONS,
    DEVICE_TAINTS,
    DISRUPTIONS,
    EVICTIONS,
    EXIT_CODES,
    KERNEL_LINES,
    LABELS,
    OUTPUT_LINES,
    POD_REASONS,
    RUNTIME_STATUSES,
    SILENCE,
    TAINTS,
    SignKind,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_contract.faults.signs import Sign

_RESPONSE_TEXTS = {
    Response.COMPLETE: "complete when all workers have",
    Response.STOP: "stop",
    Response.RESTART_IN_PLACE: "restart in place",
    Response.RESTART_UNCOUNTED: "restart, not counted",
    Response.REPLACE_WORKER: "replace the worker",
    Response.REPLACE_NODE: "replace the worker, avoid the node",
    Response.RETRY_WITH_BACKOFF: "restart in place with backoff",
}

_POD_AND_NODE_SIGNS = (
    *POD_REASONS,
    *EVICTIONS,
    *DISRUPTIONS,
    *CONDITIONS,
    *TAINTS,
    *LABELS,
    *DEVICE_TAINTS,
    *CLAIM_HEALTH,
    SILENCE,
)

_INTRODUCTION = """# Causes

This page lists the cause of each sign of a fault, and the response to each cause. [Fault handling](faults.md)
describes the responses. A rule of the job (`spec.recovery.rules`) takes precedence. "Repeated" means the same cause
once more without a new step in between or, for causes that blame the node, on the same worker within a week. Healthy
workers may report a sign marked † because of another worker; its reporter is blamed only if it alone reports it,
twice."""


def render_reference(header: str) -> str:
    """Return the page, with `header` as the first line."""
    parts = [
        _INTRODUCTION,
        "## Causes\n\nBy severity: if several workers fail at once, the first names the interruption.\n\n"
        + render_table(
            ("cause", "meaning", "blame", "response", "repeated", "budget", "node suspected after a failure"),
            (
                (
                    f"`{row.cause}`",
                    row.sentence,
                    row.blame.value.lower(),
                    *_list_response_texts(get_default_responses(row.cause)),
                    row.budget.value if row.budget else "not counted",
                    "yes" if row.suspects_node else "",
                )
                for row in CAUSES
            ),
        ),
        "## Exit codes of a training process\n\n"
        + _sign_table(EXIT_CODES)
        + "\n\nAny other code is a crash (128 + signal for a killed process), unless one of the next three tables "
        "explains it.",
        "## Status of the Neuron runtime\n\nRead from the last output of a process. When several are named, the first "
        "of these counts. A status explains a crash. For exit code 76 (lost peer), only a status of a device or the "
        "network changes the cause.\n\n" + _sign_table(RUNTIME_STATUSES),
        "## Lines of output\n\nRead from the newest error in the output of a process that ended by itself with a code "
        "outside the contract. A line below means that another process ended before.\n\n" + _sign_table(OUTPUT_LINES),
        "## Kernel lines\n\nRead from `/dev/kmsg` (or `TRAINIUM_KERNEL_LOG`) where the pod may. The "
        f"{sum(sign.decisive for sign in KERNEL_LINES)} lines marked ‡ are a fault by themselves; the others explain "
        "the end of a process within two minutes, `out of memory` only a SIGKILL. Lines marked § are the agent's: it "
        "writes them when the counters of its container's cgroup (`memory.events`, or `memory.oom_control` of version "
        "1) rise, which every pod may read.\n\n" + _sign_table(KERNEL_LINES),
        "## Pods, nodes, silence\n\n" + render_table(("signs", "cause"), _group_by_cause(_POD_AND_NODE_SIGNS)),
    ]
    return f"<!-- {header} -->\n" + "\n\n".join(parts) + "\n"


def _sign_table(signs: Iterable[Sign]) -> str:
    rows = []
    for sign in signs:
        verdict = classify_sign(sign)
        rows.append(
            (_sign_text(sign), verdict.sentence, f"`{verdict.cause}`", *_list_response_texts(verdict.responses))
        )
    return render_table(("sign", "meaning", "cause", "response", "repeated"), rows)


def _group_by_cause(signs: Iterable[Sign]) -> list[tuple[str, str]]:
    """Return a row for each kind of sign and cause, with the names of its signs."""
    groups: dict[tuple[str, str], list[str]] = {}
    for sign in signs:
        kind = str(sign.kind)
        groups.setdefault((kind, f"`{sign.cause}`"), []).append(_sign_text(sign).removeprefix(f"{kind} "))
    return [
        (f"{kind} {', '.join(names)}" if kind != SignKind.SILENCE else names[0], cause)
        for (kind, cause), names in groups.items()
    ]


def _sign_text(sign: Sign) -> str:
    """Return the kind, name and marks of a sign."""
    marks = " ‡" * sign.decisive + " §" * sign.of_container + " †" * sign.indirect
    if sign.kind in (SignKind.EXIT_CODE, SignKind.SILENCE):
        return f"{sign.key}{marks}"
    if sign.kind is SignKind.RUNTIME_STATUS:
        return f"{sign.number} `{sign.key}`{marks}"
    if sign.kind in (SignKind.KERNEL_LINE, SignKind.OUTPUT_LINE):
        return f"`{sign.key}`{marks}"
    if sign.kind is SignKind.LABEL:
        return f"{sign.kind} `{sign.key}={sign.value}`"
    return f"{sign.kind} `{sign.key}`" + (f" (reason `{sign.value}`)" if sign.value != "*" else "")


def _list_response_texts(responses: Responses) -> tuple[str, str]:
    """Return the first response, and the repeated one if it differs."""
    return _RESPONSE_TEXTS[responses.first], "" if responses.repeated is responses.first else _RESPONSE_TEXTS[
        responses.repeated
    ]
