"""Write artifacts and evaluate in real ranks, at milestones and after the last step, through kills and SIGTERM."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.testing.suite.timeouts import until
from tests.testing.trainer.hub_server import HubServer
from tests.unit.trainer.conftest import Launcher, ReferenceRuns
from trainium_trainer.artifacts.manifest import ArtifactManifest
from trainium_trainer.checkpoint.format.reader import CheckpointReader
from trainium_trainer.checkpoint.root.selection import choose_checkpoint
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Retry

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # from peft about transformers
]

TEMPLATE = (
    "{% for message in messages %}### {{ message.role }}\n{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)
LORA = "tuning={method: LoRA, lora: {rank: 4, alpha: 8, dropout: 0.1, targets: ['*_proj']}}"


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the base and the data."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def options(base: Path, text_file: Path, shared_folder: Path) -> list[str]:
    """Return overrides for a short tuning on sums of numbers, with a base that has a tokenizer."""
    from trainium_trainer.data.sources.resolve import SourceSpec
    from trainium_trainer.data.tokens.encoding import train_for_texts

    folder = shared_folder / "base"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (shared_folder / "cache").mkdir()
    tokenizer = train_for_texts([SourceSpec(str(text_file), "text")], 320, shared_folder / "cache")
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (shared_folder / "sums.jinja").write_text(TEMPLATE)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    records = [
        {
            "messages": [
                {"role": "user", "content": f"Add {n} and {n + 1}."},
                {"role": "assistant", "content": str(2 * n + 1)},
            ]
        }
        for n in range(60)
    ]
    (shared_folder / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {
        "source": str(shared_folder / "sums.jsonl"),
        "format": "Chat",
        "examples": {"chat": {"template": str(shared_folder / "sums.jinja")}},
        "sequenceLength": 128,
        "cacheDirectory": str(shared_folder / "cache"),
        "validation": {"fraction": 0.2, "everySteps": 100},
    }
    return [
        f"model={{weights: {folder}}}",
        LORA,
        f"data={json.dumps(data)}",
        "artifacts.precision=Float32",
        f"evaluate={json.dumps({'enabled': True, 'samples': 4, 'generation': {'maxNewTokens': 4}})}",
    ]


def read_results(folder: Path) -> dict[str, Any]:
    """Read every artifact by file, and the figures of the evaluation."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}
    return files | {"figures": json.loads((folder / "evaluation.json").read_text())["figures"]}


def test_a_run_writes_an_adapter_a_merged_model_and_figures(
    reference_run: ReferenceRuns, options: list[str], shared_folder: Path
) -> None:
    job = reference_run(2, options)
    folder = job.folder / "artifacts" / "step-6"
    tokens = torch.arange(40).reshape(1, -1)
    merged = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(shared_folder / "base", dtype=torch.float32)
    with torch.no_grad():
        logits, peft_logits, base_logits = merged(tokens).logits, adapted(tokens).logits, base(tokens).logits
    torch.testing.assert_close(logits, peft_logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits, base_logits, atol=1e-3)
    figures = json.loads((folder / "evaluation.json").read_text())["figures"]
    assert all(figure["before"] is not None and figure["after"] is not None for figure in figures)
    for artifact in ("model", "adapter"):
        tokenizer = AutoTokenizer.from_pretrained(folder / artifact)
        assert tokenizer.chat_template == TEMPLATE, "what the model was trained with, not the base's"
    assert "| figure | before | after |" in (folder / "model" / "README.md").read_text()


