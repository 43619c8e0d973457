"""Rules in the Common Expression Language (CEL) that the API server checks at every write, beyond the schema.

Each rule refuses a write with a sentence and the remedy, at the field to change. Invariants: a rule reads
only bounded fields (the API server estimates its cost), needs nothing newer than Kubernetes 1.30, and agrees with
`sizes.BatchShape`, from which it is tested. A job's size is judged when the job is created, and again when parallelism,
batch or accelerator change; a later size alone (`kubectl scale`, an autoscaler) is floored to a legal one by the
operator instead (docs/decisions/0084-any-size.md).
"""

from __future__ import annotations

from trainium_contract.accelerators import INSTANCES
from trainium_contract.definition.cel import RefusalReason, Rule, format_message
from trainium_contract.definition.effect_rules import EFFECT_RULES
from trainium_contract.definition.program_rules import PROGRAM_SPEC_RULES
from trainium_contract.definition.role_rules import ROLE_ROOT_RULES, ROLE_SPEC_RULES, build_role_port_rule
from trainium_contract.definition.size_expressions import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    MIN_NODES,
    MODEL_PARALLEL,
    NODES,
    OUT_OF_BOUNDS,
    SIZE_FIELDS_UNCHANGED,
    SIZE_RANGE_UNCHANGED,
    SOME_SIZE_IS_LEGAL,
    bind_cores,
    fills_batch,
    format_size_message,
    is_divisible,
)
from trainium_contract.definition.trainer_rules import TRAINER_RULES
from trainium_contract.faults.causes import NO_FAULT_CAUSES, USER_CAUSES, Cause
from trainium_contract.job import MAX_NAME
from trainium_contract.spec.managed_by import MANAGER
from trainium_contract.spec.workers import DEVICE_MISSING
from trainium_contract.trainer.config import TrainerSpec

_KNOWN_TYPES = "[" + ", ".join(f"'{name}'" for name in INSTANCES) + "]"
_KNOWN_TYPES_TEXT = ", ".join(INSTANCES)


_SUSPEND_INSTEAD = (
    "a job trains on 1 node at least: to give all of them back, leave replicas as it is and set spec.suspend: true "
    "(kubectl trn suspend NAME)"
)

