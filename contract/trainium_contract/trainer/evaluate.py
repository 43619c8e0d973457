"""`trainer.evaluate`: generated answers and their scores, before and after tuning, as the last stage of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel

_Text = Annotated[str, Field(min_length=1, max_length=256)]
_TaskName = Annotated[str, Field(min_length=1, max_length=128)]


class GenerationConfig(ContractModel):
    """Generation of answers."""

    max_new_tokens: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Maximum number of tokens of an answer."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """0 selects the most likely token each time; above, tokens are drawn."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the most likely tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Draw from this many most likely tokens; 0: from all."""
    stop: Annotated[tuple[_Text, ...], Field(max_length=16)] | None = None
    """Texts that end an answer, besides the end-of-text token."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the draws."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Prompts that are answered at once."""


class TasksConfig(ContractModel):
    """Benchmark tasks of lm-evaluation-harness, which `trainium-trainer[tasks]` installs."""

    names: Annotated[tuple[_TaskName, ...], Field(min_length=1, max_length=64)]
    """Tasks or groups of tasks, for instance `hellaswag` and `mmlu`."""
    shots: Annotated[int, Field(ge=0, le=100)] | None = None
    """Solved examples before each question; omitted: the number that the task defines."""
    limit: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Maximum number of questions of each task; omitted: all."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Questions in a batch."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seed of the solved examples and of draws; omitted: lm-eval's own seeds."""
    include_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Folder with more task files (YAML), which may name local data."""
    chat_template: bool = False
    """Ask in the chat template of the tokenizer."""
    keep_samples: bool = False
    """Also write each question with its answers."""


class EvaluateConfig(ContractModel):
    """Measures the tuned model beside the initial one: on held-out examples, and by tasks."""

    enabled: bool = False
    """Evaluate as the last stage of the run."""
    at_milestones: bool = False
    """Also measure the model of each milestone (artifacts.atMilestones), in a pod beside the workers."""
    samples: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Maximum number of examples; always the same ones."""
    before: bool = True
    """Also measure the initial model."""
    generation: GenerationConfig = GenerationConfig()
    """Generation of answers."""
    tasks: TasksConfig | None = None
    """Benchmark tasks, which one process runs after the examples; the image needs `trainium-trainer[tasks]`."""
