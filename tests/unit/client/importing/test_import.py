"""`kubectl trn import`: recorded jobs of other platforms, decisions on commands and scripts, and bounded input.

`python -m tests.unit.client.importing.test_import` writes `imported/`, one TrainingJob for each file of `cases/`; the
review reads what changed.
"""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.suite.any_json import mutated_values
from trainium_client.commands.main import main
from trainium_client.importing.convert import ImportedJob
from trainium_client.importing.documents import MAX_BYTES, parse_documents
from trainium_client.importing.importer import Options, import_jobs
from trainium_client.importing.torchrun import read_command
from trainium_client.importing.writer import write_job
from trainium_contract.api_server.errors import ClientError
from trainium_contract.job import TrainingJobSpec

FOLDER = Path(__file__).parent
CASES = sorted((FOLDER / "cases").iterdir())
COMPLETE = Options(instance_type="trn2.48xlarge", image="registry.example.com/team/neuron:1")


def import_text(text: str, name: str = "job.yaml") -> dict[str, Any]:
    ((source, job),) = import_jobs([(name, text)], Options())
    written: dict[str, Any] = yaml.safe_load(write_job(job, source))
    assert written == job.document
    return written


def golden(case: Path) -> str:
    ((source, job),) = import_jobs([(case.name, case.read_text(encoding="utf-8"))], Options())
    return write_job(job, source)


def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", err),
        pytest.raises(SystemExit) as ended,
    ):
        main(["import", *arguments])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


