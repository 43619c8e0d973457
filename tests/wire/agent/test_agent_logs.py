"""Real agents and real training processes write a pod's log, as text and as lines of the schema."""

import json
from pathlib import Path

import yaml

from tests.wire.agent.agent_job import AgentJob, AgentProcess
from trainium_contract.wire.log_line import LogLine, LogSource, read_log_line

JSON = {"TRAINIUM_LOG_FORMAT": "json"}


def read_log(agent: AgentProcess) -> list[LogLine]:
    """Parse every line of the pod's log by the schema."""
    lines = []
    for text in agent.log.splitlines():
        line = read_log_line(text)
        assert line is not None, f"no line of the schema: {text!r}"
        assert line.to_wire() == json.loads(text), "an unknown or invalid field"
        lines.append(line)
    return lines


async def test_agent_and_ranks_log_in_the_schema_with_their_source(job: AgentJob) -> None:
    await job.train("a", "b", step=3, **JSON)
    job.command_ranks("exit-1", "1\na message with password=hunter22")
    await job.until_training("a", "b", attempt=1)
    job.command_ranks("exit-1", "64")
    await job.until_ended("b")

    lines = read_log(job.agents["b"])
    assert {(line.namespace, line.job, line.pod, line.node) for line in lines} == {("team", "job", "b", "node-b")}
    assert {line.source for line in lines} == {LogSource.AGENT, LogSource.OUTPUT}
    printed = [line for line in lines if line.source is LogSource.OUTPUT]
    assert [(line.message, line.rank, line.generation, line.attempt) for line in printed] == [
        ("a message with password=hunter22", 1, 1, 0),
        ("rank 1 leaves with 64", 1, 1, 1),
    ]
    assert any("generation 1: 2 members" in line.message for line in lines)
    last = [line for line in lines if line.source is LogSource.AGENT][-1]
    assert (last.generation, last.attempt) == (1, 1)
    failures = job.last_heartbeat("b").failures
    assert failures[0].message == "a message with password=***", "the same message as from a text log"
    assert job.last_heartbeat("b").verdict.message == "rank 1 leaves with 64"


async def test_the_trainer_logs_its_steps_in_the_schema(job: AgentJob, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a step and a loss and a rank. " * 400)
    config = {
        "steps": 3,
        "schedule": {"warmupSteps": 1},
        "batch": {"globalSize": 2, "microSize": 2},
        "data": {
            "source": str(tmp_path / "text.txt"),
            "sequenceLength": 16,
            "cacheDirectory": str(tmp_path / "cache"),
            "tokenizer": {"vocabSize": 300},
        },
        "model": {"numLayers": 1, "hiddenSize": 32, "intermediateSize": 64},
        "checkpoint": {"path": str(tmp_path / "checkpoints"), "durable": {"everySeconds": None}},
        "monitor": {"tensorboard": False},
    }
    (tmp_path / "trainer.yaml").write_text(yaml.safe_dump(config))
    trainer = {"TRAINIUM_RANK_ENTRY": "trainium_trainer.cli:main"}
    job.start("json", **trainer, **JSON)
    await job.until_registered("json")
    await job.coordinator.publish(["json"])
    await job.until_ended("json")
    assert job.agents["json"].code == 0, job.agents["json"].log

    lines = read_log(job.agents["json"])
    trainer_lines = [line for line in lines if line.source is LogSource.TRAINER]
    assert [line.message.partition(":")[0] for line in trainer_lines if line.message.startswith("step ")][
        -1
    ] == "step 3/3"
    assert {(line.rank, line.generation, line.attempt, line.pod) for line in trainer_lines} == {(0, 1, 0, "json")}
    assert all(line.as_text().startswith(f"{line.time[11:19]} rank 0 {line.level.upper()} ") for line in trainer_lines)


async def test_an_unknown_log_format_is_an_error(job: AgentJob) -> None:
    job.start("a", TRAINIUM_LOG_FORMAT="xml")
    await job.until_ended("a")
    assert job.agents["a"].code == 64
    assert job.agents["a"].log == "trainium-agent: TRAINIUM_LOG_FORMAT='xml' must be text or json.\n"


async def test_an_error_of_the_environment_is_logged_in_the_schema(job: AgentJob) -> None:
    job.start("a", TRAINIUM_NAMESPACE="", **JSON)
    await job.until_ended("a")
    (line,) = read_log(job.agents["a"])
    assert "lacks the environment variable TRAINIUM_NAMESPACE" in line.message
    assert (line.source, line.level, line.job, line.pod) == ("agent", "error", "job", "a")
