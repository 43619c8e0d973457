"""The command line with an API server on loopback: output, requests and error messages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing.api.recorded_jobs import (
    CORE,
    JOBS,
    RecordedApiServer,
    kubeconfig,
    recorded_log_as_json,
    recorded_object,
)
from tests.unit.client.conftest import Command
from trainium_client.commands.complete import list_candidates
from trainium_client.commands.main import app


def test_status_sends_one_request_for_each_kind(trn: Command, server: RecordedApiServer) -> None:
    code, out, err = trn("status", "llama")

    assert (code, err) == (0, "")
    assert "Running" in out
    assert sorted(path.partition("?")[0] for _, path, _ in server.requests) == sorted(
        [f"{JOBS}/llama", f"{CORE}/configmaps/llama-membership", f"{CORE}/pods", f"{CORE}/events"]
    )


@pytest.mark.parametrize(
    "command", ["status", "why", "history", "goodput", "sizes", "scaling", "ranks --no-steps", "checkpoints"]
)
def test_every_command_has_json(trn: Command, command: str) -> None:
    words = command.split()
    code, out, _ = trn(words[0], "llama", *words[1:], "-o", "json")

    assert code == 0
    assert json.loads(out)


def test_sizes_shows_passes_and_speed_of_each_size_and_marks_the_current_one(trn: Command) -> None:
    code, out, _ = trn("sizes", "llama", "-o", "json")
    rows = json.loads(out)

    assert code == 0
    assert [(row["minNodes"], row["maxNodes"], row["trains"], row["microBatches"], row["speed"]) for row in rows] == [
        (2, 2, 2, 6, 1.0),
        (1, 1, 1, 12, 0.5),
    ]
    assert [row["current"] for row in rows] == [True, False]
    assert rows[0]["stepSeconds"] > 0
    assert rows[1]["stepSeconds"] is None
    assert "100.0 %" in trn("sizes", "llama").out


def test_goodput_shows_the_cost_at_a_given_price(trn: Command) -> None:
    code, out, _ = trn("goodput", "llama", "--price-per-node-hour", "21.5", "-o", "json")
    ledger = json.loads(out)

    assert code == 0
    assert ledger["cost"]["soFar"] == pytest.approx(21.5 * ledger["nodeSeconds"] / 3600)
    code, out, err = trn("goodput", "llama", "--price-per-node-hour", "-1")
    assert (code, out) == (1, "")
    assert "--price-per-node-hour" in err


def test_sizes_reports_ranks_without_work_and_the_loss_of_speed(trn: Command, server: RecordedApiServer) -> None:
    job = recorded_object("job")
    job["spec"]["workers"] |= {"replicas": 1, "accelerator": {"device": "cpu", "coresPerNode": 4}}
    job["spec"]["trainer"]["batch"] = {"globalSize": 3, "microSize": 1}
    server.answers[f"{JOBS}/llama"] = job
    rows = json.loads(trn("sizes", "llama", "-o", "json").out)
    code, out, _ = trn("sizes", "llama")

    assert code == 0
    assert [(row["trains"], row["dataParallel"], row["idleRanks"]) for row in rows][-1] == (1, 4, 1)
    reported = " ".join(out.split())
    assert "batch of 3 samples is smaller than the data-parallel degree (4): 1 of its ranks never have work" in reported
    assert "75.0 % of the speed" in reported


def test_sizes_refuses_an_unknown_field_by_name(trn: Command, server: RecordedApiServer) -> None:
    job = recorded_object("job")
    job["spec"]["elasticity"] = {"newer": True}
    server.answers[f"{JOBS}/llama"] = job
    code, out, err = trn("sizes", "llama")

    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "spec.elasticity.newer is not known to this command" in err


def test_an_unknown_job_gets_suggestions_of_similar_names(trn: Command) -> None:
    code, out, err = trn("status", "lama")

    assert (code, out) == (1, "")
    assert err == "error: there is no TrainingJob 'lama' in namespace team; did you mean llama?\n"


def test_a_missing_right_is_named_with_verb_and_resource(trn: Command, server: RecordedApiServer) -> None:
    server.answers[f"{JOBS}/llama"] = 403
    code, _, err = trn("history", "llama")

    assert code == 1
    assert "you may not get trainingjobs/llama in namespace team" in err
    assert "verb 'get' on 'trainingjobs'" in err


def test_status_names_the_resources_that_rbac_forbids(trn: Command, server: RecordedApiServer) -> None:
    server.answers |= {f"{CORE}/pods": 403, f"{CORE}/events": 403}
    code, out, _ = trn("status", "llama")

    assert code == 0
    assert "step 263/4000" in out
    assert "workers: you may not list pods in namespace team" in out
    assert "events: you may not list events in namespace team" in out


def test_a_cluster_without_the_definition_is_reported(trn: Command, server: RecordedApiServer) -> None:
    server.answers[f"{JOBS}/llama"] = b"404 page not found\n"

    assert "does not know TrainingJobs" in trn("status", "llama").err
    server.answers["/apis/trainium.dev"] = {"versions": [{"version": "v2"}]}
    assert "serves TrainingJobs as trainium.dev/v2 and this command uses v1alpha1" in trn("status", "llama").err


def test_a_job_without_a_status_is_shown(trn: Command, server: RecordedApiServer) -> None:
    server.answers[f"{JOBS}/llama"] = {key: value for key, value in recorded_object("job").items() if key != "status"}
    code, out, _ = trn("status", "llama")

    assert code == 0
    assert "No operator has answered this job yet" in out
    assert trn("why", "llama").code == 0


def test_an_unreachable_cluster_and_a_bad_kubeconfig_are_one_sentence(trn: Command, tmp_path: Path) -> None:
    unreachable = tmp_path / "unreachable"
    unreachable.write_text(yaml.safe_dump(kubeconfig("http://127.0.0.1:1")))
    invalid = tmp_path / "invalid"
    invalid.write_text("[]")

    assert (
        "no answer from the API server http://127.0.0.1:1"
        in trn("status", "llama", "--kubeconfig", str(unreachable)).err
    )
    assert "is no kubeconfig" in trn("status", "llama", "--kubeconfig", str(invalid)).err
    assert "there is no kubeconfig at" in trn("status", "llama", "--kubeconfig", str(tmp_path / "none")).err
    code, _, err = trn("status", "llama", "--context", "elsewhere")
    assert (code, err.count("\n")) == (1, 1)
    assert "no context named 'elsewhere'" in err


def test_a_deeply_nested_job_is_shown_and_hides_no_other_job(trn: Command, server: RecordedApiServer) -> None:
    template = '{"a":' * 9_000 + "1" + "}" * 9_000
    deep = json.dumps(recorded_object("job")).replace('"workers": {', f'"workers": {{"template": {template}, ', 1)
    server.answers[f"{JOBS}/llama"] = deep
    server.answers[JOBS] = f'{{"items": [{deep}, {json.dumps(recorded_object("failed"))}]}}'

    code, out, err = trn("status", "llama")
    assert (code, err) == (0, "")
    assert "Running" in out
    assert "did you mean llama" in trn("status", "lama").err


def test_a_response_that_is_not_json_is_reported(trn: Command, server: RecordedApiServer) -> None:
    server.answers[f"{JOBS}/llama"] = "<html>log in</html>"

    code, out, err = trn("status", "llama")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "the response is not JSON" in err


def test_wrong_usage_exits_with_code_1(trn: Command) -> None:
    assert trn("stats", "llama").code == 1
    assert trn("scale", "llama", "none").code == 1


def test_the_log_of_a_rank_is_its_own_lines(trn: Command) -> None:
    code, out, _ = trn("logs", "llama", "--rank", "0")

    assert code == 0
    assert out.splitlines()
    assert all("[rank" not in line and " agent " not in line for line in out.splitlines())
    assert "agent rank 0 ended with code 137" in trn("logs", "llama", "--all").out


@pytest.mark.parametrize("words", [("--rank", "0"), ("--timestamps",), ("--tail", "5")])
def test_a_json_log_is_printed_like_a_text_log(trn: Command, server: RecordedApiServer, words: tuple[str, ...]) -> None:
    as_text = trn("logs", "llama", *words).out
    why = json.loads(trn("why", "llama", "-o", "json").out)["logLines"]
    server.answers[f"{CORE}/pods/llama-w-0/log"] = recorded_log_as_json()
    assert trn("logs", "llama", *words) == (0, as_text, "")
    assert json.loads(trn("why", "llama", "-o", "json").out)["logLines"] == why


def test_json_output_of_logs_has_the_original_json_records(trn: Command, server: RecordedApiServer) -> None:
    before = [json.loads(line) for line in trn("logs", "llama", "--all", "-o", "json").out.splitlines()]
    server.answers[f"{CORE}/pods/llama-w-0/log"] = recorded_log_as_json()
    after = [json.loads(line) for line in trn("logs", "llama", "--all", "-o", "json").out.splitlines()]

    assert all("record" not in line for line in before)
    assert [line["record"]["message"] in line["line"] for line in after] == [True] * len(before)
    assert [line["rank"] for line in after] == [line["rank"] for line in before]
    (agent,) = [line for line in after if line["rank"] is None]
    assert agent["record"]["source"] == "agent"
    shown = trn("logs", "llama", "--all").out
    assert "[rank 0] 02:08:38 rank 0 INFO step 106/4000" in shown
    assert "2026-11-23 02:09:14,033 WARNING agent rank 0 ended with code 137" in shown


def test_logs_of_a_deleted_pod_are_one_sentence(trn: Command) -> None:
    assert "llama-w-2 was deleted, and its log with it" in trn("logs", "llama", "--rank", "1").err
    assert "there is no rank 2: llama has ranks 0 to 1" in trn("logs", "llama", "--rank", "2").err
    assert "no pod is left that had this rank before" in trn("logs", "llama", "--rank", "1", "--previous").err


def test_previous_logs_come_from_the_pod_that_had_the_rank_in_the_history(
    trn: Command, server: RecordedApiServer
) -> None:
    entry = server.answers[f"{JOBS}/llama"]["status"]["history"][-1]
    entry |= {"pod": "llama-w-7", "rank": 1}
    _, _, err = trn("logs", "llama", "--rank", "1", "--previous")
    assert "rank 1 was in llama-w-7 before, which was deleted" in err
    assert "no pod is left" in trn("logs", "llama", "--rank", "0", "--previous").err
    assert "llama-w-7" in trn("why", "llama").out
    assert "whose first rank was 1" in " ".join(trn("why", "llama").out.split())

    row = json.loads(json.dumps(server.answers[f"{CORE}/pods"]["rows"][0]))
    rows = server.answers[f"{CORE}/pods"]["rows"]
    rows += [{**row, "cells": [pod, *row["cells"][1:]]} for pod in ("llama-w-7", "llama-w-9")]
    for pod in ("llama-w-7", "llama-w-9"):
        server.answers[f"{CORE}/pods/{pod}/log"] = f"2026-01-01T00:00:00.0Z [rank 1] in {pod}\n"
    code, out, err = trn("logs", "llama", "--rank", "1", "--previous")
    assert (code, out) == (0, "in llama-w-7\n"), "the pod that had the rank, although another one is newer"


def test_why_a_job_failed_is_reported_once_and_followed_by_what_to_do(trn: Command) -> None:
    code, output, _ = trn("why", "broken")

    assert code == 0
    assert " ".join(output.split()).count("there is no such file or folder") == 1
    assert "kubectl trn retry broken" in output
    assert "kubectl trn why" not in output, "the output of `why` does not refer to itself"


def test_a_watch_in_a_pipe_ends_with_why_the_job_failed(trn: Command) -> None:
    code, output, _ = trn("watch", "broken")

    assert code == 0
    status_line, *rest = output.splitlines()
    assert "Failed, step 0" in status_line
    assert "there is no such file or folder" in rest[0]
    assert rest[1] == "- What led to it: kubectl trn why broken"


def test_every_command_takes_a_namespace_a_context_and_an_output(trn: Command) -> None:
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        code, out, _ = trn(name, "--help")
        assert code == 0
        if name == "import":  # which needs no cluster
            continue
        options = ["--namespace", "-n", "--context", "--kubeconfig", *([] if name == "simulate" else ["--output"])]
        assert all(option in out for option in options), name


def test_a_job_of_another_namespace_is_named_with_its_namespace(trn: Command, server: RecordedApiServer) -> None:
    everywhere = "/apis/trainium.dev/v1alpha1/trainingjobs"
    server.answers[everywhere] = {"items": [{"metadata": {"name": "elsewhere", "namespace": "team-b"}}]}
    error = trn("status", "elsewhere").err
    assert "there is no TrainingJob 'elsewhere' in namespace team; there is one in namespace team-b" in error


@pytest.mark.parametrize("form", ["text", "json"])
def test_output_to_a_full_disk_is_one_sentence(server: RecordedApiServer, form: str) -> None:
    command = [sys.executable, "-m", "trainium_client.commands.main", "status", "llama", "-o", form, "--kubeconfig"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*command, str(server.kubeconfig)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == "error: cannot write the output: No space left on device\n"


def test_a_command_loads_neither_models_nor_the_library_for_event_loops(server: RecordedApiServer) -> None:
    program = (
        "import sys; from trainium_client.commands.main import main\n"
        f"try: main(['status', 'llama', '--kubeconfig', {str(server.kubeconfig)!r}])\n"
        "except SystemExit as exit_info: assert not exit_info.code\n"
        "slow = {'trainium_contract.base', 'kubernetes.aio', 'kubernetes.client.models.v1_pod', 'aiohttp', 'asyncio'}\n"
        "heavy = slow & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


def test_a_read_is_repeated_once_without_a_word_when_the_server_closes_the_connection(
    trn: Command, server: RecordedApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler: Any = server._server.RequestHandlerClass
    answer = handler.do_GET
    dropped: list[str] = []

    def drop_first(self: Any) -> None:
        if not dropped:
            dropped.append(self.path)
            self.close_connection = True
            return
        answer(self)

    monkeypatch.setattr(handler, "do_GET", drop_first)
    assert trn("status", "llama").err == ""
    assert len(dropped) == 1


def test_help_and_completion_of_commands_do_not_load_the_kubernetes_library() -> None:
    program = (
        "import sys; from trainium_client.commands import complete\n"
        "sys.argv[1:] = ['status', '']; complete.list_candidates(['st'], complete._list_job_names)\n"
        "import trainium_client; trainium_client.TrainingJob\n"
        "assert 'kubernetes' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_shell_completion_offers_commands_and_then_jobs() -> None:
    def complete_jobs(words: list[str]) -> list[str]:
        return ["llama", "broken"] if "team" in words else []

    assert {"status", "stacks"} <= set(list_candidates(["st"], complete_jobs))
    assert list_candidates(["status", "-n", "team", ""], complete_jobs) == ["broken", "llama"]
    assert list_candidates(["logs", "-n", "team", "ll"], complete_jobs) == ["llama"]
    assert list_candidates(["status", "llama", "-o", "j"], complete_jobs) == ["json"]
    assert list_candidates(["scaling", "-n", "team", "--price-per-node-hour", "2", ""], complete_jobs) == [
        "broken",
        "llama",
    ]
    assert list_candidates(["nodes", ""], complete_jobs) == []


def test_an_exec_plugin_provides_the_token_and_its_failure_is_one_sentence(
    trn: Command, server: RecordedApiServer, tmp_path: Path
) -> None:
    def kubeconfig_options(*command: str) -> list[str]:
        plugin: dict[str, Any] = {"apiVersion": "client.authentication.k8s.io/v1", "command": command[0]}
        plugin |= {"args": list(command[1:]), "env": [{"name": "WHO", "value": "me"}]}
        path = tmp_path / "login"
        path.write_text(yaml.safe_dump(kubeconfig(server.url, exec=plugin)))
        return ["--kubeconfig", str(path)]

    granted = (
        "import json, os; request = json.loads(os.environ['KUBERNETES_EXEC_INFO']);"
        "print(json.dumps(request | {'status': {'token': os.environ['WHO']}}))"
    )
    assert trn("history", "llama", *kubeconfig_options(sys.executable, "-c", granted)).code == 0
    for command, output in (
        ([sys.executable, "-c", granted.replace("'token': os.environ['WHO']", "")], "no credential; log in again"),
        ([sys.executable, "-c", "print(1)"], "failed: "),
        ([sys.executable, "-c", "import sys; sys.exit('log in first')"], "log in first"),
        (["no-such-login-program"], "failed: "),
    ):
        refused = trn("history", "llama", *kubeconfig_options(*command))
        assert (refused.code, refused.err.count("\n")) == (1, 1)
        assert output in refused.err


def test_jobs_are_listed_ended_ones_last_also_by_a_status_without_a_name(
    trn: Command, server: RecordedApiServer
) -> None:
    server.answers["/apis/trainium.dev/v1alpha1/trainingjobs"] = server.answers[JOBS]
    code, out, err = trn("list")
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["NAME", "PHASE"],
        ["llama", "Running"],
        ["broken", "Failed"],
    ]
    assert trn("status").out == out
    assert trn("list", "-A").out.startswith("NAMESPACE")
    assert [job["name"] for job in json.loads(trn("list", "-o", "json").out)] == ["llama", "broken"]
    server.answers[JOBS] = {"items": []}
    assert "has no TrainingJobs; -A lists those of all namespaces" in trn("list").out
    assert "leave out llama" in trn("status", "llama", "-A").err


def test_a_command_line_without_a_command_shows_the_commands_in_groups(trn: Command) -> None:
    code, out, err = trn()
    assert (code, err) == (0, "")
    assert [
        title for title in ("Show jobs", "Find out why", "Change a job", "Sizes, cost and plans") if title not in out
    ] == []
