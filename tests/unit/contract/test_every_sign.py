"""The responses of agent and operator to every sign of a fault equal the recorded table `every_sign.txt`.

`python tests/unit/contract/test_every_sign.py` writes the table, one line a sign. A new sign adds its line and changes
no other, except that a new exit code is added to the lines of the signs that explain it. Any other changed line is a
change of behaviour, which the review must see.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.testing.operator import wire_messages
from tests.unit.agent.pod_environment import ended_rank
from tests.unit.plan import plan_builders as build
from trainium_agent.exits.diagnosis import ExitDiagnoser, describe_exit, exit_priority
from trainium_agent.exits.restart_policy import GenerationState, decide_restart
from trainium_agent.ranks.processes import RankProcess
from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import CAUSES, NO_FAULT_CAUSES, USER_CAUSES, Cause
from trainium_contract.faults.classify import (
    Classification,
    classify_exit,
    classify_exit_code,
    find_cause,
    find_eviction,
    get_budget,
    get_cause_row,
    get_default_responses,
    match_rules,
    rank_severity,
    suspects_node,
)
from trainium_contract.faults.rules import RecoveryRule, RuleAction
from trainium_contract.faults.signs import (
    CLAIM_HEALTH,
    CONDITIONS,
    DEVICE_TAINTS,
    DISRUPTIONS,
    KERNEL_LINES,
    LABELS,
    OUTPUT_LINES,
    POD_REASONS,
    RUNTIME_STATUSES,
    TAINTS,
    SignKind,
)
from trainium_contract.spec.recovery import RecoverySpec
from trainium_contract.status.internal import FailureRecord
from trainium_contract.wire.messages import HeartbeatRequest, KernelEvent, ProcessFailure, WorkerPhase
from trainium_operator.plan.diagnose import failure_policy, silence
from trainium_operator.plan.diagnose.pod_failures import classify_ended_pod, find_leaving_cause, has_failed_by_itself
from trainium_operator.plan.diagnose.process_failures import classify_process_failure
from trainium_operator.plan.faults import failure_budgets
from trainium_operator.plan.faults.node_signals import (
    PodRequirements,
    find_kernel_problem,
    find_node_problems,
    get_bad_status,
)
from trainium_operator.plan.features.dra.claims import find_health_problem, find_taint_problem
from trainium_operator.plan.model.devices import DeviceTaint
from trainium_operator.plan.model.observed import (
    NodeCondition,
    NodeReadiness,
    NodeView,
    PodPhase,
    Taint,
)

TABLE = Path(__file__).with_name("every_sign.txt")
AT = 1000.0
CODES = (*(code.value for code in ExitCode), 1, 2, 127, 128, 134, 137, 139, 143, 255)
KERNEL_EXAMPLES = {
    "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR": "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR nd-id=0 nc-id=0",
    "NEURON_HW_ERR=NC_UNCORRECTABLE_ERROR": "NEURON_HW_ERR=NC_UNCORRECTABLE_ERROR nd-id=0 nc-id=0",
    "NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR": "NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR nd-id=0",
    "NEURON_HW_ERR=DMA_ERROR": "NEURON_HW_ERR=DMA_ERROR nd-id=0",
    "NEURON_HW_ERR (other)": "NEURON_HW_ERR=SOMETHING_NEW nd-id=0",
    "machine check": "mce: [Hardware Error]: CPU 2: Uncorrected error, Fatal",
    "kernel fault": "BUG: unable to handle page fault for address: 0",
    "lockup": "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4242]",
    "hung task": "INFO: task python:4242 blocked for more than 120 seconds.",
    "disk": "EXT4-fs error (device nvme0n1p1): ext4_find_entry: reading directory lblock 0",
    "EFA": "efa 0000:00:1d.0: Failed to process command: -110",
    "network link": "ena 0000:00:05.0 eth0: Keep alive watchdog timeout.",
    "memory limit": "the container reached its memory limit of 512 MiB when the kernel killed a process of it",
    "memory of the node": "the container was below its memory limit of 512 MiB when the kernel killed a process of it",
    "out of memory": "Out of memory: Killed process 4242 (python) total-vm:1kB",
}
"""An example of each kind of kernel line whose name is not the line itself."""
OUTPUT_EXAMPLES = {
    "gloo": (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4",
        "[rank1]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection reset by peer",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
        "RuntimeError: Rank 1 failed to pass monitoredBarrier in 30000 ms",
        "RuntimeError: Application timeout caused pair closure",
    ),
    "torch's store": (
        "DistNetworkError: Failed to recv, got 0 bytes. Did the remote server shutdown or crash?",
        "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).",
        "[W1126 TCPStore.cpp:125] [c10d] sendBytes failed on SocketImpl(fd=3, addr=a, remote=b): Broken pipe",
        "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/0",
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    ),
    "NCCL": (
        "DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error, NCCL 2.27.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "socketProgress: Connection closed by remote peer node2<42830>",
        "[E1126 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)",
    ),
    "XLA's coordination service": ("RuntimeError: UNAVAILABLE: 14: Socket closed",),
    "Neuron collectives": ("2023-Aug-01 16:12:43.02 1:2 [21] bootstrap.cc:106 CCOM WARN Timeout waiting for RX",),
}
"""Output lines of each kind, as the libraries print them."""


EVICTION_EXAMPLES = (
    'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ',
    'Container worker exceeded its local ephemeral storage limit "2Gi". ',
    "Pod ephemeral local storage usage exceeds the total limit of containers 2Gi. ",
    "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 9Mi. ",
    "The node was low on resource: inodes. ",
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 52Mi. ",
    "The node was low on resource: pids. Threshold quantity: 1310, available: 1200. ",
    "The node had condition: [DiskPressure]. ",
    "a message that is not in the table",
)
"""Messages as kubelets write them."""


def format_verdict(verdict: Classification) -> str:
    """Format a verdict without its sentence."""
    repeated = f", then {verdict.repeated}" if verdict.repeated is not verdict.response else ""
    return f"{verdict.cause} {verdict.blame} {verdict.response}{repeated}{' indirect' if verdict.indirect else ''}"


def agent_response(process: RankProcess, line: str = "") -> str:
    """Format the agent's verdict and its decisions.

    The decisions are: at first, when repeated without a new step, on a node that had the failure before, before any
    step, and when repeated before any step.
    """
    diagnoser = ExitDiagnoser(None, lambda: None)
    if line:
        diagnoser.kernel.add(line, process.ended_at)
    verdict = diagnoser.diagnose(process).verdict
    seen_before = diagnoser.diagnose(process).seen_before
    code = process.exit_code or 0
    if verdict.cause in NO_FAULT_CAUSES:
        return format_verdict(verdict)
    first = decide_restart(code, 0, 7, GenerationState(), 3, verdict=verdict)
    repeated = decide_restart(code, 1, 7, first.state, 3, verdict=verdict)
    on_same_node = decide_restart(code, 0, 7, GenerationState(), 3, verdict=verdict, seen_before=True)
    early = decide_restart(code, 0, -1, GenerationState(), 3, verdict=verdict)
    early_repeated = decide_restart(code, 1, -1, early.state, 3, verdict=verdict)
    decisions = ">".join(
        f"{decision.action}{f'+{decision.backoff_seconds:g}' * bool(decision.backoff_seconds)}"
        for decision in (first, repeated, on_same_node, early, early_repeated)
    )
    priority = "".join(map(str, map(int, exit_priority(verdict))))
    return f"{format_verdict(verdict)} | {decisions} {priority}{' seen' if seen_before else ''}"


def heartbeat(failure: ProcessFailure | None = None, line: str = "") -> HeartbeatRequest:
    kernel = (KernelEvent(sequence=0, line=line, at=AT),) if line else ()
    failures = () if failure is None else (failure,)
    return wire_messages.heartbeat(phase=WorkerPhase.JOINING, ready=True, failures=failures, kernel=kernel)


def operator_response(code: int, status: int | None = None, line: str = "", output: str = "") -> str:
    """Format the operator's verdict on the exit of a process, and whether it waited in a collective."""
    failure = wire_messages.process_failure(code, runtime_status=status, output_line=output, at=AT, message="m")
    verdict = classify_process_failure(heartbeat(failure, line), failure, ())
    waited = " waited" if silence._has_waited_in_collective(failure) else ""
    return f"{format_verdict(verdict)}{waited} | {verdict.sentence}"


