"""An API server on loopback with recorded jobs, and the commands that read it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.testing.api.recorded_jobs import RecordedApiServer, recorded_responses
from trainium_client import TrainingJob
from trainium_client.commands.main import main

QUARANTINE = "/api/v1/namespaces/trainium-system/configmaps/trainium-operator-quarantine"


class CommandResult(NamedTuple):
    """Exit code and both output streams of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., CommandResult]


def open_job(server: RecordedApiServer, name: str = "llama") -> TrainingJob:
    return TrainingJob(name, kubeconfig=str(server.kubeconfig))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RecordedApiServer]:
    with RecordedApiServer(recorded_responses(), tmp_path).running() as running:
        yield running


@pytest.fixture
def trn(server: RecordedApiServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs a command of `kubectl trn`."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> CommandResult:
        with pytest.raises(SystemExit) as exit_info:
            main(list(arguments))
        output = capfd.readouterr()
        return CommandResult(int(exit_info.value.code or 0), output.out, output.err)

    return run
