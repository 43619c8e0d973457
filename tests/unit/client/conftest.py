"""An API server on loopback with recorded jobs, and the commands that read it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.testing.api.recorded_jobs import ApiServer, recorded_responses
from trainium_client.commands.main import main

Run = tuple[int, str, str]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(recorded_responses(), tmp_path).running() as running:
        yield running


@pytest.fixture
def trn(server: ApiServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run a command of `kubectl trn`: its exit code and what it prints on both streams."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> Run:
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        output = capfd.readouterr()
        return int(left.value.code or 0), output.out, output.err

    return run
