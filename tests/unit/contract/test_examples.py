"""The example manifests: each is valid, can start at its sizes, and has the settings of its published table.

The bases of fine-tuning are on a volume of the cluster: a folder with a published model's configuration stands for one.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainium_contract.accelerators import INSTANCES
from trainium_contract.job import TrainingJobSpec
from trainium_contract.models.families import PRESETS
from trainium_contract.models.parameters import count_parameters
from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_contract.trainer.config import TrainerSpec, TrainingConfig
from trainium_contract.trainer.data import HubConfig
from trainium_contract.trainer.examples import DataFormat, LossOn
from trainium_contract.trainer.model import ModelPreset
from trainium_contract.trainer.optimizer import ScheduleKind, WeightDecayScope
from trainium_contract.trainer.parallelism import BackendChoice, Precision, Recompute
from trainium_contract.trainer.tuning import TuningMethod
from trainium_trainer import neuron_environment
from trainium_trainer.backends.nxd.limits import check_limits
from trainium_trainer.configuration.config import Launch, Settings, resolve_settings, resolve_steps
from trainium_trainer.exits import UserError
from trainium_trainer.loop.memory_check import estimate_run_memory, refuse_too_small
from trainium_trainer.loop.schedule import compute_learning_rate

FOLDER = Path(__file__).parents[3] / "manifests/examples"
DOCUMENTS: dict[str, dict[str, Any]] = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))
}
JOBS = [name for name, document in DOCUMENTS.items() if document["kind"] == "TrainingJob"]
EXAMPLES = [name for name in JOBS if "trainer" in DOCUMENTS[name]["spec"]]
BASES = {
    "/data/models/llama2-7b": ModelPreset.LLAMA2_7B,
    "/data/models/llama2-13b": ModelPreset.LLAMA2_13B,
    "/data/models/llama3-8b": ModelPreset.LLAMA3_8B,
}
TUNING = [name for name in EXAMPLES if DOCUMENTS[name]["spec"]["trainer"].get("model", {}).get("weights")]
DOLLY_RECORDS = 15_011
"""Records of databricks-dolly-15k."""
HLAT_SETTINGS = {
    "nodes": (128, "trn1.32xlarge"),
    "layers, width, heads": (32, 4096, 32),
    "sequence length": 4096,
    "global batch size": 1024,
    "micro batch size": 1,
    "tensor, pipeline, data parallel": (8, 1, 512),
    "sequence parallel": True,
    "gradient accumulation": 2,
    "beta1, beta2, eps": (0.9, 0.95, 1e-5),
    "weight decay": (0.1, WeightDecayScope.ALL),
    "gradient clipping": 1.0,
    "total steps": 500_000,
    "learning rate, its floor": (3e-4, 3e-5),
    "warm-up": (2000, ScheduleKind.COSINE),
    "initial deviation": 0.02,
    "precision": Precision.BFLOAT16_STOCHASTIC,
    "recompute": Recompute.SELECTIVE,
    "checkpoints: steps between, kept": (1000, 5),
    "weights alone: steps between": 23_842,
}
"""The 7B column of the paper (arXiv 2404.10630) and what its text adds; the decay's end has a separate test."""


def spec_of(example: str) -> TrainingJobSpec:
    return TrainingJobSpec.model_validate(DOCUMENTS[example]["spec"])


def trainer_of(spec: TrainingJobSpec) -> TrainerSpec:
    assert spec.trainer is not None
    return spec.trainer


