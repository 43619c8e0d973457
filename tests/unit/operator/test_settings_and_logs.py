"""Flags, variables and defaults of the operator, and the lines of its log."""

import io
import json
import logging
import re
from dataclasses import fields

import pytest

from trainium_contract.wire.log_line import LogFormat
from trainium_operator.coordinator import server
from trainium_operator.http import listener
from trainium_operator.logs import LIMITED_LOGGERS, MAX_LINES, LineLimitFilter, configure_logs
from trainium_operator.settings import Settings, create_process_identity, parse_settings


def test_defaults_need_no_arguments() -> None:
    assert parse_settings([]) == Settings()


def test_a_flag_wins_over_its_variable_and_the_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINIUM_OPERATOR_WORKERS", "7")
    monkeypatch.setenv("TRAINIUM_OPERATOR_WATCH_NODES", "false")
    settings = parse_settings(["--workers", "3"])
    assert settings.workers == 3
    assert settings.watch_nodes is False
    assert parse_settings([]).workers == 7


def test_namespace_and_bind_address_come_from_the_pod_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "system")
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    settings = parse_settings([])
    assert (settings.namespace, settings.bind_address) == ("system", "10.1.2.3")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "0"], "--workers must be at least 1, not 0"),
        (["--status-interval", "0"], "--status-interval must be above 0 seconds"),
        (["--coordinator-port", "70000"], "--coordinator-port must be from 0 to 65535"),
        (["--https-port", "-1"], "--https-port must be from 0 to 65535, not -1"),
        (["--ui", "maybe"], "must be true or false, not 'maybe'"),
        (["--worker-user", "root"], "must be an integer or empty, not 'root'"),
        (["--ui", "true", "--https-port", "8443"], "--https-port must be another port than --metrics-port and"),
        (["--secure-metrics", "true", "--https-port", "8080"], "--https-port must be another port than --metrics-port"),
        (["--lease-duration", "2"], "--lease-duration must be from 3 to 600 seconds, not 2"),
        (["--lease-duration", "2.5"], "'--lease-duration' (env var: 'TRAINIUM_OPERATOR_LEASE_DURATION'): "),
        (
            ["--lease-duration", "3"],
            "--lease-renew-deadline must be from 1 second to four fifths of --lease-duration (2.4), not 3.0",
        ),
        (["--lease-renew-deadline", "nan"], "--lease-renew-deadline must be from 1 second to four fifths"),
        (
            ["--lease-retry", "5.5"],
            "--lease-retry must be from 0.2 seconds to half of --lease-renew-deadline (1.5), not 5.5",
        ),
        (["--lease-retry", "0"], "--lease-retry must be from 0.2 seconds to half"),
        (["--log-level", "loud"], "--log-level must be one of debug, info"),
        (["--workers", "many"], "Invalid value for '--workers'"),
        (["--taint-nodes=true", "--watch-nodes=false"], "--taint-nodes must be given with --watch-nodes"),
        (["--watch-namespaces", "ml,Research"], "--watch-namespaces must be at most 50 names of namespaces"),
        (["--watch-namespaces", ",".join(f"n{at}" for at in range(51))], "at most 50 names of namespaces"),
        (["--job-network-policy", "true"], "--operator-labels must be key=value, separated by commas, and given with"),
        (["--operator-labels", "a"], "--operator-labels must be key=value"),
        (["--job-ingress", "nobody"], "--job-ingress must be a JSON list of objects with no other keys than from and"),
        (["--job-ingress", '[{"to": []}]'], "--job-ingress must be a JSON list"),
        (["--job-ingress", '[{"from": {}}]'], "--job-ingress must be a JSON list"),
        (["--log-format", "xml"], "--log-format must be json or text, not 'xml'"),
        (["--worker-log-format", "xml"], "--worker-log-format must be json or text, not 'xml'"),
        (["--wrokers=3"], "No such option: --wrokers"),
        (["walk"], "unexpected extra argument(s) (walk)"),
    ],
)
def test_unusable_values_are_refused_with_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(arguments)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert re.fullmatch("error: .*; see trainium-operator --help\n", message)


def test_worker_ingress_comes_from_flags_and_the_operator_namespace() -> None:
    assert parse_settings(["--operator-labels=a=b"]).build_worker_ingress("system") is None
    on = ["--job-network-policy=true", "--operator-labels=x.io/a=b,c=d", '--job-ingress=[{"ports": [{"port": 1}]}]']
    ingress = parse_settings(on).build_worker_ingress("system")
    assert ingress is not None
    assert (ingress.operator_namespace, ingress.operator_labels) == ("system", {"x.io/a": "b", "c": "d"})
    assert ingress.rules == ({"ports": [{"port": 1}]},)