def pod_response(reason: str, code: int | None, *, disrupted: bool = False, message: str = "") -> str:
    end = {"reason": reason, "exit_code": code, "disrupted": disrupted, "message": message}
    pod = build.pod(0, phase=PodPhase.FAILED, node="n", **end)
    verdict = classify_ended_pod(pod, ())
    return f"{format_verdict(verdict)}{' by itself' if has_failed_by_itself(pod) else ''}, {verdict.sentence}"


def problem_text(node: NodeView, demand: PodRequirements | None = None) -> str:
    return (
        "; ".join(
            f"{problem.severity.name} {problem.cause} {problem} {problem.since}"
            for problem in find_node_problems(node, demand)
        )
        or "-"
    )


def cause_rows() -> Iterator[str]:
    recovery = RecoverySpec()
    for cause in (row.cause for row in CAUSES):
        row, responses = get_cause_row(cause), get_default_responses(cause)
        lost = FailureRecord(at=AT, cause=cause, pod="p", node="")
        columns = [
            f"{rank_severity(cause)} {cause}",
            f"{row.blame} {responses.first.value}, then {responses.repeated.value}",
            f"budget {getattr(get_budget(cause), 'value', 'none')}",
            "suspects its node" * suspects_node(cause),
            "recorded" * failure_budgets.is_recorded(cause, recovery),
            "takes a worker" * failure_budgets._is_worker_lost(lost),
            "the user's" * (cause in USER_CAUSES) + "no fault" * (cause in NO_FAULT_CAUSES),
            f"stops as {failure_policy.get_verdict_reason(cause)}",
            row.sentence,
            row.advice,
        ]
        yield " | ".join(columns)