def base_folder(shape: ModelShape, folder: Path) -> Path:
    """Write the configuration file of a published model; return its folder."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_local_files(config: TrainingConfig, folder: Path) -> TrainingConfig:
    """Replace files on volumes of the cluster by local ones."""
    # The corpus and its tokenizer are on the volume; the vocabulary of the published model is known.
    data = config.data.model_copy(update={"tokenizer": type(config.data.tokenizer)()})
    model = config.model
    if model.weights is not None:
        base = base_folder(PRESETS[BASES[model.weights]], folder / "base")
        model = model.model_copy(update={"weights": str(base)})
    return config.model_copy(update={"data": data, "model": model})


def settings_of(example: str, folder: Path, nodes: int | None = None) -> Settings:
    spec = spec_of(example)
    launch = Launch(
        rank=0, local_rank=0, world_size=(nodes or spec.workers.replicas) * spec.workers.accelerator.cores(),
        generation=1, attempt=0, run_id="", progress_file=None, memory_directory=None,
    )  # fmt: skip
    return resolve_settings(with_local_files(spec.training_config(), folder), launch)


def legal_sizes(spec: TrainingJobSpec) -> tuple[int, ...]:
    workers = spec.workers
    largest = workers.max_replicas or workers.replicas
    return spec.batch_shape().legal_sizes(workers.min_replicas or workers.replicas, largest)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_trainer_accepts_an_example_at_each_of_its_sizes(example: str, tmp_path: Path) -> None:
    spec = spec_of(example)
    sizes = legal_sizes(spec)
    assert spec.workers.replicas in sizes
    config = spec.training_config()
    assert type(config).model_validate(config.to_wire()) == config
    for nodes in sizes:
        settings = settings_of(example, tmp_path, nodes)
        rows = settings.dp_size * config.batch.micro_size * settings.passes
        assert settings.passes == spec.batch_shape().micro_batches(nodes)
        assert config.batch.global_size == round(spec.batch_shape().fill_ratio(nodes) * rows)


@pytest.mark.parametrize("example", [name for name in EXAMPLES if spec_of(name).workers.min_replicas is not None])
def test_an_elastic_example_has_a_smaller_legal_size(example: str) -> None:
    spec = spec_of(example)
    assert min(legal_sizes(spec)) < spec.workers.replicas


def test_the_hlat_example_has_the_settings_of_the_papers_table() -> None:
    spec = spec_of("hlat-7b.yaml")
    config, optimizer, nodes = spec.training_config(), trainer_of(spec).optimizer, spec.workers.replicas
    shape, parallelism = spec.batch_shape(), spec.parallelism
    model = PRESETS[config.model.preset]
    tokens_of_a_step = config.batch.global_size * config.data.sequence_length
    milestone = config.checkpoint.milestones
    settings = {
        "nodes": (nodes, spec.workers.accelerator.instance_type),
        "layers, width, heads": (model.num_layers, model.hidden_size, model.num_attention_heads),
        "sequence length": config.data.sequence_length,
        "global batch size": config.batch.global_size,
        "micro batch size": config.batch.micro_size,
        "tensor, pipeline, data parallel": (parallelism.tensor, parallelism.pipeline, shape.data_parallel(nodes)),
        "sequence parallel": parallelism.sequence,
        "gradient accumulation": shape.micro_batches(nodes),
        "beta1, beta2, eps": (optimizer.beta1, optimizer.beta2, optimizer.eps),
        "weight decay": (optimizer.weight_decay, optimizer.decay_scope),
        "gradient clipping": optimizer.clip_norm,
        "total steps": config.steps,
        "learning rate, its floor": (
            compute_learning_rate(config, 1999),
            pytest.approx(compute_learning_rate(config, config.steps - 1), rel=1e-12),
        ),
        "warm-up": (config.schedule.warmup_steps, config.schedule.kind),
        "initial deviation": model.initial_std,
        "precision": config.precision,
        "recompute": config.recompute,
        "checkpoints: steps between, kept": (
            config.checkpoint.durable.every_steps,
            config.checkpoint.durable.keep_last,
        ),
        "weights alone: steps between": round((milestone.every_tokens or 0) / tokens_of_a_step),
    }
    assert settings == HLAT_SETTINGS


def test_the_hlat_examples_learning_rate_ends_its_cosine_at_480_000_of_500_000_steps() -> None:
    config = spec_of("hlat-7b.yaml").training_config()
    rates = [
        compute_learning_rate(config, done - 1) for done in (1, 1000, 2000, 241_000, 479_000, 480_000, 490_000, 500_000)
    ]
    assert rates == pytest.approx([1.5e-7, 1.5e-4, 3e-4, 1.65e-4, 3e-5, 3e-5, 3e-5, 3e-5], rel=1e-4)
    assert rates[4] > rates[5] == rates[6] == rates[7]


def test_the_hlat_example_rounds_at_random_and_saves_by_steps_alone() -> None:
    config = spec_of("hlat-7b.yaml").training_config()
    variables = neuron_environment.list_variables(config, nxd=True, given={})
    assert variables["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"
    # Saves follow from steps: elapsed time must not cause one.
    assert config.checkpoint.durable.every_seconds == 86_400


def test_deviations_of_the_hlat_example_are_commented() -> None:
    spec = spec_of("hlat-7b.yaml")
    copied_fields = {"model", "data", "batch", "steps", "optimizer", "schedule", "precision", "recompute"}
    assert trainer_of(spec).model_fields_set - copied_fields == {"data_parallel", "non_finite_tolerance"}
    assert spec.workers.min_replicas == 64
    text = (FOLDER / "hlat-7b.yaml").read_text(encoding="utf-8")
    for field in ("minReplicas: 64", "dataParallel: ShardedOptimizer", "nonFiniteTolerance: 3"):
        (line,) = (line for line in text.splitlines() if field in line)
        assert "#" in line, f"{field} has no reason beside it"


@pytest.mark.parametrize(
    "example",
    [name for name in EXAMPLES if (spec_of(name).workers.accelerator.instance_type or "").startswith("trn1")],
)
def test_an_example_for_trn1_can_be_run_by_the_backend_of_trn1(example: str) -> None:
    spec = spec_of(example)
    check_limits(spec.training_config(), spec.batch_shape().data_parallel(spec.workers.replicas))


def test_the_70b_example_divides_its_weights_over_half_a_node_and_keeps_hlats_number_of_cores() -> None:
    spec = spec_of("hlat-70b.yaml")
    cores = spec.workers.accelerator.cores()
    assert (spec.workers.replicas * cores, spec.parallelism.tensor) == (4096, cores // 2)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_true_shape_of_an_example_fits_its_cores_at_each_of_its_sizes(example: str, tmp_path: Path) -> None:
    accelerator = spec_of(example).workers.accelerator
    instance = accelerator.instance()
    for nodes in legal_sizes(spec_of(example)) if instance is not None else ():
        settings = settings_of(example, tmp_path, nodes)
        has_context = settings.config.parallelism.context > 1  # which backend Nxd refuses
        for backend in set(BackendChoice) - ({BackendChoice.NXD} if has_context else set()):
            with_backend = replace(settings, config=settings.config.model_copy(update={"backend": backend}))
            estimate = estimate_run_memory(with_backend, accelerator.cores(), accelerator.instance_type or "")
            assert estimate is not None
            assert refuse_too_small(estimate, instance, "the instance") == []


def test_the_70b_example_would_not_fit_the_cores_of_trn1(tmp_path: Path) -> None:
    estimate = estimate_run_memory(settings_of("hlat-70b.yaml", tmp_path), 32, "trn1.32xlarge")
    assert estimate is not None
    assert estimate.state == pytest.approx(13.7e9 + 0.2e9, rel=0.005)
    with pytest.raises(UserError, match=r"has 16.0 GiB, but a process needs 13.0 GiB of weights"):
        refuse_too_small(estimate, INSTANCES["trn1.32xlarge"], "trn1.32xlarge")


def claims_by_mount_path(document: dict[str, Any], example: str) -> dict[str, str]:
    """Return the volume claims of a pod by mount path."""
    pod = document["spec"]["template"]["spec"] if example == "fetch-model.yaml" else document
    claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]}
    return {mount["mountPath"]: claims[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}


def test_the_fetched_model_is_at_the_path_of_the_examples_with_a_token_from_a_secret() -> None:
    fetch = DOCUMENTS["fetch-model.yaml"]
    (container,) = fetch["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["trainium-trainer", "fetch-model"]
    output = container["command"][container["command"].index("--output") + 1]
    assert {trainer_of(spec_of(example)).model.weights for example in TUNING if "llama3-8b" in example} == {output}
    (variable,) = container["env"]
    assert (variable["name"], set(variable)) == ("HF_TOKEN", {"name", "valueFrom"})
    assert variable["valueFrom"]["secretKeyRef"]["name"]
    for example in TUNING:
        template = spec_of(example).workers.template["spec"]
        assert claims_by_mount_path(template, example) == claims_by_mount_path(fetch, "fetch-model.yaml")
        assert "env" not in template["containers"][0], "workers need no token"


@pytest.mark.parametrize("example", TUNING)
def test_a_fine_tuning_example_writes_artifacts_and_evaluates(example: str) -> None:
    spec = spec_of(example)
    kinds = trainer_of(spec).artifacts.kinds
    assert kinds is not None
    assert ArtifactKind.MODEL in kinds
    assert (ArtifactKind.ADAPTER in kinds) == (trainer_of(spec).tuning.method is TuningMethod.LORA)
    assert trainer_of(spec).evaluate.enabled
    assert trainer_of(spec).data.validation is not None
    assert spec.precompile.enabled
    assert spec.checkpoint.storage.is_persistent


@pytest.mark.parametrize("example", ["llama2-7b-full-text.yaml", "llama2-7b-full-qnli.yaml"])
def test_llama2_7b_in_full_has_the_settings_of_nemo_megatron(example: str) -> None:
    spec = spec_of(example)
    config, shape = spec.training_config(), spec.batch_shape()
    assert spec.workers.accelerator.instance_type == "trn1.32xlarge"
    assert legal_sizes(spec) == (1, 2, 3, 4)
    assert [(shape.data_parallel(nodes), shape.micro_batches(nodes)) for nodes in (1, 2, 3, 4)] == [
        (4, 64), (8, 32), (12, 22), (16, 16),
    ]  # fmt: skip
    assert (config.batch.global_size, config.data.sequence_length, config.steps, config.epochs) == (256, 4096, 500, 0)
    assert (config.parallelism.tensor, config.parallelism.pipeline, config.parallelism.sequence) == (8, 1, True)
    assert not config.tuning.freezes


def test_the_qnli_example_reads_the_fields_and_labels_of_qnli() -> None:
    data = trainer_of(spec_of("llama2-7b-full-qnli.yaml")).data
    assert data.format is DataFormat.CLASSIFICATION
    classes = data.examples.classification
    assert (classes.text_fields, classes.label_field) == (("question", "sentence"), "label")
    assert classes.labels == ("entailment", "not_entailment")
    assert (data.hub, data.validation.hub_split) == (HubConfig(dataset="nyu-mll/glue", name="qnli"), "validation")
    assert trainer_of(spec_of("llama2-7b-full-text.yaml")).data.format is DataFormat.TEXT


def test_lora_on_dolly_has_the_settings_of_optimum_neuron(tmp_path: Path) -> None:
    spec = spec_of("llama3-8b-lora-dolly.yaml")
    config = spec.training_config()
    assert (spec.workers.replicas, spec.workers.accelerator.instance_type) == (1, "trn1.32xlarge")
    assert (config.parallelism.tensor, spec.batch_shape().data_parallel(1)) == (2, 16)
    assert config.tuning.method is TuningMethod.LORA
    examples = config.data.examples
    assert (config.data.format, examples.packing, examples.loss) == (DataFormat.INSTRUCTION, False, LossOn.ANSWER)
    assert config.data.hub == HubConfig(dataset="databricks/databricks-dolly-15k")
    assert (config.data.sequence_length, config.epochs) == (1024, 3)
    assert (config.schedule.kind, config.schedule.warmup_ratio) == (ScheduleKind.CONSTANT, 0.03)
    timed = resolve_steps(config, -(-DOLLY_RECORDS // config.batch.global_size) * config.batch.global_size)
    assert (timed.steps, timed.schedule.warmup_steps) == (1410, 43)
    assert compute_learning_rate(timed, 42) == compute_learning_rate(timed, 1409) == pytest.approx(5e-5)
    assert neuron_environment.list_variables(config, nxd=True, given={})["MALLOC_ARENA_MAX"] == "64"
    assert settings_of("llama3-8b-lora-dolly.yaml", tmp_path).dp_size == 16


def test_the_subsets_of_redpajama_have_the_shares_of_llama() -> None:
    sources = trainer_of(spec_of("llama3-8b-trn2.yaml")).data.sources
    assert {source.hub.directory: source.weight for source in sources} == {
        "common_crawl": 67, "c4": 15, "github": 4.5, "wikipedia": 4.5, "arxiv": 2.5, "stackexchange": 2
    }  # fmt: skip
    assert {(source.hub.dataset, source.hub.revision) for source in sources} == {
        ("togethercomputer/RedPajama-Data-1T", "refs/convert/parquet")
    }


def test_lora_beside_full_has_the_settings_and_the_numbers_of_hyperpod(tmp_path: Path) -> None:
    lora, full = (spec_of(f"llama3-8b-{name}-hyperpod.yaml") for name in ("lora", "full"))
    for spec in (lora, full):
        shape = spec.batch_shape()
        assert (spec.workers.replicas, spec.workers.spares) == (1, 1)
        assert spec.workers.accelerator.instance_type == "trn1.32xlarge"
        assert (spec.parallelism.tensor, shape.data_parallel(1), shape.micro_batches(1)) == (8, 4, 3)
        assert trainer_of(spec).epochs == 3
    same = ("model", "data", "batch", "epochs", "evaluate", "schedule", "seed")
    assert [getattr(trainer_of(lora), name) for name in same] == [getattr(trainer_of(full), name) for name in same]
    adapters = trainer_of(lora).tuning.lora
    assert (adapters.rank, adapters.targets) == (16, ("q_proj", "v_proj"))
    assert settings_of("llama3-8b-lora-hyperpod.yaml", tmp_path).trainable.trained == 6_815_744
    full_settings = settings_of("llama3-8b-full-hyperpod.yaml", tmp_path)
    assert full_settings.trainable.trained == 8_030_261_248
    vocabulary = full_settings.shape.vocab_size * full_settings.shape.hidden_size
    assert full_settings.trainable.trained - vocabulary * 7 // 8 == 7_570_591_744, "the number of the table"


def test_llama2_13b_has_the_two_forms_of_data_of_jumpstart(tmp_path: Path) -> None:
    instruction, domain = (spec_of(f"llama2-13b-{name}.yaml") for name in ("instruction", "domain"))
    data = trainer_of(instruction).data
    assert data.format is DataFormat.INSTRUCTION
    assert data.examples.where == {"category": "information_extraction"}
    assert (data.examples.template.prompt, data.examples.template.completion) == (None, None), "template.json decides"
    assert not Path(data.source).suffix, "a folder: template.json lies in it, beside the records"
    lora = trainer_of(instruction).tuning.lora
    assert (lora.rank, lora.alpha, lora.dropout) == (8, 32, 0.05)
    assert (trainer_of(instruction).epochs, trainer_of(instruction).optimizer.learning_rate) == (5, 1e-4)
    assert (trainer_of(domain).data.format, Path(trainer_of(domain).data.source).suffix) == (DataFormat.TEXT, ".txt")
    assert legal_sizes(domain) == (1, 2)
    for example in ("llama2-13b-instruction.yaml", "llama2-13b-domain.yaml"):
        assert count_parameters(settings_of(example, tmp_path).shape) == 13_015_864_320


def test_the_example_with_roles_waits_for_servers_before_it_takes_nodes() -> None:
    rollout, judge = spec_of("grpo-rollout-trn2.yaml").roles
    assert (rollout.startup_policy.value, rollout.min_ready, rollout.port) == ("BeforeWorkers", 2, 8000)
    assert "image" not in judge.containers[0], "it runs in the program's image"


@pytest.mark.parametrize("example", sorted(set(JOBS) - set(EXAMPLES) - {"grpo-rollout-trn2.yaml"}))
def test_an_example_of_a_program_names_its_script_and_the_batch_of_its_arguments(example: str) -> None:
    spec = spec_of(example)
    assert spec.program is not None
    assert spec.program.batch is not None
    assert spec.program.checkpoints is not None
    (mount,) = spec.workers.template["spec"]["containers"][0]["volumeMounts"]
    script = Path(spec.program.command[-1])
    assert str(script.parent) == mount["mountPath"]
    assert (FOLDER / script.name).is_file()
    arguments = dict(itertools.pairwise(spec.program.args))
    assert arguments["--output_dir"] == spec.program.checkpoints.path
    rows, steps = (
        int(arguments[f"--{name}"]) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    assert spec.program.batch.micro_size == rows
    accelerator = spec.workers.accelerator
    ranks = INSTANCES[accelerator.instance_type].cores if accelerator.instance_type else 1
    assert spec.program.batch.global_size == rows * steps * spec.workers.replicas * ranks
    assert [spec.batch_shape().micro_batches(nodes) for nodes in (1, 2)] == [2 * steps, steps]