SPEC_RULES: tuple[Rule, ...] = (
    Rule(
        f"{NODES} >= 1",
        f"workers.replicas is below 1; {_SUSPEND_INSTEAD}",
        ".workers.replicas",
        format_message(f"workers.replicas is %s; {_SUSPEND_INSTEAD}", NODES),
    ),
    Rule(
        f"{NODES} < 1 || !has(self.workers.minReplicas) || self.workers.minReplicas <= {NODES}",
        "workers.minReplicas must not be above workers.replicas: lower minReplicas or raise replicas",
        ".workers.minReplicas",
        format_message(
            "workers.minReplicas %s is above workers.replicas %s: lower minReplicas or raise replicas",
            "self.workers.minReplicas",
            NODES,
        ),
    ),
    Rule(
        f"!has(self.workers.maxReplicas) || {NODES} <= self.workers.maxReplicas",
        "workers.replicas must not be above workers.maxReplicas: lower replicas or raise maxReplicas",
        ".workers.replicas",
        format_message(
            "workers.replicas %s is above workers.maxReplicas %s: lower replicas or raise maxReplicas",
            NODES,
            "self.workers.maxReplicas",
        ),
    ),
    Rule(
        f"{OUT_OF_BOUNDS} || {SIZE_FIELDS_UNCHANGED} || {bind_cores(f'{NODES} % u == 0')}",
        "workers.replicas must be whole UltraServers (accelerator.unit)",
        ".workers.replicas",
        format_size_message("workers.replicas %s is not a multiple of the %s nodes of an UltraServer", NODES, "u"),
        optional_old=True,
    ),
    Rule(
        bind_cores("self.workers.spares % u == 0"),
        "workers.spares must be whole UltraServers (accelerator.unit)",
        ".workers.spares",
    ),
    Rule(
        "self.elasticity.idleNodes == 'Leave' || self.workers.accelerator.?unit.orValue('Node') == 'Node'",
        "elasticity.idleNodes Take is for single nodes: leave it out, or leave out accelerator.unit UltraServer",
        ".elasticity.idleNodes",
        reason=RefusalReason.FORBIDDEN,
    ),
    Rule(
        "self.elasticity.idleNodes == 'Leave' || has(self.workers.maxReplicas)",
        "elasticity.idleNodes Take needs workers.maxReplicas: give the number of nodes to which the job may grow",
        ".elasticity.idleNodes",
    ),
    Rule(
        f"{OUT_OF_BOUNDS} || {SIZE_FIELDS_UNCHANGED} || {bind_cores(is_divisible(NODES))}",
        "the training processes (replicas x cores per node) must be divisible by parallelism.tensor x pipeline x "
        "context",
        ".workers.replicas",
        format_size_message(
            "workers.replicas %s x %s cores per node = %s training processes, not divisible by parallelism.tensor x "
            "pipeline x context = %s: change replicas or parallelism",
            NODES,
            "c",
            f"{NODES} * c",
            MODEL_PARALLEL,
        ),
        optional_old=True,
    ),
    Rule(
        f"""!has(self.trainer) || {OUT_OF_BOUNDS} || {SIZE_FIELDS_UNCHANGED}
        || {bind_cores(f"!({is_divisible(NODES)}) || {fills_batch(NODES)}")}""",
        "with elasticity.sizes Even trainer.batch.globalSize must be divisible by data-parallel degree x microSize",
        ".workers.replicas",
        format_size_message(
            "workers.replicas %s gives a data-parallel degree of %s, but trainer.batch.globalSize %s is not divisible "
            "by that x microSize %s: change replicas or trainer.batch, or set elasticity.sizes to Any",
            NODES,
            f"{NODES} * c / {MODEL_PARALLEL}",
            GLOBAL_BATCH,
            MICRO_BATCH,
        ),
        optional_old=True,
    ),
    Rule(
        f"{OUT_OF_BOUNDS} || !{SIZE_FIELDS_UNCHANGED} || {SIZE_RANGE_UNCHANGED} || {bind_cores(SOME_SIZE_IS_LEGAL)}",
        "no size between workers.minReplicas and workers.replicas is legal: change replicas or minReplicas",
        ".workers.replicas",
        format_size_message(
            "no size from %s to %s is legal for parallelism and batch: change workers.replicas or minReplicas",
            MIN_NODES,
            NODES,
        ),
        optional_old=True,
    ),
    Rule(
        f"""!has(self.workers.accelerator.instanceType) || self.workers.accelerator.instanceType in {_KNOWN_TYPES}
        || has(self.workers.accelerator.resources) || has(self.workers.accelerator.coresPerNode)""",
        f"unknown instance type; known are {_KNOWN_TYPES_TEXT}; for another one give resources and coresPerNode too",
        ".workers.accelerator.instanceType",
        format_message(
            f"unknown instance type %s; known are {_KNOWN_TYPES_TEXT}; "
            "for another one give resources and coresPerNode too",
            "self.workers.accelerator.instanceType",
        ),
    ),
    Rule(
        """self.workers.accelerator.device == 'cpu' || has(self.workers.accelerator.instanceType)
        || has(self.workers.accelerator.resources) || has(self.workers.accelerator.coresPerNode)""",
        DEVICE_MISSING,
        ".workers.accelerator",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        """!has(self.startupDeadlineSeconds) || !has(self.activeDeadlineSeconds)
        || self.startupDeadlineSeconds <= self.activeDeadlineSeconds""",
        "startupDeadlineSeconds must not be above activeDeadlineSeconds, which would end the job before",
        ".startupDeadlineSeconds",
        format_message(
            "startupDeadlineSeconds %s is above activeDeadlineSeconds %s, which would end the job before: lower it, or "
            "leave one of them out",
            "self.startupDeadlineSeconds",
            "self.activeDeadlineSeconds",
        ),
    ),
    Rule(
        """!has(self.managedBy) || self.managedBy.matches(
        '^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[-A-Za-z0-9._~%/:@+=]+$')""",
        f"managedBy names a controller as domain/name, for instance {MANAGER} (this operator)",
        ".managedBy",
    ),
    Rule(
        """self.health.preflight.minimumBandwidthGbps == 0.0
        || (has(self.health.preflight.checks) && 'Bandwidth' in self.health.preflight.checks)""",
        "health.preflight.minimumBandwidthGbps has no effect without check Bandwidth: add Bandwidth to "
        "health.preflight.checks, or leave the bound out",
        ".health.preflight.minimumBandwidthGbps",
    ),
    *TRAINER_RULES,
    *EFFECT_RULES,
    *PROGRAM_SPEC_RULES,
    *ROLE_SPEC_RULES,
)