def code_rows() -> Iterator[str]:
    for code in CODES:
        pod = pod_response("Error", code)
        plain = classify_exit_code(code)
        assert format_verdict(plain) in operator_response(code)
        agent = agent_response(ended_rank(code))
        yield f"{code} | agent: {agent} | operator: {operator_response(code)} | its pod: {pod}"
        if code and code <= 128:
            assert describe_exit(ended_rank(code)) == plain.sentence


def status_rows() -> Iterator[str]:
    for status, name in ((sign.number, sign.key) for sign in RUNTIME_STATUSES):
        output = f"nrt_execute: status={status}"
        by_name = agent_response(ended_rank(1, f"Failure: {name} in nrt_load()"))
        assert agent_response(ended_rank(1, output)) == by_name
        explained = [code for code in CODES if classify_exit(code, runtime_status=status) != classify_exit_code(code)]
        operator = operator_response(1, status)
        yield f"{status} {name} | agent: {by_name} | operator: {operator} | explains {format_codes(explained)}"


def output_rows() -> Iterator[str]:
    for sign in OUTPUT_LINES:
        explained = [code for code in CODES if classify_exit(code, output_line=sign.key) != classify_exit(code)]
        by_agent = {agent_response(ended_rank(1, f"step 7\n{line}\nbye")) for line in OUTPUT_EXAMPLES[sign.key]}
        with_status = classify_exit(1, output_line=sign.key, runtime_status=6).cause
        yield (
            f"{sign.key} | agent: {' '.join(by_agent)} | operator: {operator_response(1, output=sign.key)} | explains "
            f"{format_codes(explained)}, with status 6 {with_status}"
        )


