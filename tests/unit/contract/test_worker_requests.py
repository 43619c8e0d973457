"""Requests of a worker pod, and refusals of what an instance type cannot hold."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_contract.job import TrainingJobSpec
from trainium_contract.models.families import PRESETS
from trainium_contract.requirements.worker_requests import WorkerRequests, compute_worker_requests, explain_misfit
from trainium_contract.sizes import SizeRule
from trainium_contract.trainer.model import ModelConfig, ModelPreset

GIB = 1 << 30


def build_spec(accelerator: dict[str, Any] | None = None, *, replicas: int = 4, tensor: int = 1, **trainer: Any) -> Any:
    fields = {"data": {"source": "/data"}, "batch": {"globalSize": 1024, "microSize": 1}, "steps": 10, **trainer}
    workers = {"replicas": replicas, "accelerator": accelerator or {"instanceType": "trn1.32xlarge"}}
    return TrainingJobSpec.model_validate({"workers": workers, "parallelism": {"tensor": tensor}, "trainer": fields})


def requests_of(job: TrainingJobSpec) -> WorkerRequests:
    return compute_worker_requests(job.training_config(), job.workers.accelerator, job.batch_shape())


def refusal(job: TrainingJobSpec, nodes: int = 4) -> str:
    return explain_misfit(job.training_config(), job.workers.accelerator, job.batch_shape(), nodes)


HLAT = {"model": {"preset": "Llama2-7B"}, "precision": "BFloat16"}


def test_a_worker_of_a_known_instance_type_requests_memory_cpu_and_shared_memory() -> None:
    requests = requests_of(build_spec(tensor=32, **HLAT))
    assert 100 * GIB < requests.memory <= 0.85 * 512 * GIB
    assert requests.milli_cpu == 33_000
    assert requests.shared_memory == 256 * GIB


@pytest.mark.parametrize("replicas", [1, 3, 128])
def test_requests_do_not_depend_on_the_number_of_workers(replicas: int) -> None:
    """A pod stays when the job grows or shrinks; another request would make it outdated."""
    assert requests_of(build_spec(tensor=32, replicas=replicas, **HLAT)) == requests_of(
        build_spec(tensor=32, replicas=2, **HLAT)
    )


@given(
    preset=st.sampled_from(ModelPreset),
    tensor=st.sampled_from([1, 8, 32]),
    kind=st.sampled_from(["trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge"]),
    mode=st.sampled_from(["Replicated", "ShardedOptimizer", "FullySharded"]),
)
def test_requests_leave_capacity_on_the_node(preset: ModelPreset, tensor: int, kind: str, mode: str) -> None:
    job = build_spec({"instanceType": kind}, tensor=tensor, model={"preset": preset}, dataParallel=mode)
    instance, requests = job.workers.accelerator.instance(), requests_of(job)
    assert instance is not None
    assert 0 < requests.memory <= 0.85 * instance.host_bytes
    assert requests.shared_memory == instance.host_bytes // 2
    assert requests.milli_cpu == 1000 * (instance.cores + 1) <= 850 * instance.vcpus


def test_a_worker_with_some_devices_requests_its_share() -> None:
    part = {"instanceType": "trn1.32xlarge", "resources": {"aws.amazon.com/neuron": "4"}, "coresPerNode": 8}
    requests = requests_of(build_spec(part, tensor=8, **HLAT))
    assert requests.memory <= 0.85 * 128 * GIB
    assert requests.shared_memory == 64 * GIB


@pytest.mark.parametrize(("kind", "processes"), [("trn1.2xlarge", 8), ("trn1.32xlarge", 128)])
def test_cpu_requests_never_exceed_the_node(kind: str, processes: int) -> None:
    job = build_spec({"instanceType": kind, "coresPerNode": processes})
    instance = job.workers.accelerator.instance()
    assert instance is not None
    assert requests_of(job).milli_cpu <= 850 * instance.vcpus


def test_a_physical_core_has_half_the_memory_of_the_two_that_are_joined() -> None:
    def kind(logical: int, cores: int) -> dict[str, Any]:
        claim = {"logicalNeuronCore": logical}
        return {"instanceType": "trn2.48xlarge", "coresPerNode": cores, "claim": claim}

    assert refusal(build_spec(kind(2, 64), tensor=8, **HLAT)) == ""
    assert "A core of trn2.48xlarge has 12.0 GiB, but" in refusal(build_spec(kind(1, 128), tensor=8, **HLAT))
    assert refusal(build_spec(kind(1, 128), tensor=16, **HLAT)) == ""


def test_without_snapshots_less_memory_is_requested() -> None:
    whole = build_spec(tensor=8, model={"preset": "Llama3.2-1B"}, dataParallel="FullySharded")
    fewer = whole.model_copy(
        update={
            "checkpoint": whole.checkpoint.model_validate({**whole.checkpoint.to_wire(), "memory": {"everySteps": 0}})
        }
    )
    assert requests_of(fewer).memory < requests_of(whole).memory


def test_a_worker_of_an_unknown_instance_type_requests_little() -> None:
    requests = requests_of(build_spec({"device": "cpu", "coresPerNode": 4}))
    assert (requests.memory, requests.milli_cpu) == (GIB, 400)
    assert requests.shared_memory is not None
    assert GIB < requests.shared_memory < 2 * GIB, "a tiny model's snapshots, and what loaders share"


def test_a_model_in_a_file_gets_no_estimate() -> None:
    requests = requests_of(build_spec({"device": "cpu"}, model={"path": "/models/mine"}))
    assert requests.shared_memory is None
    assert requests_of(build_spec(model={"path": "/models/mine"})).memory == 32 * GIB, "the processes themselves"


def test_a_larger_model_requests_more_memory() -> None:
    sizes = [
        requests_of(build_spec(tensor=32, model={"preset": preset})).memory
        for preset in ("Llama3.2-1B", "Llama2-7B", "Llama2-13B")
    ]
    assert sizes == sorted(sizes)
    assert len({*sizes}) == 3


def test_weights_that_do_not_fit_a_core_are_refused_with_advice() -> None:
    reported = refusal(build_spec(tensor=1, **HLAT))
    assert reported.startswith("A core of trn1.32xlarge has 16.0 GiB, but on 4 nodes a process needs ")
    assert "raise parallelism.tensor" in reported
    assert refusal(build_spec(tensor=32, **HLAT)) == ""


@pytest.mark.parametrize(
    "job",
    [
        build_spec({"device": "cpu"}, **HLAT),
        build_spec({"instanceType": "m7i.48xlarge"}, **HLAT),
        build_spec(model={"path": "/models/mine"}),
        build_spec(tuning={"method": "LoRA"}, **HLAT),
    ],
    ids=["CPU", "unknown type", "model in a file", "adapter"],
)
def test_unknown_memory_is_never_a_refusal(job: TrainingJobSpec) -> None:
    assert refusal(job) == ""


def test_an_illegal_size_is_not_refused_for_its_memory() -> None:
    assert refusal(build_spec(tensor=32, **HLAT), nodes=0) == ""


@given(
    preset=st.sampled_from(["Llama3.2-1B", "Llama2-7B", "Llama2-13B", "Llama3.1-70B"]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    kind=st.sampled_from(["trn1.2xlarge", "trn1.32xlarge", "trn2.3xlarge"]),
    mode=st.sampled_from(["Replicated", "ShardedOptimizer", "FullySharded"]),
    smallest=st.integers(1, 8),
    largest=st.integers(8, 40),
    batch=st.sampled_from([96, 256, 1000]),
    even=st.booleans(),
)
def test_the_least_size_is_the_smallest_requested_one_that_fits(
    preset: str, tensor: int, kind: str, mode: str, smallest: int, largest: int, batch: int, even: bool
) -> None:
    trainer = {"model": {"preset": preset}, "dataParallel": mode, "batch": {"globalSize": batch}, "backend": "Native"}
    job = build_spec({"instanceType": kind}, tensor=tensor, **trainer)
    job = job.replaced(
        workers=job.workers.replaced(replicas=largest, min_replicas=smallest),
        elasticity=job.elasticity.replaced(sizes=SizeRule.EVEN if even else SizeRule.ANY),
    )
    fitting = [nodes for nodes in job.batch_shape().legal_sizes(smallest, largest) if not refusal(job, nodes)]
    least = job.min_size(largest)
    assert next((size for size in fitting if size >= least), None) == next(iter(fitting), None)
    assert least in {smallest, largest} or least == fitting[0]
    assert fitting == [] or fitting == list(job.batch_shape().legal_sizes(fitting[0], largest)), "more nodes hold less"


def test_an_instance_type_of_one_device_refuses_models_that_do_not_fit() -> None:
    requests = requests_of(build_spec({"instanceType": "trn2.3xlarge"}, model={"preset": "Llama3.2-1B"}))
    assert (requests.memory, requests.milli_cpu) == (int(0.85 * 128 * GIB), 5_000)
    job = build_spec({"instanceType": "trn2.3xlarge"}, tensor=1, **HLAT)
    assert refusal(job).startswith("A core of trn2.3xlarge has 24.0 GiB, but on 4 nodes a process needs ")
    assert (job.batch_shape().cores_per_node, job.workers.accelerator.count_claimed_devices()) == (4, 0)


def test_sizes_in_the_spec_override_the_preset() -> None:
    shape = ModelConfig.model_validate({"preset": "Llama2-7B", "hiddenSize": 2048, "numLayers": 2}).known_shape()
    assert shape is not None
    assert (shape.hidden_size, shape.num_layers, shape.head_dim, shape.intermediate_size) == (2048, 2, 64, 11_008)


def test_every_preset_has_sizes() -> None:
    assert set(PRESETS) == set(ModelPreset)
