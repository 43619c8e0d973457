"""CEL rules of `spec.program`: its fields, and the fields of the job that only the built-in trainer has."""

from __future__ import annotations

from trainium_contract.definition.cel import RefusalReason, Rule, format_message
from trainium_contract.definition.size_expressions import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    MODEL_PARALLEL,
    NODES,
    OUT_OF_BOUNDS,
    SIZE_FIELDS_UNCHANGED,
    bind_cores,
    fills_batch,
    format_size_message,
    is_divisible,
)
from trainium_contract.spec.program import MAX_COMMAND, STEP_GROUP

_COMMAND_LENGTH = (
    "(self.command.map(a, size(a)).sum() + (has(self.args) ? self.args.map(a, size(a)).sum() : 0)"
    " + (has(self.precompile) ? self.precompile.command.map(a, size(a)).sum() : 0))"
)

PROGRAM_RULES: tuple[Rule, ...] = (
    # A pattern that does not compile fails the evaluation, and the API server shows the parser's error and the message.
    Rule(
        "!has(self.progress) || !has(self.progress.pattern) || ''.matches(self.progress.pattern) in [true, false]",
        "program.progress.pattern is no regular expression: correct it (syntax of RE2)",
        ".progress.pattern",
    ),
    Rule(
        f"""!has(self.progress) || !has(self.progress.pattern)
        || self.progress.pattern.contains('(?P<{STEP_GROUP}>')""",
        r"program.progress.pattern has no group (?P<step>\d+) that holds the number of the step: add it",
        ".progress.pattern",
    ),
    Rule(
        f"{_COMMAND_LENGTH} <= {MAX_COMMAND}",
        f"program.command, args and precompile.command have too many characters together, at most {MAX_COMMAND}: move "
        "what is long into a file",
        ".command",
        format_message(
            f"program.command, args and precompile.command have %s characters together, and at most {MAX_COMMAND} are "
            "possible: move what is long into a file",
            _COMMAND_LENGTH,
        ),
    ),
    Rule(
        "!has(self.batch) || self.batch.microSize <= self.batch.globalSize",
        "program.batch.microSize must not be above program.batch.globalSize",
        ".batch.microSize",
        format_message(
            "program.batch.microSize %s is above program.batch.globalSize %s: lower microSize or raise globalSize",
            "self.batch.microSize",
            "self.batch.globalSize",
        ),
    ),
)
"""Rules of `spec.program`."""


def _requires_trainer(field: str, given: str, instead: str) -> Rule:
    return Rule(
        f"!has(self.program) || !({given})",
        f"{field} needs spec.trainer, and the job has spec.program: {instead}",
        f".{field}",
        reason=RefusalReason.FORBIDDEN,
    )


PROGRAM_SPEC_RULES: tuple[Rule, ...] = (
    Rule(
        "!has(self.trainer) || !has(self.program)",
        "trainer and program are both given: leave one of them out; data, artifacts and evaluate are the built-in "
        "trainer's",
        ".program",
        reason=RefusalReason.FORBIDDEN,
    ),
    Rule(
        "has(self.trainer) || has(self.program)",
        "give trainer ({} takes all defaults) for the built-in trainer, or program for another training program",
        ".trainer",
        reason=RefusalReason.REQUIRED,
    ),
    _requires_trainer("image", "has(self.image)", "give program.image instead"),
    _requires_trainer("precompile.enabled", "self.precompile.enabled", "give program.precompile instead"),
    _requires_trainer(
        "health.preflight.checks",
        "has(self.health.preflight.checks) && 'Bandwidth' in self.health.preflight.checks",
        "Bandwidth exchanges through the collectives of the trainer's ranks, remove it from the list",
    ),
    _requires_trainer(
        "checkpoint.milestones.everyTokens",
        "has(self.checkpoint.milestones) && has(self.checkpoint.milestones.everyTokens)",
        "a program writes its own checkpoints, leave it out",
    ),
    _requires_trainer(
        "checkpoint.storage.takeOver",
        "has(self.checkpoint.storage) && has(self.checkpoint.storage.takeOver)",
        "a program's folder belongs to no job, leave it out",
    ),
    _requires_trainer(
        "checkpoint.storage.subPath",
        "has(self.checkpoint.storage) && has(self.checkpoint.storage.subPath)",
        "name the folder in program.command and program.checkpoints.path",
    ),
    _requires_trainer(
        "checkpoint.storage.uri",
        "has(self.checkpoint.storage) && has(self.checkpoint.storage.uri)",
        "let the program write to the bucket, or mount a volume (hostPath, persistentVolumeClaim)",
    ),
    _requires_trainer(
        "elasticity.sizes",
        "self.elasticity.sizes == 'Even' && !has(self.program.batch)",
        "give program.batch, with which only sizes at which it divides are legal",
    ),
    Rule(
        """!has(self.program) || self.program.resize != 'Never' || !has(self.workers.minReplicas)
        || self.workers.minReplicas == self.workers.replicas""",
        "program.resize is Never, so the job cannot shrink: leave workers.minReplicas out, or set resize to Restart",
        ".workers.minReplicas",
    ),
    Rule(
        "!has(self.program) || self.program.resize != 'Never' || self.elasticity.idleNodes == 'Leave'",
        "program.resize is Never, so the job cannot grow: set elasticity.idleNodes to Leave, or resize to Restart",
        ".elasticity.idleNodes",
    ),
    Rule(
        f"""!has(self.program) || {OUT_OF_BOUNDS} || {SIZE_FIELDS_UNCHANGED}
        || {bind_cores(f"!({is_divisible(NODES)}) || {fills_batch(NODES)}")}""",
        "program.batch.globalSize must be divisible by data-parallel degree x microSize",
        ".workers.replicas",
        format_size_message(
            "workers.replicas %s gives a data-parallel degree of %s, but program.batch.globalSize %s is not divisible "
            "by that x microSize %s: change replicas or program.batch",
            NODES,
            f"{NODES} * c / {MODEL_PARALLEL}",
            GLOBAL_BATCH,
            MICRO_BATCH,
        ),
        optional_old=True,
    ),
)
"""Rules of `spec` that concern programs."""
