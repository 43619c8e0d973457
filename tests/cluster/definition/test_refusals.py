"""Refusals of a bad TrainingJob: a real API server evaluates schema and rules.

Most are asked of the server itself, whose text kubectl shows; names and sizes go through kubectl.
"""

import json
import random
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.definition.conftest import Api
from tests.testing.api.json_objects import merge
from tests.testing.fields_without_effect import SPEC_CASES, TRAINER_CASES, Case, job_spec
from trainium_contract.sizes import BatchShape, SizeRule

pytestmark = pytest.mark.cluster

CASES: dict[str, list[Any]] = yaml.safe_load((Path(__file__).parent / "refusals.yaml").read_text())
GOOD = """
workers: {replicas: 4, accelerator: {device: cpu}}
trainer: {batch: {globalSize: 12}, data: {source: python-docs}}
"""


PROGRAM = """
workers: {replicas: 4, accelerator: {device: cpu}}
program: {image: 'team/own:5', command: [python, train.py]}
"""


def build_job(change: str = "", name: str = "good", base: str = GOOD) -> dict[str, Any]:
    """Return a valid job with a YAML fragment merged into its spec."""
    return {
        "apiVersion": "trainium.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": merge(yaml.safe_load(base), yaml.safe_load(change) or {}),
    }


ROLE = "{template: {spec: {containers: [{image: x}]}}"


def program_job(change: str = "") -> dict[str, Any]:
    return build_job(change, "program", PROGRAM)


@pytest.mark.parametrize("case", CASES["refused_jobs"], ids=itemgetter("change"))
def test_an_invalid_job_is_refused_with_a_remedy(crd_api: Api, case: dict[str, str]) -> None:
    output = crd_api.refusal_of_new(build_job(case["change"], name="bad"))
    assert case["refusal"] in output
    assert "evaluating rule" not in output


@pytest.mark.parametrize(
    "case",
    [*TRAINER_CASES, *SPEC_CASES],
    ids=[f"{case.field} {n}" for n, case in enumerate([*TRAINER_CASES, *SPEC_CASES])],
)
def test_a_field_without_effect_is_refused_by_name(crd_api: Api, case: Case) -> None:
    base = PROGRAM if "program" in case.off else GOOD
    off = crd_api.refusal_of_new(build_job(json.dumps(job_spec(case, case.off)), base=base))
    named = case.field.rpartition(".")[0]
    assert f"{case.field} has no effect" in off or f"{named} has no effect" in off, off
    assert "has no effect" not in crd_api.refusal_of_new(build_job(json.dumps(job_spec(case, case.on)), base=GOOD))


@pytest.mark.parametrize("case", CASES["refused_programs"], ids=itemgetter("change"))
def test_an_invalid_program_is_refused_with_the_name_of_the_field(crd_api: Api, case: dict[str, str]) -> None:
    assert case["refusal"] in crd_api.refusal_of_new(program_job(case["change"]))


@pytest.mark.parametrize("change", CASES["accepted_programs"])
def test_a_valid_program_is_accepted(crd_api: Api, change: str) -> None:
    assert crd_api.refusal_of_new(program_job(change)) == ""


def test_program_and_fixed_size_are_immutable_while_the_job_runs(crd_api: Api) -> None:
    fixed = "program: {resize: Never}"
    assert crd_api.refusal_of_change(program_job(fixed)) == ""
    crd_api.report_status("program", {"phase": "Running"})
    output = crd_api.refusal_of_change(program_job("program: {resize: Never, args: [--fast]}"))
    assert "program cannot change while the job runs: suspend it first (spec.suspend: true), wait" in output
    output = crd_api.refusal_of_change(program_job("{program: {resize: Never}, workers: {replicas: 6}}"))
    assert "replicas (resize: Never) cannot change while the job runs" in output
    output = crd_api.refusal_of_change(build_job("", name="program"))
    assert "program cannot change while the job runs" in output
    crd_api.delete_job("program")
    assert crd_api.refusal_of_change(program_job()) == ""
    crd_api.report_status("program", {"phase": "Running"})
    assert crd_api.refusal_of_change(program_job("workers: {replicas: 6}")) == "", (
        "a program may restart at another size"
    )
    crd_api.delete_job("program")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("n" * 51, "the name has 51 characters: shorten it to 50"),
        ("9lives", "begins with a lowercase letter"),
        ("a.b", "only lowercase letters, digits and '-'"),
    ],
)
def test_a_name_that_is_no_host_name_is_refused(crd_api: Api, name: str, sentence: str) -> None:
    assert sentence in crd_api.refusal(build_job(name=name))


