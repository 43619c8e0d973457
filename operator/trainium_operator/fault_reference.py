"""`docs/causes.md`: the one table of faults for people, written from the table itself.

Invariant: all of the table is in the text, so that the text cannot go stale unnoticed (`generate --check`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode, Response, verdict_of
from trainium_contract.faults import KERNEL_ROWS, STATUSES
from trainium_operator.plan.faults.fault_table import CAUSES, CONDITIONS, LABELS, POD_REASONS, SILENCE, TAINTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_contract.exit_codes import Verdict

_ANSWERS = {
    Response.COMPLETE: "complete when all have",
    Response.STOP: "stop",
    Response.RESTART_IN_PLACE: "restart in place",
    Response.RESTART_UNCOUNTED: "start again",
    Response.REPLACE_WORKER: "replace the worker",
    Response.REPLACE_NODE: "replace the worker, avoid the node",
    Response.RETRY_WITH_BACKOFF: "restart in place with pauses",
}

_BEGINNING = """# Causes

What each sign of a fault is put down to, and what each cause asks for; what happens then is in [faults.md](faults.md).
A rule of the job (`spec.recovery.rules`) comes before all of this. "Again" means: the same cause once more without a
new step in between, for causes that blame the node: on the same worker within a week. A sign marked † may be reported
by healthy workers because of another one; its reporter is blamed only when it was the only one, twice."""


def reference_text(header: str) -> str:
    """The whole file; `header` says how it is made."""
    parts = [
        _BEGINNING,
        "## Causes\n\nBy severity: when several workers are lost at once, the first names the interruption.\n\n"
        + _table(
            ("cause", "what happened", "blame", "answer", "again", "budget", "node suspected when lost"),
            (
                (
                    f"`{row.cause}`",
                    row.sentence,
                    row.blame.value.lower(),
                    _ANSWERS[row.first],
                    _again(row.first, row.again),
                    row.budget.value if row.budget else "not counted",
                    "yes" if row.suspects_node else "",
                )
                for row in CAUSES
            ),
        ),
        "## Exit codes of a training process\n\n"
        + _signs((f"{code.value}", verdict_of(code)) for code in ExitCode)
        + "\n\nAny other code is a crash (128 + signal for a killed process), unless one of the next two tables "
        "explains it.",
        "## Status of the Neuron runtime\n\nRead from the last output of a process. When several are named, the first "
        "of these counts. A status explains a crash; to a lost peer (76) only one of a device or the network adds "
        "anything.\n\n" + _signs((f"{row.status} `{row.name}`", row.verdict) for row in STATUSES),
        "## Kernel lines\n\nRead from `/dev/kmsg` (or `TRAINIUM_KERNEL_LOG`) where the pod may. The four marked ‡ are "
        "a fault by themselves; the others explain the end of a process within two minutes, that of memory only a "
        "SIGKILL.\n\n" + _signs((f"`{row.name}`" + (" ‡" if row.decisive else ""), row.verdict) for row in KERNEL_ROWS),
        "## Pods, nodes, silence\n\n"
        + _table(
            ("sign", "cause"),
            [
                *((f"pod reason `{reason}`", f"`{cause}`") for reason, cause in POD_REASONS.items()),
                *(
                    (f"node condition `{kind}`" + (f", reason `{reason}`" if reason != "*" else ""), f"`{cause}`")
                    for (kind, reason), cause in CONDITIONS.items()
                ),
                *((f"taint `{key}`", f"`{cause}`") for key, cause in TAINTS.items()),
                *((f"node label `{key}={value}`", f"`{cause}`") for (key, value), cause in LABELS.items()),
                ("no heartbeats, and something else says that the worker is lost", f"`{SILENCE}`"),
            ],
        ),
    ]
    return f"<!-- {header} -->\n" + "\n\n".join(parts) + "\n"


def _signs(rows: Iterable[tuple[str, Verdict]]) -> str:
    return _table(
        ("sign", "meaning", "cause", "answer", "again"),
        (
            (
                sign + (" †" if verdict.hearsay else ""),
                verdict.sentence,
                f"`{verdict.cause}`",
                _ANSWERS[verdict.response],
                _again(verdict.response, verdict.again),
            )
            for sign, verdict in rows
        ),
    )


def _again(first: Response, again: Response) -> str:
    return "" if again is first else _ANSWERS[again]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
