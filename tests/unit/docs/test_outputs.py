"""Outputs on pages equal those of the programs, and the page of `kubectl trn` lists all of its commands."""

import json
import re
import socket
import struct
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from tests.testing.api.recorded_jobs import JOBS, RECORDED, RecordedApiServer, recorded_responses
from tests.testing.outputs.blocks import commands, update_blocks, without_blocks
from tests.testing.outputs.commands import PAGES, SLOW, output, recording_of
from tests.testing.outputs.recording import Recording, record, replay
from tests.testing.outputs.tables import age, table
from tests.testing.suite.loopback_http import LoopbackServer
from tests.testing.suite.timeouts import scaled
from trainium_client.commands.main import app
from trainium_contract.wire.log_line import LogSource, read_log_line
from trainium_devcluster.cli import app as devcluster
from trainium_simulator.command import app as simulate

ROOT = Path(__file__).parents[3]
SHOWN = [(page, command) for page in PAGES for command in commands((ROOT / page).read_text(encoding="utf-8"))]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "command"),
    [
        pytest.param(page, command, marks=[pytest.mark.long] if command in SLOW else [], id=f"{page}: {command[:60]}")
        for page, command in SHOWN
    ],
)
def test_an_output_on_a_page_equals_that_of_the_program(page: str, command: str) -> None:
    others = {other for other in commands(read(page)) if other != command}
    assert update_blocks(read(page), output, leave=others) == read(page), "run: make generate"


@pytest.mark.parametrize("page", PAGES)
def test_no_output_is_written_by_hand(page: str) -> None:
    ours = r"^(?: {4})?\$ (?:kubectl (?:trn|get tr)|trainium-)(?:.*\\\n)*.*\n(?: {4})?(?!\$ |```)\S.*"
    unmarked_outputs = re.findall(ours, without_blocks(read(page)), re.MULTILINE)
    assert not unmarked_outputs, "put it between marks: CONTRIBUTING.md"


def test_the_page_of_kubectl_trn_lists_exactly_its_commands() -> None:
    page = read("docs/kubectl-trn.md")
    group: Any = typer.main.get_command(app)
    existing = {name for name, command in group.commands.items() if not command.hidden}
    reported = set(re.findall(r"`([a-z-]+)(?: [^`]*)?`", page)) & existing
    reported |= set(re.findall(r"kubectl trn ([a-z][a-z-]+)", page))
    assert reported == existing


def test_every_command_of_kubectl_trn_has_an_output_and_a_cluster_test() -> None:
    group: Any = typer.main.get_command(app)
    existing = {name for name, command in group.commands.items() if not command.hidden}
    pages = [*commands(read("docs/kubectl-trn.md")), *commands(read("docs/import.md"))]
    assert {command.split()[2] for command in pages if command.startswith("kubectl trn ")} == existing
    tests = read("tests/cluster/training/test_client.py")
    in_cluster = set(re.findall(r'\b(?:trn|in_background)\((?:job|None), "([a-z-]+)"', tests))
    assert in_cluster == existing - {"import"}, "import needs no cluster"