def test_the_adapter_is_pushed_with_the_figures_of_its_evaluation(launch: Launcher, options: list[str]) -> None:
    with HubServer() as hub:
        hub.writer = "hf_token_that_must_never_be_shown"
        variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.writer, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        variables["HF_HUB_DISABLE_XET"] = "1"
        job = launch(2, "pushed", [*options, "artifacts.push={repo: acme/sums, kind: Adapter}"], **variables)
        assert job.wait(120) == [0, 0], job.log()
        (_, pushed) = hub.repositories["acme/sums"].commits.values()
        hub.status = 500
        plain = [*options, "evaluate.enabled=false", "artifacts.push={repo: acme/sums, kind: Adapter}"]
        restarted = launch(1, "restarted", plain, **variables, TRAINIUM_ATTEMPT="1")
        assert restarted.wait(120) == [81], "the hub is needed only at the end"
        assert restarted.metrics()[-1]["step"] == 6
    folder = job.folder / "artifacts" / "step-6" / "adapter"
    assert {name: data for name, data in pushed.items() if name != ".gitattributes"} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert b"| figure | before | after |" in pushed["README.md"]
    assert hub.writer not in job.log()
    assert f"pushed to {hub.url}/acme/sums/commit/" in job.log()


@pytest.mark.parametrize(
    "killed_at",
    ["model/model", *(pytest.param(name, marks=pytest.mark.long) for name in ("adapter/adapter_model", "evaluation"))],
)
def test_a_kill_after_the_last_step_repeats_no_step_and_changes_nothing(
    launch: Launcher, reference_run: ReferenceRuns, options: list[str], killed_at: str
) -> None:
    reference = reference_run(2, options)
    killed = launch(2, "broken", options)
    file = f"artifacts/**/*{killed_at.rpartition('/')[2]}*"
    until(lambda: list(killed.folder.glob(file)), killed.log, 100, pause=0.005)
    os.kill(killed.pids[0], signal.SIGKILL)
    assert killed.wait(60) in ([-9, 76], [-9, 0], [0, 0]), killed.log()
    steps = len(killed.metrics())
    resumed = launch(2, "broken", options).finish()
    assert len(resumed.metrics()) == steps == 6
    step = "artifacts/step-6"
    assert read_results(resumed.folder / step) == read_results(reference.folder / step)


def test_a_rank_leaves_at_once_after_the_last_step(launch: Launcher, options: list[str]) -> None:
    job = launch(2, "run", options)
    until((job.folder / "artifacts").exists, job.log, 100, pause=0.005)
    for pid in job.pids:
        os.kill(pid, signal.SIGTERM)
    codes = job.wait(30)
    assert codes in ([75, 75], [0, 0]), job.log()
    launch(1, "run", options).finish()
    assert load_file(job.folder / "artifacts" / "step-6" / "model" / "model.safetensors")


def test_every_milestone_leaves_the_model_of_its_step(launch: Launcher, base: Path) -> None:
    # Steps have 256 tokens; a milestone waits for a save in progress.
    artifacts = "artifacts={atMilestones: true, precision: Float32}"
    milestones = "checkpoint.milestones={everyTokens: 512}"
    job = launch(2, "run", [f"model={{weights: {base}}}", artifacts, milestones]).finish()
    milestone_steps = {int(path.name.removeprefix("milestone-")) for path in job.folder.glob("milestone-*")}
    steps = sorted(milestone_steps | {6})
    assert len(steps) > 1
    assert {path.name for path in (job.folder / "artifacts").iterdir()} == {f"step-{step}" for step in steps}
    storage = open_storage(str(job.folder))
    models = []
    for step in steps:
        folder = job.folder / f"artifacts/step-{step}"
        assert [path.name for path in folder.iterdir()] == ["model"]
        manifest = ArtifactManifest.model_validate_json((folder / "model/artifact.json").read_bytes())
        assert manifest.step == step
        models.append(load_file(folder / "model/model.safetensors"))
        reader = CheckpointReader(storage, choose_checkpoint(storage, str(job.folder), step, milestones=True), Retry())
        for name, value in models[-1].items():
            assert torch.equal(value, reader.read(f"model.{name}").float())
    assert not torch.equal(models[0]["lm_head.weight"], models[1]["lm_head.weight"])
