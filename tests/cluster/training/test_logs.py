"""The logs of a real operator, of agents and of training processes: one schema, readable as text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from trainium_client.commands.main import main
from trainium_contract.wire.log_line import LogLine, LogSource, read_log_line
from trainium_contract.wire.worker_env import ENV_LOG_FORMAT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]


def read(log: str) -> list[LogLine]:
    """Parse every line of a log by the schema."""
    found = []
    for text in log.splitlines():
        line = read_log_line(text)
        assert line is not None, f"no line of the schema: {text!r}"
        assert line.to_wire() == json.loads(text)
        found.append(line)
    return found


def test_operator_agents_and_ranks_log_in_one_schema(
    new_job: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(change="workers: {replicas: 2}\ntrainer: {steps: 30}", environment={ENV_LOG_FORMAT: "json"})
    job.wait_for_phase("Completed")
    pods = [pod["metadata"]["name"] for pod in job.list_pods()]
    workers = [read(job.cluster.kubectl("logs", pod, "-n", job.namespace)) for pod in pods]

    assert {line.source for lines in workers for line in lines} >= {LogSource.AGENT, LogSource.TRAINER}
    for pod, lines in zip(pods, workers, strict=True):
        assert {(line.namespace, line.job, line.pod) for line in lines} == {(job.namespace, job.name, pod)}
        (ranks,) = {(line.rank, line.generation) for line in lines if line.source is LogSource.TRAINER}
        assert ranks in {(0, 1), (1, 1)}
    steps = [line.message for lines in workers for line in lines if line.message.startswith("step 30/30: loss ")]
    assert len(steps) == 1, "only rank 0 logs steps"

    replicas = ("-n", "trainium-system", "-l", "app.kubernetes.io/component=operator", "--tail=-1")
    operators = read(job.cluster.kubectl("logs", *replicas))
    assert {line.source for line in operators} == {LogSource.OPERATOR}
    ours = [line for line in operators if (line.namespace, line.job) == (job.namespace, job.name)]
    assert {line.pod for line in ours if "registered" in line.message} == set(pods)

    for name, value in job.cluster.variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main(["logs", job.name, "-n", job.namespace])
    assert not left.value.code
    assert f" rank 0 INFO {steps[0]}\n" in capsys.readouterr().out