@pytest.mark.parametrize("text", ["1e-3", "5E5", ".5", "1.", "10", "0o17", "-2e+06", "true", "null"])
def test_text_that_a_reader_of_yaml_takes_for_a_value_is_quoted(text: str) -> None:
    """Kubernetes reads YAML 1.2, in which 1e-3 is a number, and refuses a number as an argument of a command."""
    job = ImportedJob({"command": ["python", "train.py", "--learning-rate", text, "v1e-3"]})
    written = write_job(job, "a script")
    assert f"'{text}'" in written
    assert yaml.safe_load(written) == job.document


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_job_becomes_the_recorded_one(case: Path) -> None:
    assert golden(case) == (FOLDER / "imported" / f"{case.name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_contract_accepts_a_job_with_instance_type_and_image(case: Path) -> None:
    ((_, job),) = import_jobs([(case.name, case.read_text(encoding="utf-8"))], COMPLETE)
    assert job.missing == []
    TrainingJobSpec.model_validate(job.document["spec"])
    assert "nvidia.com" not in yaml.safe_dump(job.document["spec"]["workers"])


COMMANDS: list[tuple[list[str], tuple[str, ...], dict[str, Any]]] = [
    (["torchrun", "a.py"], ("python", "a.py"), {"launched": True, "processes": None}),
    (["torchrun", "--nproc_per_node=8", "a.py", "--x"], ("python", "a.py", "--x"), {"processes": 8}),
    (["torchrun", "--nnodes", "2:6", "a.py"], ("python", "a.py"), {"min_nodes": 2, "max_nodes": 6}),
    (["torchrun", "--nproc-per-node", "gpu", "a.py"], ("python", "a.py"), {"one_for_each_device": True}),
    (
        ["torchrun", "--max-restarts=3", "-m", "pkg.a", "-m", "b"],
        ("python", "-m", "pkg.a", "-m", "b"),
        {"max_restarts": 3},
    ),
    (["torchrun", "--no-python", "./a", "b"], ("./a", "b"), {}),
    (["python3.11", "-u", "-m", "torch.distributed.run", "a.py"], ("python3.11", "a.py"), {}),
    (["torchrun", "a.py", "$(DATA)"], ("sh", "-c", 'exec python a.py "${DATA}"'), {}),
    (["torchrun", "a.py", "$(RUN)"], ("python", "a.py", "7"), {}),
    (["python", "a.py"], ("python", "a.py"), {"launched": False}),
    (["sh", "-c", "torchrun a.py"], ("python", "a.py"), {}),
    (["sh", "-c", "exec torchrun a.py 'x y'"], ("python", "a.py", "x y"), {}),
    (["sh", "-c", "N=4; torchrun --nproc-per-node $N a.py $N"], ("python", "a.py", "4"), {"processes": 4}),
    (["bash", "-c", "A=(--nproc-per-node 2 --nnodes 3)\ntorchrun ${A[@]} a.py"], ("python", "a.py"), {"max_nodes": 3}),
    (["bash", "-c", 'O="--nnodes 3"; torchrun $O a.py'], ("python", "a.py"), {"max_nodes": 3}),
    (["sh", "-c", "torchrun a.py $HOST"], ("sh", "-c", "exec python a.py $HOST"), {}),
    (["sh", "-c", "cd /w && torchrun a.py"], ("sh", "-c", "cd /w && exec python a.py"), {}),
    (
        ["sh", "-c", "cat > h <<E\ntorchrun no.py\nE\ntorchrun a.py"],
        ("sh", "-c", "cat > h <<E\ntorchrun no.py\nE\nexec python a.py"),
        {},
    ),
    (["sh", "-ec", "torchrun a.py; cp a b"], ("sh", "-ec", "set -e\npython a.py; cp a b"), {}),
    (["sh", "-c", "torchrun a.py 2>&1 | tee log"], ("python", "a.py"), {}),
    (["sh", "-c", "torchrun \\\n  --nnodes 2 \\\n  a.py \\\n  --b"], ("python", "a.py", "--b"), {"max_nodes": 2}),
]


@pytest.mark.parametrize(("command", "program", "facts"), COMMANDS, ids=[" ".join(row[0]) for row in COMMANDS])
def test_the_launcher_of_a_command_is_replaced(
    command: list[str], program: tuple[str, ...], facts: dict[str, Any]
) -> None:
    read = read_command(command, [], {"RUN": "7"})
    assert (*read.command, *read.args) == program
    assert {name: getattr(read, name) for name in facts} == facts


SLURM = [
    ("--nodes=2-4", "workers.replicas", 4),
    ("--nodes=2-4", "workers.minReplicas", 2),
    ("-N 3 -t 90", "activeDeadlineSeconds", 5400),
    ("--time=1-2", "activeDeadlineSeconds", 93_600),
    ("--time=01:30:15", "activeDeadlineSeconds", 5415),
    ("--ntasks=8 --ntasks-per-node=4", "workers.replicas", 2),
    ("--signal=B:TERM@90", "recovery.gracePeriodSeconds", 90),
    ("--container-image=registry#team/a:1", "program.image", "registry/team/a:1"),
    ("--chdir=/work", "program.workingDirectory", "/work"),
]


@pytest.mark.parametrize(("options", "path", "value"), SLURM, ids=[f"{row[0]} {row[1]}" for row in SLURM])
def test_an_option_of_slurm_becomes_a_field(options: str, path: str, value: Any) -> None:
    found: Any = import_text(f"#!/bin/bash\n#SBATCH {options}\nsrun torchrun a.py\n", "run.sbatch")["spec"]
    for name in path.split("."):
        found = found[name]
    assert found == value


def test_srun_without_torchrun_starts_a_process_for_each_task() -> None:
    spec = import_text("#!/bin/sh\n#SBATCH -N 2 --ntasks-per-node=8\nsrun python a.py --b\n", "run.sh")["spec"]
    assert spec["program"]["command"] == ["python", "a.py"]
    assert spec["program"]["processesPerNode"] == 8


def test_a_template_is_merged_without_the_names_that_the_operator_uses() -> None:
    case = (FOLDER / "cases/llama.train_job.yaml").read_text(encoding="utf-8")
    spec = import_text(case)["spec"]
    worker, beside = spec["workers"]["template"]["spec"]["containers"]
    assert worker["volumeMounts"] == [{"name": "job-cache", "mountPath": "/root/.cache"}]
    assert beside["name"] == "metrics"
    assert spec["checkpoint"]["storage"] == {"persistentVolumeClaim": {"claimName": "llama"}}


def test_values_of_variables_are_in_no_comment_and_no_error() -> None:
    secret = "hunter2hunter2"
    script = f"#!/bin/sh\nTOKEN=$(echo {secret})\nexport MASTER_PORT={secret}\nsrun torchrun a.py\n"
    ((name, job),) = import_jobs([("run.sh", script)], Options())
    assert secret not in write_job(job, name)
    with pytest.raises(ClientError) as refused:
        parse_documents(f"a: {secret}\n b: [\n", "job.yaml")
    assert secret not in str(refused.value)


def pytorch_job(**container: Any) -> str:
    main = {"name": "pytorch", "image": "a:1", "command": ["torchrun", "a.py"], **container}
    worker = {"replicas": 1, "template": {"spec": {"containers": [main]}}}
    spec = {"pytorchReplicaSpecs": {"Worker": worker}}
    return yaml.safe_dump(
        {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"}, "spec": spec}
    )


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{', '.join([f'*{chr(97 + level)}'] * 10)}]\n" for level in range(9)
)
RAY = """
apiVersion: ray.io/v1
kind: RayJob
spec:
  entrypoint: python train.py
  rayClusterSpec: {headGroupSpec: {template: {spec: {containers: [{name: a, image: b}]}}}}
"""
TWO_JOBS = "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nspec: {replicatedJobs: [{name: a}, {name: b}]}"
WITHOUT_RUNTIME = (FOLDER / "cases/llama.train_job.yaml").read_text(encoding="utf-8").partition("---")[0]
REFUSED: list[tuple[str, str]] = [
    (BOMB, "more than 200000 values"),
    ("[" * 100, "more than 64 levels"),
    ("a: 1\n---\n" * 70, "more than 64 documents"),
    ("a: &a [*a]", "within what it stands for"),
    ("a: [x] b\n c: [", "line 1 is not valid YAML"),
    ("1: 2", "a key is no text"),
    ("just words", "a document that is no object"),
    ("", "has no job"),
    ("apiVersion: v1\nkind: ConfigMap", "has ConfigMap v1: give one of PyTorchJob"),
    ("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: [a]", "spec is not an object"),
    ("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {}", "no Worker and no Master"),
    (pytorch_job(command=5), "command is not a list"),
    (pytorch_job(command=["torchrun", "--nnodes", "2"]), "required: script"),
    (pytorch_job(command=["torchrun", "--nothing", "a.py"]), "unknown option --nothing"),
    (pytorch_job(command=["torchrun", "$(ALL)", "a.py"]), "come from $(ALL)"),
    (pytorch_job(args=["x" * 5000]), "program.args.0: String should have at most 4096 characters"),
    (WITHOUT_RUNTIME, "needs its ClusterTrainingRuntime torch-distributed"),
    (RAY, "is a driver of Ray"),
    (TWO_JOBS, "has a, b: give --replica"),
    ("#!/bin/sh\necho hello\n", "nothing in the script starts torchrun or srun"),
    ("x" * (MAX_BYTES + 1), f"more than {MAX_BYTES} bytes"),
    ("\udcff", "not UTF-8"),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED, ids=[row[1] for row in REFUSED])
