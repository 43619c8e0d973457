"""`spec.program`: what a program states, and the sentences for values that cannot be right."""

from typing import Any

import pytest
from pydantic import ValidationError

from trainium_contract.spec.program import ProgramCheckpoints, ProgramSpec

SMALLEST = {"image": "team/torchtitan:5", "command": ["python", "-m", "torchtitan.train"]}


def test_a_program_spec_round_trips_through_json() -> None:
    given = {
        **SMALLEST,
        "args": ["--job.config_file", "/cfg/llama3_8b.toml"],
        "workingDirectory": "/src",
        "processesPerNode": 8,
        "progress": {"pattern": r"step: *(?P<step>\d+).*loss: *(?P<loss>\S+)"},
        "checkpoints": {"path": "/checkpoints/run", "committed": "step-{step}/.metadata"},
        "resize": "Never",
        "warm": "Never",
        "batch": {"globalSize": 1024, "microSize": 2},
    }
    program = ProgramSpec.model_validate(given)
    assert program.to_wire() == given
    assert ProgramSpec.model_validate_json(program.model_dump_json(by_alias=True)) == program


@pytest.mark.parametrize(
    ("committed", "path", "step"),
    [
        ("step-{step}/.metadata", "step-120/.metadata", 120),
        ("checkpoint-{step}/trainer_state.json", "checkpoint-7/trainer_state.json", 7),
        ("{step}.pt", "0040.pt", 40),
    ],
)
def test_the_path_of_a_complete_checkpoint_names_its_step(committed: str, path: str, step: int) -> None:
    match = ProgramCheckpoints(path="/c", committed=committed).committed_pattern().fullmatch(path)
    assert match is not None
    assert int(match["step"]) == step


@pytest.mark.parametrize(
    "path", ["step-12/Xmetadata", "step-/.metadata", "a/step-12/.metadata", "step-12/.metadata.tmp"]
)
def test_a_path_that_does_not_match_is_no_checkpoint(path: str) -> None:
    checkpoints = ProgramCheckpoints(path="/c", committed="step-{step}/.metadata")
    assert checkpoints.committed_pattern().fullmatch(path) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"progress": {"pattern": r"step (?P<step>\d+"}}, "no regular expression: missing )"),
        ({"progress": {"pattern": r"step (\d+)"}}, r"no group (?P<step>\d+)"),
        ({"checkpoints": {"path": "run", "committed": "{step}"}}, "write an absolute path"),
        ({"checkpoints": {"path": "/run", "committed": "step-{number}"}}, "with {step} at most once"),
        ({"checkpoints": {"path": "/run", "committed": "{step}/{step}"}}, "with {step} at most once"),
        ({"checkpoints": {"path": "/run", "committed": "/run/{step}"}}, "below checkpoints.path"),
        ({"warm": ["torch"]}, "Input should be 'Auto' or 'Never'"),
        ({"batch": {"globalSize": 4, "microSize": 8}}, "microSize is 8 but globalSize is 4: lower microSize"),
        ({"command": []}, "at least 1 item"),
        ({"workingDirectory": "src"}, "write an absolute path"),
    ],
)
def test_an_invalid_value_is_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ProgramSpec.model_validate(SMALLEST | change)
    assert sentence in str(refused.value)