STORAGE_RULES: tuple[Rule, ...] = (
    Rule(
        "[has(self.hostPath), has(self.persistentVolumeClaim), has(self.uri)].filter(given, given).size() == 1",
        "give exactly one of hostPath, persistentVolumeClaim and uri; leave storage out for a folder in the pod",
    ),
)

# The operator writes the status before it acts and reports Suspended only when no worker is left. So a change is safe
# while the stored job is suspended, and before the operator has seen it. Nothing is ever started for a job that has
# failed: a change of it counts when it is recreated.
_JOB_NOT_RUNNING = """
(!has(oldSelf.status) || !has(oldSelf.status.phase) || oldSelf.status.phase == 'Failed'
|| (oldSelf.spec.suspend && oldSelf.status.phase == 'Suspended'))"""


_NOT_WHILE_RUNNING = (
    "cannot change while the job runs: suspend it first (spec.suspend: true), wait for phase Suspended; a failed job "
    "takes changes (then kubectl trn retry), a completed one none"
)


def _fix_while_running(field: str) -> Rule:
    """Fix a field while the job runs; those of the trainer may be absent, which is their default."""
    condition = f"self.{field} == oldSelf.{field}"
    if field == "spec.trainer.steps":
        default = TrainerSpec.model_fields["steps"].default
        condition = " == ".join(f"{job}.spec.trainer.?steps.orValue({default})" for job in ("self", "oldSelf"))
    if field.startswith("spec.trainer."):
        condition = f"!has(self.spec.trainer) || !has(oldSelf.spec.trainer) || {condition}"
    return Rule(
        f"{_JOB_NOT_RUNNING} || {condition}",
        f"{field.removeprefix('spec.')} {_NOT_WHILE_RUNNING}",
        f".{field}",
        reason=RefusalReason.FORBIDDEN,
    )


_FIXED_FIELDS = (
    "spec.parallelism",
    "spec.workers.accelerator",
    *(f"spec.trainer.{field.alias}" for name, field in TrainerSpec.model_fields.items() if name != "monitor"),
)

_ENDED = "c.type in ['Complete', 'Failed'] && c.status == 'True'"
_REMAINS_ENDED = f"""
!has(oldSelf.status) || !has(oldSelf.status.conditions) || !oldSelf.status.conditions.exists(c, {_ENDED})
|| (has(self.status) && has(self.status.conditions) && self.status.conditions.exists(c, {_ENDED}))"""

