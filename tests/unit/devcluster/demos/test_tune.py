"""The second demo: its texts, questions and answers, its base model, and its job."""

import json
from pathlib import Path

import pytest
import yaml

from trainium_contract.job import TrainingJobSpec
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.trainer.examples import DataFormat
from trainium_contract.trainer.tuning import TuningMethod
from trainium_devcluster import tune
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.tune import base
from trainium_devcluster.tune.base import CONFIGURATION, compute_digest
from trainium_devcluster.tune.demo import use_pairs
from trainium_devcluster.tune.library import Function, Module, read_standard_library
from trainium_devcluster.tune.texts import (
    create_examples,
    create_preference_pairs,
    find_first_sentence,
    is_held_out,
    read_documentation,
)

SOURCE = '''
"""About shapes."""

def area(width: int, height=1, *rest, key=lambda left, right: left, **options):
    """Return the area. It is never negative.

    More.
    """

class Circle:
    class Part:
        async def turn(self, by, /):
            """Turn this part
            by an angle."""

    @classmethod
    def unit(cls):
        return 1

def broken(): pass
'''


def function_named(name: str, text: str, arguments: str = "a, b=1", owner: str = "") -> Function:
    names = tuple(part.partition("=")[0].strip() for part in arguments.split(",") if part)
    return Function(name, owner, arguments, names, text)


def module_names(*, held_out: bool, count: int = 1) -> list[str]:
    """Return names of modules that are held out, or that are not."""
    return [name for name in (f"module{number}" for number in range(1000)) if is_held_out(name) is held_out][:count]


def test_functions_of_a_library_are_read_without_annotations(tmp_path: Path) -> None:
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "__init__.py").write_text(SOURCE)
    (module,) = read_standard_library(tmp_path)
    assert (module.name, module.text) == ("shapes", "About shapes.")
    assert [(function.owner, function.signature, function.names) for function in module.functions] == [
        (
            "",
            "area(width, height=1, *rest, key=lambda left, right: left, **options)",
            ("width", "height", "rest", "key", "options"),
        ),
        ("Circle.Part", "turn(by, /)", ("by",)),
        ("Circle", "unit()", ()),
        ("", "broken()", ()),
    ]
    assert module.functions[1].text == "Turn this part\nby an angle."


def test_unparsable_files_and_tests_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("def one(): 'One.'")
    (tmp_path / "bad.py").write_text("def (:")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "trial.py").write_text("def two(): 'Two.'")
    assert [module.name for module in read_standard_library(tmp_path)] == ["good"]


def test_the_json_package_has_its_functions() -> None:
    modules = read_standard_library(Path(json.__file__).parent)
    (package,) = [module for module in modules if module.name == "__init__"]
    assert {"dumps", "loads"} <= {function.name for function in package.functions}
    result = create_examples(modules)
    assert result.training
    assert {row["module"] for row in result.training}.isdisjoint(row["module"] for row in result.held_out)


def test_a_summary_is_the_first_sentence_on_one_line() -> None:
    assert find_first_sentence("Return the area\nof it. It is never negative.\n\nMore.") == "Return the area of it."
    assert find_first_sentence("Without an end\n\nMore.") == "Without an end"
    assert find_first_sentence("Like os.path, but faster. Yes.") == "Like os.path, but faster."


def test_documentation_has_the_form_of_help_and_no_held_out_module() -> None:
    (trained,), (held_out,) = module_names(held_out=False), module_names(held_out=True)
    function = function_named("area", "Return the area.", owner="Circle")
    texts = read_documentation(
        [Module(trained, "About.", (function,)), Module(held_out, "Secret.", ())], {"if": "A topic."}
    )
    topic, text = texts
    assert topic == "A topic."
    assert text.split("\n\n") == [
        f"Help on module {trained}:",
        "    About.",
        "Help on function area in class Circle:",
        "area(a, b=1)\n    Return the area.",
    ]


def test_each_public_function_with_a_docstring_gives_four_questions() -> None:
    (trained,) = module_names(held_out=False)
    functions = (
        function_named("area", "Return the area of it. More."),
        function_named("_hidden", "Return something private."),
        function_named("inner", "Return something private.", owner="_Hidden"),
        function_named("silent", ""),
        function_named("long", "Return what has too many arguments.", arguments="a" * 90),
    )
    result = create_examples([Module(trained, "", functions)])
    assert result.held_out == ()
    assert {(row["kind"], row["context"], row["response"]) for row in result.training} == {
        ("signature", "Return the area of it.", "area(a, b=1)"),
        ("purpose", "area(a, b=1)", "Return the area of it."),
        ("arguments", "area(a, b=1)", "a, b"),
        ("count", "area(a, b=1)", "2"),
    }
    assert len(result.training) == 4


def test_questions_are_distinct_and_held_out_questions_are_not_trained_on() -> None:
    first, second = module_names(held_out=False, count=2)
    (held_out,) = module_names(held_out=True)
    repeated, fresh = function_named("area", "Return the area of it."), function_named("fresh", "Return something new.")
    result = create_examples(
        [Module(held_out, "", (repeated, fresh)), Module(first, "", (repeated,)), Module(second, "", (repeated,))]
    )
    assert len(result.training) == 4
    assert {row["module"] for row in result.training} == {first}
    assert sorted(row["kind"] for row in result.held_out) == ["arguments", "count", "purpose", "signature"]
    assert all("fresh" in row["context"] + row["instruction"] for row in result.held_out)