def test_watched_namespaces_are_unique_and_empty_means_all() -> None:
    assert parse_settings(["--watch-namespaces", "ml, research,ml", "--watch-namespace", "late"]).namespaces == (
        "ml",
        "research",
        "late",
    )
    assert parse_settings([]).namespaces == ()


def test_an_unusable_variable_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINIUM_OPERATOR_RESYNC", "often")
    with pytest.raises(SystemExit):
        parse_settings([])
    assert "TRAINIUM_OPERATOR_RESYNC" in capsys.readouterr().err


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    text = capsys.readouterr().out
    for field in fields(Settings):
        assert f"--{field.name.replace('_', '-')}" in text
        assert f"TRAINIUM_OPERATOR_{field.name.upper()}" in " ".join(text.split())


def test_the_lease_identity_is_stable_within_a_pod() -> None:
    pod = {"POD_NAME": "operator-0", "POD_UID": "u"}
    assert create_process_identity(pod) == create_process_identity(pod)
    assert create_process_identity({}) != create_process_identity({})


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    configure_logs("info", "json", stream)
    yield stream
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_logs_are_one_json_object_a_line_with_the_job(lines: io.StringIO) -> None:
    extra = {"namespace": "ns", "job": "llama", "generation": 3, "token": "secret"}
    logging.getLogger("trainium_operator.x").info("hello %s", "world", extra=extra)
    line = json.loads(lines.getvalue())
    assert line["message"] == "hello world"
    assert (line["level"], line["namespace"], line["job"], line["generation"]) == ("info", "ns", "llama", 3)
    assert (line["source"], line["logger"]) == ("operator", "trainium_operator.x")
    assert "secret" not in lines.getvalue()


def test_a_log_line_of_kopf_names_its_job(lines: io.StringIO) -> None:
    about = {"kind": "TrainingJob", "namespace": "ns", "name": "llama", "uid": "u"}
    logging.getLogger("kopf.objects").error("a handler failed", extra={"k8s_ref": about})
    logging.getLogger("kopf.objects").error("a handler failed", extra={"k8s_ref": {**about, "kind": "Pod"}})
    first, second = map(json.loads, lines.getvalue().splitlines())
    assert (first["namespace"], first["job"]) == ("ns", "llama")
    assert "job" not in second


def test_an_error_with_traceback_is_one_line(lines: io.StringIO) -> None:
    logging.getLogger("x").error("failed", exc_info=RuntimeError("boom"))
    (line,) = lines.getvalue().splitlines()
    assert "RuntimeError: boom" in json.loads(line)["error"]


@pytest.mark.parametrize("given", ["[]", "{", '{"kind": "Pod"}', '{"spec": []}', '{"spec": {"containers": {}}}', "3"])
def test_an_invalid_worker_template_is_refused_with_a_sentence(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--worker-template", given])
    assert "--worker-template must be a JSON object with metadata and spec of a pod" in capsys.readouterr().err


def test_a_worker_template_reaches_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINIUM_OPERATOR_WORKER_TEMPLATE", '{"spec": {"priority": 3}}')
    settings = parse_settings([])
    assert settings.build_plan_settings("ops").worker_template == {"spec": {"priority": 3}}


def test_the_log_format_of_workers_defaults_to_text() -> None:
    assert parse_settings([]).build_plan_settings("ops").worker_log_format is LogFormat.TEXT
    asked = parse_settings(["--worker-log-format=json"])
    assert asked.build_plan_settings("ops").worker_log_format is LogFormat.JSON


def test_log_lines_caused_by_clients_are_rate_limited_and_counted() -> None:
    now = 0.0
    bounded = LineLimitFilter(lambda: now)

    def filter_message(name: str = LIMITED_LOGGERS[0], level: int = logging.INFO) -> str:
        record = logging.LogRecord(name, level, "", 0, "%s: the connection broke", ("/v1",), None)
        return record.getMessage() if bounded.filter(record) else ""

    assert sum(bool(filter_message()) for _ in range(1000)) == MAX_LINES
    assert filter_message(LIMITED_LOGGERS[1]), "each has its own share"
    assert filter_message(level=logging.ERROR), "errors are always logged"
    assert all(filter_message("trainium_operator.cluster.lease") for _ in range(1000))
    now = 60.0
    assert filter_message() == "/v1: the connection broke (940 lines before it were left out)"
    assert filter_message() == "/v1: the connection broke"


def test_rate_limited_loggers_are_coordinator_and_listener(lines: io.StringIO) -> None:
    assert {server.logger.name, listener._log.name} == set(LIMITED_LOGGERS)
    for _ in range(200):
        server.logger.warning("refused")
    assert len(lines.getvalue().splitlines()) == MAX_LINES
