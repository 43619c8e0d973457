"""Every alert fires on its fault and on no other: the chart's rules in Prometheus' own rule engine (promtool)."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool on PATH")

ALERTS = Path(__file__).parents[2] / "helm/trainium-operator/files/alerts.yaml"
P = "trainingjob_operator_"
HOURS = 3
OF_JOB = 'job_namespace="team",job_name="llama"'
CALM = {
    'leader{pod="a"}': "1",
    'leader{pod="b"}': "0",
    'reconcile_errors_total{error="ConflictError"}': "0+0.5",
    'api_request_seconds_bucket{verb="GET",le="0.1"}': "0+100",
    'api_request_seconds_bucket{verb="GET",le="+Inf"}': "0+100",
    'agent_messages_total{kind="heartbeat",code="200"}': "0+1000",
    'agent_messages_total{kind="heartbeat",code="401"}': "0+1",
    'namespaces{state="Listed"}': "2",
    'namespaces{state="Forbidden"}': "0",
    'https_requests_total{page="metrics",code="200"}': "0+10",
    'https_requests_total{page="metrics",code="401"}': "0+1",
    'jobs_finished_total{result="Complete"}': "0+1",
    'jobs_finished_total{result="Failed"}': "0",
    'jobs{phase="Running"}': "1",
    'jobs{phase="Pending"}': "0",
    'jobs{phase="Recovering"}': "0",
    'goodput_ratio{measure="strict"}': "0.999",
    'goodput_ratio{measure="fleet"}': "0.5",
    'interruptions_total{cause="Crash"}': "0+0.1",
    'interruptions_total{cause="Resize"}': "0+5",
    "checkpoint_durable_age_seconds": "600",
    'workers{state="desired"}': "4",
    'workers{state="member"}': "4",
    'workers{state="spare_wanted"}': "1",
    'workers{state="spare_ready"}': "1",
    "node_actions_frozen": "0",
    'machines{state="Quarantined"}': "1",
    'machines{state="Permanent"}': "0",
    'hangs_total{phase="Step"}': "0",
    f"job_stalled{{{OF_JOB}}}": "0",
    f'job_phase{{{OF_JOB},phase="Running"}}': "1",
    f'job_goodput_ratio{{{OF_JOB},measure="strict"}}': "0.999",
    f"job_checkpoint_healthy{{{OF_JOB}}}": "1",
}
"""Samples a minute of a fleet that is well, in promtool's notation; a plain number stays."""
FAULTS: dict[str, dict[str, str]] = {
    "TrainiumNobodyLeads": {'leader{pod="a"}': "0"},
    "TrainiumPlansFail": {'reconcile_errors_total{error="ConflictError"}': "0+30"},
    "TrainiumApiSlow": {
        'api_request_seconds_bucket{verb="GET",le="0.1"}': "0+90",
        'api_request_seconds_bucket{verb="GET",le="10"}': "0+100",
    },
    "TrainiumAgentsRefused": {'agent_messages_total{kind="heartbeat",code="401"}': "0+120"},
    "TrainiumNamespaceUnreadable": {'namespaces{state="Listed"}': "1", 'namespaces{state="Forbidden"}': "1"},
    "TrainiumReadersRefused": {'https_requests_total{page="metrics",code="401"}': "0+12"},
    "TrainiumJobFailed": {'jobs_finished_total{result="Failed"}': "0+0.1"},
    "TrainiumJobNotTraining": {'jobs{phase="Recovering"}': "1"},
    "TrainiumJobWaits": {'jobs{phase="Pending"}': "2"},
    "TrainiumGoodputLow": {'goodput_ratio{measure="strict"}': "0.9"},
    "TrainiumInterruptionsOften": {'interruptions_total{cause="Crash"}': "0+1"},
    "TrainiumCheckpointsStopped": {"checkpoint_durable_age_seconds": "4000"},
    "TrainiumSparesGone": {'workers{state="spare_ready"}': "0"},
    "TrainiumTrainsSmaller": {'workers{state="member"}': "3"},
    "TrainiumNodeActionsFrozen": {"node_actions_frozen": "1"},
    "TrainiumMachinesPermanentlyOut": {'machines{state="Permanent"}': "1"},
    "TrainiumRanksHang": {'hangs_total{phase="Step"}': "0+0.1"},
    "TrainiumNamedJobStalled": {f"job_stalled{{{OF_JOB}}}": "1"},
    "TrainiumNamedJobGoodputLow": {f'job_goodput_ratio{{{OF_JOB},measure="strict"}}': "0.9"},
    "TrainiumNamedJobCheckpointsStopped": {f"job_checkpoint_healthy{{{OF_JOB}}}": "0"},
}  # fmt: skip


def assert_firing_alerts(
    folder: Path, samples: Mapping[str, str], expected: set[str], *, after_minutes: int = HOURS * 60
) -> None:
    """Assert which alerts fire after so long."""
    series = [
        {"series": P + name, "values": f"{value}x{HOURS * 60}" if "+" in value else f"{value}+0x{HOURS * 60}"}
        for name, value in samples.items()
    ]
    alerts = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)]
    test = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{after_minutes}m",
                        "exp_samples": alerts,
                    }
                ],
            }
        ],
    }
    file = folder / "alerts_test.yaml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_fires_on_a_healthy_fleet(tmp_path: Path) -> None:
    assert_firing_alerts(tmp_path, CALM, set())


@pytest.mark.parametrize("alert", FAULTS)
def test_exactly_the_alert_of_a_fault_fires(tmp_path: Path, alert: str) -> None:
    assert_firing_alerts(tmp_path, CALM | FAULTS[alert], {alert})


def test_each_alert_has_a_fault() -> None:
    rules = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert rules == list(FAULTS)


def test_a_short_fault_does_not_fire(tmp_path: Path) -> None:
    assert_firing_alerts(tmp_path, CALM | FAULTS["TrainiumJobNotTraining"], set(), after_minutes=20)


def test_a_finished_job_does_not_fire_for_its_goodput(tmp_path: Path) -> None:
    samples = CALM | FAULTS["TrainiumNamedJobGoodputLow"]
    del samples[f'job_phase{{{OF_JOB},phase="Running"}}']
    assert_firing_alerts(tmp_path, samples, set())