def test_a_large_library_is_sampled_to_3000_questions() -> None:
    (trained,) = module_names(held_out=False)
    functions = tuple(function_named(f"area{number}", f"Return the area number {number}.") for number in range(900))
    result = create_examples([Module(trained, "", functions)])
    assert len({(row["instruction"], row["context"]) for row in result.training}) == len(result.training) == 3000
    assert len({row["kind"] for row in result.training[:100]}) == 4
    assert result == create_examples([Module(trained, "", functions)]), "the sample is reproducible"
    assert result.held_out == ()


def test_a_pair_has_the_right_answer_and_one_to_another_question_of_its_kind() -> None:
    rows = [
        {"kind": kind, "instruction": f"ask {number}", "context": "c", "response": answer}
        for number, (kind, answer) in enumerate([("count", "1"), ("purpose", "Walks."), ("count", "2"), ("count", "2")])
    ]
    assert list(create_preference_pairs(rows)) == [{"prompt": "ask 2\nc\n", "chosen": "2", "rejected": "1"}]


TEXTS = [f"The function number {number} returns the value of the argument." for number in range(300)]
TINY = {
    **base.CONFIGURATION,
    "model": {"numLayers": 1, "hiddenSize": 32, "intermediateSize": 64, "numAttentionHeads": 2, "numKeyValueHeads": 2},
    "data": {"sequenceLength": 16, "tokenizer": {"vocabSize": 300}},
    "batch": {"globalSize": 2, "microSize": 1},
    "steps": 2,
    "schedule": {"kind": "Constant", "warmupSteps": 1},
}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_base_model_is_trained_once_and_then_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CONFIGURATION", TINY)
    first = base.open_base_model(TEXTS, lambda _: None, root=tmp_path)
    assert not first.cached
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in first.folder.iterdir()}
    assert json.loads((first.folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert [path.name for path in (tmp_path / "tune").glob("*.partial")] == []
    second = base.open_base_model(TEXTS, lambda _: None, root=tmp_path)
    assert second.cached
    assert second.folder == first.folder


@pytest.mark.timeout(300)
def test_a_failed_training_of_the_base_names_its_log_and_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "CONFIGURATION", {**TINY, "steps": 0})
    with pytest.raises(ClusterError, match=r"could not be trained, see .*log.txt"):
        base.open_base_model(TEXTS, lambda _: None, root=tmp_path)
    assert [path.name for path in (tmp_path / "tune").glob("base-*") if path.suffix == ""] == []


@pytest.fixture
def spec() -> TrainingJobSpec:
    document = yaml.safe_load(Path(tune.__file__).with_name("job.yaml").read_text())
    return TrainingJobSpec.model_validate(document["spec"])


def test_the_job_has_three_workers_and_a_spare_and_can_shrink_to_two(spec: TrainingJobSpec) -> None:
    assert (spec.workers.replicas, spec.workers.spares) == (3, 1)
    assert {2, 3} <= set(spec.batch_shape().legal_sizes(spec.workers.min_replicas or 3, 3))


def test_the_job_tunes_a_lora_adapter_for_whole_epochs_and_evaluates_it(spec: TrainingJobSpec) -> None:
    config = spec.training_config()
    assert config.tuning.method is TuningMethod.LORA
    assert config.data.format is DataFormat.INSTRUCTION
    assert config.epochs >= 2
    assert config.epochs == int(config.epochs)
    assert config.monitor.record_samples
    assert config.artifacts.kinds == (ArtifactKind.ADAPTER, ArtifactKind.MODEL)
    assert config.evaluate.enabled
    assert config.evaluate.before


def test_the_job_reads_only_from_the_mounted_folder(spec: TrainingJobSpec) -> None:
    (volume,) = spec.workers.template["spec"]["volumes"]
    (container,) = spec.workers.template["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert spec.trainer is not None
    data = spec.trainer.data
    assert data.validation is not None
    read = {spec.trainer.model.weights, data.source, data.validation.source}
    assert read == {f"{mount['mountPath']}/{name}" for name in ("base", "train.jsonl", "held-out.jsonl")}


def test_the_preference_job_reads_pairs_and_compares_with_the_base() -> None:
    document = yaml.safe_load(Path(tune.__file__).with_name("job.yaml").read_text())
    config = TrainingJobSpec.model_validate(use_pairs(document)["spec"]).training_config()
    assert config.data.format is DataFormat.PREFERENCE
    assert config.tuning.objective is not None
    assert config.tuning.objective.reference == "Base"
    assert config.data.validation is not None
    assert (config.data.source, config.data.validation.source) == (
        "/material/pairs.jsonl",
        "/material/held-out-pairs.jsonl",
    )
    assert not config.evaluate.enabled
    assert document["spec"]["trainer"]["data"]["format"] == "Instruction"


def test_the_configuration_of_the_base_is_valid() -> None:
    TrainingConfig.model_validate(CONFIGURATION)


def test_a_changed_text_or_setting_changes_the_identity_of_the_base() -> None:
    known = compute_digest("text", CONFIGURATION)
    assert compute_digest("text", CONFIGURATION) == known
    assert compute_digest("texts", CONFIGURATION) != known
    assert compute_digest("text", {**CONFIGURATION, "steps": 1}) != known