def kernel_rows() -> Iterator[str]:
    for name, decisive in ((sign.key, sign.decisive) for sign in KERNEL_LINES):
        line = KERNEL_EXAMPLES.get(name, name)
        explained = [code for code in CODES if classify_exit(code, kernel=(line,)) != classify_exit_code(code)]
        code = 137 if 1 not in explained else 1
        problem = find_kernel_problem(heartbeat(line=line), ())
        node_problem = "-" if problem is None else f"{problem.severity.name} {problem.cause} {problem}"
        with_status = classify_exit(code, runtime_status=5, kernel=(line,)).cause
        yield (
            f"{name}{' (decisive)' * decisive} | agent: {agent_response(ended_rank(code), line)} | operator: "
            f"{operator_response(code, line=line)} | explains {format_codes(explained)}, with status 5 {with_status} | "
            f"node: {node_problem}"
        )


def format_codes(explained: list[int]) -> str:
    return ",".join(map(str, explained)) or "nothing"


def pod_rows() -> Iterator[str]:
    for reason in ("", "Error", "SomethingNew", *(sign.key for sign in POD_REASONS)):
        example = f"{reason[:-1]}cpu" if reason.endswith("*") else reason
        codes_by_response: dict[str, list[str]] = {}
        for code in (None, *CODES):
            codes_by_response.setdefault(pod_response(example, code), []).append(str(code))
        responses = [
            f"{'any code' if len(codes_by_response) == 1 else ','.join(codes)}: {response}"
            for response, codes in codes_by_response.items()
        ]
        yield f"{reason or '(none)'} | {' | '.join(responses)}"
    yield f"(disrupted) | {pod_response('Error', 64, disrupted=True)}"


def eviction_rows() -> Iterator[str]:
    for message in EVICTION_EXAMPLES:
        pod = build.pod(0, node="", reason="Evicted", message=message)
        ended = {pod_response("Evicted", code, disrupted=True, message=message) for code in (None, 0, 137, 143)}
        yield f"{message.strip()} | leaves for {find_leaving_cause(pod)} | ended: {' '.join(ended)}"
    assert find_eviction("Error", EVICTION_EXAMPLES[0]) is None, "a program may print such a message"


def condition_rows() -> Iterator[str]:
    unknown = (("MoonPhaseReady", ""), ("SomethingHealthy", ""), ("SomethingAvailable", ""), ("MoonPhase", ""))
    for kind, reason in (*((sign.key, sign.value) for sign in CONDITIONS), *unknown):
        example = "Why" if reason == "*" else reason
        problems = [
            problem_text(NodeView(name="n", conditions=(NodeCondition(kind, status, example, "text", AT),)))
            for status in NodeReadiness
        ]
        cause = find_cause(SignKind.CONDITION, kind, example)
        yield f"{kind} {reason} | {cause} | bad when {get_bad_status(kind)} | {' | '.join(problems)}"
    for ready in NodeReadiness:
        yield f"Ready is {ready} | {problem_text(NodeView(name='n', ready=ready, unready_since=AT))}"


def taint_rows() -> Iterator[str]:
    for key in (*(sign.key for sign in TAINTS), "maintenance", "aws.amazon.com/neuron"):
        example = f"{key[:-1]}spot-itn" if key.endswith("*") else key
        problems = [
            problem_text(NodeView(name="n", taints=(Taint(example, value, effect),)), demand)
            for effect in ("NoSchedule", "NoExecute")
            for value in ("", "UnschedulablePendingReboot", "UnschedulablePendingReplacement")
            for demand in (None, PodRequirements({}), PodRequirements({}, ({"operator": "Exists"},)))
        ]
        yield f"{key} | {find_cause(SignKind.TAINT, example)} | {' | '.join(dict.fromkeys(problems))}"