def test_a_reset_connection_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A client that leaves an answer unread resets its connection; a thread of the server learns of it later."""
    handled = threading.Event()
    shut = LoopbackServer.shutdown_request

    def shut_now(server: LoopbackServer, request: Any) -> None:
        shut(server, request)
        handled.set()

    server = RecordedApiServer({}, tmp_path)
    with server.running(), mock.patch.object(LoopbackServer, "shutdown_request", shut_now):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET / HT")
        assert handled.wait(scaled(10))
    assert capfd.readouterr() == ("", "")


def test_a_recorded_write_is_replayed_for_the_same_request() -> None:
    words = ["scale", "llama", "1"]
    recording = recording_of(words)
    (path,) = recording.sent
    assert path.startswith("PATCH /apis/trainium.dev/")
    assert "train on 1 node;" in replay(recording, words)
    with pytest.raises(LookupError, match="record it again"):
        replay(recording, ["scale", "llama", "2"])
    with pytest.raises(LookupError, match="record it again"):
        replay(recording, ["suspend", "llama"])
    with pytest.raises(LookupError, match="was not requested"):
        replay(recording, ["status", "llama"])


def test_a_write_is_recorded_with_its_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = recorded_responses() | {f"{JOBS}/llama/scale": {"kind": "Scale", "spec": {"replicas": 1}}}
    with RecordedApiServer(answers, tmp_path).running() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        found, text = record(["scale", "llama", "1"], "team")
    key = f"PATCH {JOBS}/llama/scale"
    assert found.sent == {key: [{"spec": {"replicas": 1}}]}
    assert found.answers[key] == [answers[f"{JOBS}/llama/scale"]]
    found.write(tmp_path / "kept.json")
    assert replay(Recording.read(tmp_path / "kept.json"), ["scale", "llama", "1"]) == text


def test_options_on_the_page_of_kubectl_trn_exist() -> None:
    group: Any = typer.main.get_command(app)
    options = {flag for command in group.commands.values() for param in command.params for flag in param.opts}
    options |= {
        flag for command in group.commands.values() for param in command.params for flag in param.secondary_opts
    }
    own = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", read("docs/kubectl-trn.md")))
    simulation: Any = typer.main.get_command(simulate)
    options |= {flag for param in simulation.params for flag in param.opts}
    of_others = {"--help", "--install-completion", "--manifest-url", "--learn"}
    assert own - options <= of_others


def test_log_lines_on_the_page_have_the_schema_and_all_three_sources() -> None:
    opening = r"^<!-- output only: lines of a log -->\n\n```json\n"
    (block,) = re.findall(rf"{opening}(.*?)\n```", read("docs/watch.md"), re.MULTILINE | re.DOTALL)
    lines = [read_log_line(text) for text in block.splitlines()]
    assert [line.source for line in lines if line is not None] == [
        LogSource.OPERATOR, LogSource.AGENT, LogSource.TRAINER,
    ]  # fmt: skip
    assert [line.to_wire() for line in lines if line is not None] == [json.loads(text) for text in block.splitlines()]


def test_every_field_of_a_log_line_is_on_the_page() -> None:
    section = read("docs/watch.md").partition("\n## Logs\n")[2].partition("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    line = read_log_line((RECORDED / "log-lines.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert set(re.findall(r"`(\w+)`", cells)) == set(type(line).model_fields)


def test_recordings_contain_no_machine_or_user() -> None:
    recordings = [path for path in RECORDED.rglob("*") if path.is_file()]
    assert recordings
    for path in recordings:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(?:home|root|Users)/|\"machineID\"", text), path


def test_unmarked_text_excludes_marked_outputs() -> None:
    marked = "<!-- output: kubectl trn why a -->\n\n    $ kubectl trn why a\n    b\n\n<!-- output: end -->"
    assert without_blocks(f"before\n{marked}\nafter") == "before\n\nafter"


def test_a_block_is_renewed_in_its_form_without_changes_around_it() -> None:
    page = "a\n<!-- output: x -->\n    old\n\n    old\n<!-- output: end -->\nb\n"
    fresh = update_blocks(page, lambda command: f"{command}\n\n  2")
    assert fresh == "a\n<!-- output: x -->\n\n    $ x\n    x\n\n      2\n\n<!-- output: end -->\nb\n"
    assert update_blocks(fresh, lambda command: f"{command}\n\n  2") == fresh
    assert update_blocks(fresh, lambda _: "other", leave={"x"}) == fresh
    fenced = "<!-- output only: y -->\n```json\n```\n<!-- output: end -->"
    assert (
        update_blocks(fenced, lambda _: "{}") == "<!-- output only: y -->\n\n```json\n{}\n```\n\n<!-- output: end -->"
    )
    assert commands(fresh + fenced) == ["x", "y"]
    two = update_blocks("<!-- output 1: x && y -->\n<!-- output: end -->", lambda command: f"{command}\n2")
    assert (
        two == "<!-- output 1: x && y -->\n\n    $ x\n    x\n    ...\n\n    $ y\n    y\n    ...\n\n<!-- output: end -->"
    )
    assert commands(two) == ["x", "y"]
    with pytest.raises(KeyError):
        output("kubectl trn status nobody-recorded")


@pytest.mark.parametrize(
    ("seconds", "reported"),
    [
        (5, "5s"), (119, "119s"), (120, "2m"), (150, "2m30s"), (600, "10m"), (7200, "120m"), (10_800, "3h"),
        (14_460, "4h1m"), (29_000, "8h"), (180_000, "2d2h"), (700_000, "8d"),
    ],
)  # fmt: skip
def test_an_age_has_the_format_of_kubectl(seconds: float, reported: str) -> None:
    assert age(seconds) == reported


def test_a_table_has_the_columns_of_the_definition_and_empty_cells() -> None:
    job = {"metadata": {"name": "a"}, "spec": {}, "status": {"phase": "Pending", "artifacts": [{"path": "/out"}]}}
    heading, row = table([job], 0.0, wide=True).splitlines()
    assert heading.split()[:4] == ["NAME", "PHASE", "REASON", "READY"]
    assert row.split() == ["a", "Pending", "/out"]


def test_the_page_of_the_development_cluster_has_each_of_its_commands() -> None:
    page = read("docs/devcluster.md")
    group: Any = typer.main.get_command(devcluster)
    names = {name for name in group.commands if name not in ("fault", "node")}
    names |= {name for group_name in ("fault", "node") for name in group.commands[group_name].commands}
    assert sorted(name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", page)) == []