@pytest.mark.parametrize("change", CASES["accepted_jobs"])
def test_a_valid_job_is_accepted(crd_api: Api, change: str) -> None:
    assert crd_api.refusal_of_new(build_job(change)) == ""


FEW_OR_ALL = pytest.mark.parametrize("share", [2, pytest.param(1, marks=pytest.mark.long)], ids=["half", "all"])


@FEW_OR_ALL
def test_sizes_are_accepted_exactly_when_the_trainer_has_them(crd_api: Api, share: int) -> None:
    generator = random.Random(7)

    def pick(*numbers: int) -> int:
        return generator.choice(numbers)

    jobs, legal = [], {}
    for number in range(120 // share):
        shape = BatchShape(
            cores_per_node=pick(1, 2, 3, 32),
            tensor=pick(1, 2, 4, 8),
            pipeline=1,
            global_batch_size=pick(12, 96, 256, 1000),
            micro_batch_size=pick(1, 1, 2),
            rule=generator.choice(list(SizeRule)),
            unit_nodes=pick(1, 1, 1, 2, 4),
        )
        nodes = pick(1, 2, 3, 4, 5, 6, 8, 12, 16, 40)
        legal[f"shape-{number}"] = shape.is_legal(nodes)
        jobs.append(job_of_shape(f"shape-{number}", shape, nodes))
    accepted = apply_jobs(crd_api, jobs, dry_run=True)
    assert accepted == {name for name, good in legal.items() if good}
    assert 20 < len(accepted) * share < 100


def job_of_shape(name: str, shape: BatchShape, nodes: int, smallest: int = 1) -> dict[str, Any]:
    unit = (
        f", unit: UltraServer, unitNodes: {shape.unit_nodes}, unitTopologyKey: topology.k8s.aws/ultraserver-id"
        if shape.unit_nodes > 1
        else ""
    )
    cores = f"{{coresPerNode: {shape.cores_per_node}{unit}}}"
    change = (
        f"{{workers: {{replicas: {nodes}, minReplicas: {smallest}, accelerator: {cores}}}, parallelism: "
        f"{{tensor: {shape.tensor}, pipeline: {shape.pipeline}}}, trainer: {{batch: {{globalSize: "
        f"{shape.global_batch_size}, microSize: {shape.micro_batch_size}}}}}, elasticity: {{sizes: {shape.rule}}}}}"
    )
    return build_job(change, name=name)


def apply_jobs(api: Api, jobs: list[dict[str, Any]], *, dry_run: bool = False) -> set[str]:
    """Apply jobs and return the names of those that the API server accepts."""
    return {
        build_job["metadata"]["name"] for build_job in jobs if not api.refusal_of_change(build_job, dry_run=dry_run)
    }


@FEW_OR_ALL
def test_a_range_with_a_legal_size_is_accepted(crd_api: Api, share: int) -> None:
    generator = random.Random(11)
    jobs, changed, legal = [], [], {}
    for number in range(80 // share):
        cores, tensor, pipeline = (
            generator.choice(choices) for choices in ((1, 2, 6, 32, 128), (1, 2, 8, 32), (1, 3, 4))
        )
        rule, unit_nodes = generator.choice(list(SizeRule)), generator.choice((1, 1, 1, 2, 36))
        start = pipeline * tensor * unit_nodes  # whole groups on any node
        micro = generator.choice((1, 2, 3))
        shape = BatchShape(
            cores_per_node=cores,
            tensor=tensor,
            pipeline=pipeline,
            global_batch_size=unit_nodes * micro * cores * generator.choice((1, 7, 48, 9967, 10080)),
            micro_batch_size=micro,
            rule=rule,
            unit_nodes=unit_nodes,
        )
        nodes = generator.choice((3, 7, 40, 128, 997, 10_000))
        smallest = max(1, nodes - generator.choice((0, 1, 5, 30, 9_999)))
        name = f"range-{number}"
        jobs.append(job_of_shape(name, shape, start))
        changed.append(job_of_shape(name, shape, nodes, smallest))
        searched = rule is SizeRule.ANY or shape.global_batch_size <= micro << 20
        legal[name] = bool(shape.legal_sizes(smallest, nodes)) or nodes == start or not searched
    assert apply_jobs(crd_api, jobs) == {*legal}
    accepted = apply_jobs(crd_api, changed, dry_run=True)
    crd_api.kubectl("delete", "trn", "--wait=false", *legal)
    assert accepted == {name for name, good in legal.items() if good}
    assert 20 < len(accepted) * share < 75


@pytest.fixture
def api_with_job(crd_api: Api) -> Any:
    """Create a running job."""
    assert crd_api.refusal_of_change(build_job("workers: {minReplicas: 2}")) == ""
    crd_api.report_status("good", {"phase": "Running"})
    yield crd_api
    crd_api.delete_job("good")


@pytest.mark.parametrize("case", CASES["immutable"], ids=itemgetter("change"))
def test_an_immutable_field_cannot_change_while_the_job_runs(api_with_job: Api, case: dict[str, str]) -> None:
    minimum = merge({"workers": {"minReplicas": 2}}, yaml.safe_load(case["change"]))
    output = api_with_job.refusal_of_change(build_job(json.dumps(minimum)))
    assert f"{case['field']} cannot change while the job runs: suspend it first (spec.suspend: true), wait" in output
    assert "a failed job takes changes (then kubectl trn retry)" in output


@pytest.mark.parametrize("change", CASES["mutable"])
def test_a_mutable_field_can_change_while_the_job_runs(api_with_job: Api, change: str) -> None:
    assert api_with_job.refusal_of_change(build_job(change)) == ""


def test_deadlines_can_change_and_managed_by_cannot(api_with_job: Api) -> None:
    assert api_with_job.refusal_of_change(build_job("activeDeadlineSeconds: 60")) == ""
    assert api_with_job.refusal_of_change(build_job("{activeDeadlineSeconds: 6000, startupDeadlineSeconds: 600}")) == ""
    output = "managedBy cannot change: a job has one controller from its creation on"
    assert output in api_with_job.refusal_of_change(build_job("managedBy: acme.io/scheduler"))
    assert api_with_job.refusal_of_change(build_job("managedBy: acme.io/scheduler", name="foreign")) == ""
    assert output in api_with_job.refusal_of_change(build_job("", name="foreign"))
    assert output in api_with_job.refusal_of_change(
        build_job("managedBy: trainium.dev/trainium-operator", name="foreign")
    )
    api_with_job.delete_job("foreign")


def test_a_suspended_job_can_be_changed_once_no_worker_is_left(api_with_job: Api) -> None:
    longer = "{suspend: true, trainer: {steps: 200}}"
    assert api_with_job.refusal_of_change(build_job("suspend: true")) == ""
    assert "trainer.steps cannot change while the job runs" in api_with_job.refusal_of_change(build_job(longer))
    api_with_job.report_status("good", {"phase": "Suspended"})
    assert api_with_job.refusal_of_change(build_job(longer)) == ""
    assert api_with_job.refusal_of_change(build_job("{suspend: false, trainer: {steps: 300}}")) == ""
    assert "trainer.steps cannot change" in api_with_job.refusal_of_change(
        build_job("{suspend: false, trainer: {steps: 400}}")
    )


def test_a_failed_job_can_be_changed_and_a_completed_one_cannot(api_with_job: Api) -> None:
    # The operator leaves this status, and a user corrects one mistake after the other.
    ended = {"type": "Failed", "status": "True", "reason": "UserError", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    api_with_job.report_status("good", {"phase": "Failed", "conditions": [ended]})
    for case in CASES["immutable"]:
        minimum = merge({"workers": {"minReplicas": 2}}, yaml.safe_load(case["change"]))
        refused = api_with_job.refusal_of_change(build_job(json.dumps(minimum)))
        assert "cannot change" not in refused, case
    assert (
        api_with_job.refusal_of_change(
            build_job("{trainer: {steps: 300}, checkpoint: {storage: {hostPath: {path: /data}}}}")
        )
        == ""
    )
    output = api_with_job.refusal_of_change(build_job("{workers: {minReplicas: 2}, trainer: {batch: {microSize: 24}}}"))
    assert "trainer.batch.microSize 24 is above trainer.batch.globalSize 12" in output
    assert "managedBy cannot change" in api_with_job.refusal_of_change(build_job("managedBy: acme.io/scheduler"))
    api_with_job.report_status("good", {"phase": "Completed", "conditions": [{**ended, "type": "Complete"}]})
    output = api_with_job.refusal_of_change(build_job("trainer: {steps: 400}"))
    assert "trainer.steps cannot change while the job runs" in output
    assert "a completed one none" in output


def test_a_job_is_scaled_only_within_its_range(api_with_job: Api) -> None:
    api_with_job.kubectl("scale", "trn/good", "--replicas=5")
    assert api_with_job.kubectl("get", "trn", "good", "-o", "jsonpath={.spec.workers.replicas}") == "5"
    below = api_with_job.run("kubectl", "-n", api_with_job.namespace, "scale", "trn/good", "--replicas=1")
    assert "minReplicas 2 is above workers.replicas 1" in below.stderr


@pytest.mark.parametrize("command", ["scale", "apply"])
def test_zero_replicas_are_refused_with_the_command_that_suspends(api_with_job: Api, command: str) -> None:
    if command == "scale":
        output = api_with_job.run("kubectl", "-n", api_with_job.namespace, "scale", "trn/good", "--replicas=0").stderr
    else:
        output = api_with_job.refusal(build_job("workers: {replicas: 0, minReplicas: 2, maxReplicas: 8}"))
    assert output.count("spec.suspend: true (kubectl trn suspend NAME)") == 1
    assert output.count("spec.workers") == 1, "no second sentence about minReplicas or legal sizes"


def test_other_fields_can_change_at_a_size_that_is_not_legal(api_with_job: Api) -> None:
    assert api_with_job.refusal_of_change(build_job("{elasticity: {sizes: Even}, workers: {maxReplicas: 8}}")) == ""
    api_with_job.kubectl("scale", "trn/good", "--replicas=5")
    more = {"spec": {"elasticity": {"idleNodes": "Take"}}}
    api_with_job.kubectl("patch", "trn", "good", "--type=merge", "--patch", json.dumps(more))


def test_a_changed_range_without_a_legal_size_is_refused(api_with_job: Api) -> None:
    assert api_with_job.refusal_of_change(build_job("{workers: {minReplicas: 2}, elasticity: {sizes: Even}}")) == ""
    output = api_with_job.refusal_of_change(
        build_job("{workers: {replicas: 8, minReplicas: 7}, elasticity: {sizes: Even}}")
    )
    assert "no size from 7 to 8 is legal" in output
    assert "[6, 4, 3, 2, 1] below, [12] above" in output


def test_the_most_expensive_rule_stays_within_the_cost_budget(crd_api: Api) -> None:
    change = """{{workers: {{replicas: {}, minReplicas: {}}}, trainer: {{batch: {{globalSize: 69769, microSize: 7}}}},
    elasticity: {{sizes: Even}}}}"""
    assert crd_api.refusal_of_change(build_job(change.format(1, 1), name="expensive")) == ""
    assert "no size from 2 to 9966 is legal" in crd_api.refusal_of_change(
        build_job(change.format(9966, 2), name="expensive")
    )
    crd_api.delete_job("expensive")


def test_an_unknown_phase_is_accepted_in_a_status(api_with_job: Api) -> None:
    api_with_job.report_status("good", {"phase": "Levitating"})
    assert api_with_job.kubectl("get", "trn", "good", "-o", "jsonpath={.status.phase}") == "Levitating"


def test_kubectl_explain_describes_a_field(crd_api: Api) -> None:
    output = crd_api.kubectl("explain", "trn.spec.workers.minReplicas")
    assert "Elastic floor" in output


@pytest.mark.parametrize("kind", ["Complete", "Failed"])
def test_an_ended_job_cannot_be_reopened_by_its_status(api_with_job: Api, kind: str) -> None:
    ended = {
        "type": kind,
        "status": "True",
        "reason": "It",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    api_with_job.report_status("good", {"phase": "Ended", "conditions": [ended]})
    for reopened in ([], [{**ended, "status": "False"}], None):
        patch = json.dumps({"status": {"conditions": reopened}})
        done = api_with_job.run(
            "kubectl",
            "--namespace",
            api_with_job.namespace,
            "patch",
            "trn",
            "good",
            "--subresource=status",
            "--type=merge",
            "--patch",
            patch,
        )
        assert done.returncode != 0
        assert "a job that has ended stays ended" in done.stderr
    api_with_job.report_status("good", {"phase": "Completed", "conditions": [{**ended, "message": "more"}]})


def test_roles_keep_their_names_and_while_the_job_runs_their_ports(crd_api: Api) -> None:
    def roles(*fields: str) -> dict[str, Any]:
        return program_job(f"roles: [{', '.join(f'{ROLE}, {field}}}' for field in fields)}]")

    assert crd_api.refusal_of_change(roles("name: a, port: 80", "name: b, port: 81")) == ""
    crd_api.report_status("program", {"phase": "Running"})
    assert crd_api.refusal_of_change(roles("name: a, port: 80, replicas: 6", "name: b, port: 81")) == ""
    output = crd_api.refusal_of_change(roles("name: a, port: 80", "name: b, port: 82"))
    assert "a role's port cannot change while the job runs" in output
    for changed in (roles("name: a, port: 80"), roles("name: a, port: 80", "name: c, port: 81")):
        assert "roles can neither be added nor removed: create the job again" in crd_api.refusal_of_change(changed)
    crd_api.delete_job("program")
    long = {**roles("name: a-role-with-20-chars, port: 80"), "metadata": {"name": "n" * 36}}
    assert "have more than 55 characters together: shorten one" in crd_api.refusal_of_new(long)
