"""The table of faults for people holds all of the table in code, and docs/faults.md points to it."""

from pathlib import Path

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.signs import (
    CONDITIONS,
    EVICTIONS,
    KERNEL_LINES,
    LABELS,
    OUTPUT_LINES,
    POD_REASONS,
    RUNTIME_STATUSES,
    TAINTS,
)
from trainium_operator.plan.model.reasons import Reason

DOCS = Path(__file__).parents[4] / "docs"
CAUSES = (DOCS / "causes.md").read_text(encoding="utf-8")
FAULTS = (DOCS / "faults.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")


def test_every_cause_and_sign_is_on_the_causes_page() -> None:
    signs = [
        *(f"`{cause}`" for cause in Cause),
        *(f"| {code.value}" for code in ExitCode),
        *(f"{sign.number} `{sign.key}`" for sign in RUNTIME_STATUSES),
        *(f"`{sign.key}`" for sign in (*OUTPUT_LINES, *KERNEL_LINES)),
        *(f"`{sign.key}`" for sign in (*POD_REASONS, *EVICTIONS, *CONDITIONS, *TAINTS)),
        *(f"`{sign.key}={sign.value}`" for sign in LABELS),
    ]
    assert [sign for sign in signs if sign not in CAUSES] == []


def test_every_verdict_is_on_the_page_of_troubleshooting() -> None:
    reasons = (
        Reason.USER_ERROR,
        Reason.NUMERICAL,
        Reason.OUT_OF_MEMORY,
        Reason.ACCELERATOR_RUNTIME,
        Reason.STOPPED_BY_RULE,
        Reason.WORKERS_DO_NOT_START,
        Reason.BUDGET_EXHAUSTED,
    )
    assert [reason for reason in reasons if f"`{reason}`" not in TROUBLESHOOTING] == []
    assert "(troubleshooting.md#by-verdict-the-job-has-failed)" in FAULTS
    assert "(causes.md)" in FAULTS
