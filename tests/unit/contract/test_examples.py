"""The examples: each is a job that the contract takes and that can start at its sizes; HLAT's has HLAT's settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainium_contract.job import TrainingJobSpec
from trainium_contract.trainer_optimizer import ScheduleKind, WeightDecayScope
from trainium_contract.trainer_parallelism import Precision, Recompute
from trainium_trainer import neuron_environment
from trainium_trainer.backends.limits import check_nxd
from trainium_trainer.config import Launch, settle
from trainium_trainer.schedule import learning_rate

FOLDER = Path(__file__).parents[3] / "manifests/examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def spec_of(example: str) -> TrainingJobSpec:
    document = yaml.safe_load((FOLDER / example).read_text(encoding="utf-8"))
    return TrainingJobSpec.model_validate(document["spec"])


def legal_sizes(spec: TrainingJobSpec) -> tuple[int, ...]:
    workers = spec.workers
    largest = workers.max_replicas or workers.replicas
    return spec.batch_shape().legal_sizes(workers.min_replicas or workers.replicas, largest)


def launch(world_size: int) -> Launch:
    return Launch(
        rank=0,
        local_rank=0,
        world_size=world_size,
        generation=1,
        attempt=0,
        run_id="",
        progress_file=None,
        memory_directory=None,
    )


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_trainer_takes_an_example_at_each_of_its_sizes(example: str, tmp_path: Path) -> None:
    spec = spec_of(example)
    sizes = legal_sizes(spec)
    assert spec.workers.replicas in sizes
    config = spec.training_config()
    assert type(config).model_validate(config.to_wire()) == config
    # The corpus and its tokenizer are on a volume of the cluster; the vocabulary of the published model is known.
    data = config.data.model_copy(update={"tokenizer": type(config.data.tokenizer)()})
    for nodes in sizes:
        settled = settle(config.model_copy(update={"data": data}), launch(nodes * spec.workers.accelerator.cores()))
        assert settled.dp_size * config.batch.micro_size * spec.batch_shape().accumulation(nodes) == (
            config.batch.global_size
        )


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_elastic_example_has_another_size_to_go_on_with(example: str) -> None:
    spec = spec_of(example)
    if spec.workers.min_replicas is not None:
        assert min(legal_sizes(spec)) < spec.workers.replicas


def test_the_hlat_example_has_the_settings_of_hlat() -> None:
    spec = spec_of("hlat-7b.yaml")
    config = spec.training_config()
    shape = spec.batch_shape()
    nodes = spec.workers.replicas
    assert (nodes, spec.workers.accelerator.instance_type) == (128, "trn1.32xlarge")
    assert (config.batch.global_size, config.data.sequence_length) == (1024, 4096)
    assert (config.parallelism.tensor, config.parallelism.pipeline, config.parallelism.sequence) == (8, 1, True)
    assert (shape.data_parallel(nodes), shape.accumulation(nodes)) == (512, 2)
    optimizer = config.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.clip_norm) == (0.9, 0.95, 1.0)
    assert (optimizer.weight_decay, optimizer.decay_scope) == (0.1, WeightDecayScope.ALL)
    assert (config.schedule.kind, config.schedule.warmup_steps) == (ScheduleKind.COSINE, 2000)
    assert learning_rate(config, 1999) == pytest.approx(3e-4)
    assert learning_rate(config, config.steps - 1) == pytest.approx(3e-5)
    assert config.precision is Precision.BFLOAT16_STOCHASTIC
    variables = neuron_environment.variables(config, nxd=True, given={})
    assert variables["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"
    assert config.recompute is Recompute.SELECTIVE
    assert config.checkpoint.durable.every_steps == 1000
    # Time alone must not make a save: a step takes seconds.
    assert config.checkpoint.durable.every_seconds == 86_400


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_for_trn1_can_be_run_by_the_backend_of_trn1(example: str) -> None:
    spec = spec_of(example)
    if (spec.workers.accelerator.instance_type or "").startswith("trn1"):
        check_nxd(spec.training_config(), spec.batch_shape().data_parallel(spec.workers.replicas))


def test_the_70b_example_divides_its_weights_over_a_whole_node() -> None:
    spec = spec_of("hlat-70b.yaml")
    assert (spec.workers.replicas, spec.parallelism.tensor) == (128, spec.workers.accelerator.cores())