ROOT_RULES: tuple[Rule, ...] = (
    Rule(
        _REMAINS_ENDED,
        "a job that has ended stays ended: its condition Complete or Failed cannot be taken back; create the job again "
        "under its name (kubectl trn retry), and it resumes from its newest checkpoint",
        ".status.conditions",
        reason=RefusalReason.FORBIDDEN,
    ),
    Rule(
        f"size(self.metadata.name) <= {MAX_NAME}",
        f"the name has at most {MAX_NAME} characters, so that host names of its workers stay within 63",
        ".metadata.name",
        format_message(
            f"the name has %s characters: shorten it to {MAX_NAME}, so that host names of its workers stay within 63",
            "size(self.metadata.name)",
        ),
    ),
    Rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "the name of a TrainingJob begins with a lowercase letter and has only lowercase letters, digits and '-' "
        "(RFC 1035), because host names are made from it",
        ".metadata.name",
    ),
    *(_fix_while_running(field) for field in _FIXED_FIELDS),
    Rule(
        f"""{_JOB_NOT_RUNNING} || (has(self.spec.checkpoint.storage) == has(oldSelf.spec.checkpoint.storage)
        && (!has(self.spec.checkpoint.storage) || self.spec.checkpoint.storage == oldSelf.spec.checkpoint.storage))""",
        f"checkpoint.storage {_NOT_WHILE_RUNNING}",
        ".spec.checkpoint.storage",
        reason=RefusalReason.FORBIDDEN,
    ),
    Rule(
        f"""{_JOB_NOT_RUNNING} || (has(self.spec.program) == has(oldSelf.spec.program)
        && (!has(self.spec.program) || self.spec.program == oldSelf.spec.program))""",
        f"program {_NOT_WHILE_RUNNING}",
        ".spec.program",
        reason=RefusalReason.FORBIDDEN,
    ),
    Rule(
        f"""{_JOB_NOT_RUNNING} || !has(self.spec.program) || self.spec.program.resize != 'Never'
        || self.spec.workers.replicas == oldSelf.spec.workers.replicas""",
        f"replicas (resize: Never) {_NOT_WHILE_RUNNING}",
        ".spec.workers.replicas",
        reason=RefusalReason.FORBIDDEN,
    ),
    *ROLE_ROOT_RULES,
    build_role_port_rule(_JOB_NOT_RUNNING, _NOT_WHILE_RUNNING),
    Rule(
        """has(self.spec.managedBy) == has(oldSelf.spec.managedBy)
        && (!has(self.spec.managedBy) || self.spec.managedBy == oldSelf.spec.managedBy)""",
        "managedBy cannot change: a job has one controller from its creation on; create the job again, and it resumes "
        "from its newest checkpoint",
        ".spec.managedBy",
        reason=RefusalReason.FORBIDDEN,
    ),
)


def _format_cel_list(causes: frozenset[Cause]) -> str:
    return "[" + ", ".join(f"'{cause.value}'" for cause in Cause if cause in causes) + "]"


_NO_FAULT_NAMES = ", ".join(cause.value for cause in Cause if cause in NO_FAULT_CAUSES)
_FAULT_CAUSES = frozenset(Cause) - NO_FAULT_CAUSES

RECOVERY_RULE_RULES: tuple[Rule, ...] = (
    Rule(
        """(has(self.exitCodes) && size(self.exitCodes) > 0) || (has(self.reason) && self.reason != '')
        || (has(self.message) && self.message != '')""",
        "a rule needs a condition: give exitCodes, reason or message, or it would match every failure",
    ),
    Rule(
        f"!(self.cause in {_format_cel_list(NO_FAULT_CAUSES)})",
        f"{_NO_FAULT_NAMES} are no faults: give the cause that the failure is to be attributed to, "
        "for instance UserError",
        ".cause",
    ),
    Rule(
        f"self.action != 'AvoidNode' || !(self.cause in {_format_cel_list(USER_CAUSES)})",
        "a node is not to blame for an error of the user: choose action ReplaceWorker, or a cause such as Host",
        ".action",
    ),
)
"""Rules of one entry of `spec.recovery.rules`."""

BY_CAUSE_RULES: tuple[Rule, ...] = (
    Rule(
        f"self.all(cause, cause in {_format_cel_list(_FAULT_CAUSES)})",
        "a key of byCause is not the cause of a fault; see the causes of recovery.rules[].cause",
    ),
)
"""Rules of `spec.recovery.budgets.byCause`."""