def label_rows() -> Iterator[str]:
    health, check = "sagemaker.amazonaws.com/node-health-status", "sagemaker.amazonaws.com/deep-health-check-status"
    known = ((health, "Schedulable"), (health, "Unschedulable"), (check, "Failed"), (check, "InProgress"))
    examples = (*known, (health, "nonsense"), ("a", "b"))
    for key, value in (*((sign.key, sign.value) for sign in LABELS), *examples):
        problem = problem_text(NodeView(name="n", labels={key: value}))
        yield f"{key}={value} | {find_cause(SignKind.LABEL, key, value)} | {problem}"


def disruption_rows() -> Iterator[str]:
    for reason in (
        *(sign.key for sign in DISRUPTIONS),
        "EvictionByEvictionAPI",
        "DeletionByTaintManager",
        "SomethingNew",
    ):
        pod = build.pod(0, phase=PodPhase.FAILED, exit_code=75, disrupted=True, disruption=reason)
        yield f"{reason} | leaves for {find_leaving_cause(pod)} | ended: {format_verdict(classify_ended_pod(pod, ()))}"


def device_rows() -> Iterator[str]:
    for effect in (*(sign.key for sign in DEVICE_TAINTS), "None", "SomethingNew"):
        problem = find_taint_problem(DeviceTaint("pool/d3", "neuron.aws.com/any", effect, "value", AT))
        description = "-" if problem is None else f"{problem.severity.name} {problem.cause} {problem} {problem.since}"
        yield f"taint {effect} | {find_cause(SignKind.DEVICE_TAINT, effect)} | {description}"
    for health in (*(sign.key for sign in CLAIM_HEALTH), "Healthy", "Unknown"):
        problem = find_health_problem((health, "neuron.aws.com/pool/d3: why"))
        description = "-" if problem is None else f"{problem.severity.name} {problem.cause} {problem} {problem.since}"
        yield f"health {health} | {find_cause(SignKind.CLAIM_HEALTH, health)} | {description}"


def rule_rows() -> Iterator[str]:
    for cause in Cause:
        verdicts = [
            match_rules((RecoveryRule(exit_codes=(3,), cause=cause, action=action),), code=3) for action in RuleAction
        ]
        columns = ("-" if verdict is None else f"{format_verdict(verdict)}, {verdict.sentence}" for verdict in verdicts)
        yield f"{cause} | {' | '.join(columns)}"


def table() -> str:
    """Return the table of all signs."""
    parts = {
        "causes": cause_rows(),
        "exit codes": code_rows(),
        "runtime statuses": status_rows(),
        "output lines": output_rows(),
        "kernel lines": kernel_rows(),
        "pod reasons": pod_rows(),
        "messages of evicted pods": eviction_rows(),
        "conditions": condition_rows(),
        "taints": taint_rows(),
        "labels": label_rows(),
        "disruptions": disruption_rows(),
        "claimed devices": device_rows(),
        "rules of the job: Stop, RestartInPlace, ReplaceWorker, AvoidNode": rule_rows(),
    }
    return "\n".join(line for title, rows in parts.items() for line in (f"# {title}", *rows)) + "\n"


def test_responses_to_every_sign_equal_the_recorded_table() -> None:
    recorded, computed = TABLE.read_text(encoding="utf-8").splitlines(), table().splitlines()
    assert [line for line in computed if line not in recorded] == [], "signs with another response, or new signs"
    assert [line for line in recorded if line not in computed] == [], "signs that no longer occur"
    assert computed == recorded, "the order decides which of several signs counts"


def test_a_code_outside_the_contract_is_a_crash() -> None:
    assert {classify_exit_code(code) for code in range(256) if code not in set(ExitCode)} == {classify_exit_code(1)}


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
    sys.stdout.write(f"{TABLE} is written\n")