def test_an_input_that_cannot_be_imported_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    code, out, err = run("-", stdin=text.encode("utf-8", "surrogateescape"))
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_several_jobs_of_one_stream_are_printed_and_missing_fields_are_listed() -> None:
    stream = f"{pytorch_job()}---\n{pytorch_job(resources={'limits': {'nvidia.com/gpu': 1}})}---\nkind: Service\n"
    code, out, err = run("-", stdin=stream.encode())
    assert code == 0
    assert [job["spec"]["workers"].get("accelerator") for job in yaml.safe_load_all(out)] == [{"device": "cpu"}, None]
    assert "Service beside the job: apply it by itself" in out
    assert err.count("fill in") == 1
    assert "spec.workers.accelerator: each node had 1 nvidia.com/gpu" in err


YAML_CASES = [list(yaml.safe_load_all(path.read_text(encoding="utf-8"))) for path in CASES if path.suffix == ".yaml"]
PIECES = [
    "torchrun ",
    "srun ",
    "a.py",
    "'",
    '"',
    "$(",
    ")",
    "${A}",
    "A=(",
    "\\\n",
    "\n",
    ";",
    "#",
    "|",
    "<<E\n",
    " --nnodes 2 ",
]


@given(st.sampled_from(YAML_CASES).flatmap(lambda documents: mutated_values(documents, 5, {})))
def test_any_document_is_imported_or_refused(documents: Any) -> None:
    text = yaml.safe_dump_all(documents if isinstance(documents, list) else [documents])
    with contextlib.suppress(ClientError):
        for name, job in import_jobs([("job", text)], COMPLETE):
            assert yaml.safe_load(write_job(job, name)) == job.document


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_script_is_imported_or_refused(script: str) -> None:
    with contextlib.suppress(ClientError):
        import_jobs([("run.sh", f"#!/bin/sh\n{script}")], COMPLETE)


if __name__ == "__main__":
    for case_file in CASES:
        (FOLDER / "imported" / f"{case_file.name}.yaml").write_text(golden(case_file), encoding="utf-8")
