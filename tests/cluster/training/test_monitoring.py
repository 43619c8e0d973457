"""A real Prometheus beside a job with faults: every panel shows something, and alerts fire on their faults alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.testing.suite.timeouts import scaled, until
from trainium_devcluster.ports import reserve_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus on PATH"),
]
FILES = Path(__file__).parents[3] / "helm/trainium-operator/files"
QUIET = {"What nodes say of themselves"}
"""Panels that are empty while no node has a problem."""

YOUNG = {"TrainiumGoodputLow", "TrainiumNamedJobGoodputLow"}
"""Alerts that fire without a delay while the start is most of a job's time."""


@dataclass
class Prometheus:
    """A Prometheus that scrapes the operator each second."""

    url: str

    def query(self, promql: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": promql})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=scaled(10)) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def firing_alerts(self, namespace: str = ".*") -> set[str]:
        """Return the firing alerts of jobs in a namespace, and those without a namespace."""
        alerts = self.query(f'ALERTS{{alertstate="firing", job_namespace=~"|{namespace}"}}')
        return {alert["metric"]["alertname"] for alert in alerts}

    def until(self, promql: str) -> list[dict[str, Any]]:
        return until(
            lambda: self.query(promql), lambda: f"an answer to {promql}; firing: {self.firing_alerts()}", pause=0.5
        )


def without_delays(rules: str) -> str:
    """Return the chart's alerts without their delays."""
    loaded = yaml.safe_load(rules)
    for group in loaded["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    return yaml.safe_dump(loaded)


@pytest.fixture
def prometheus(operator: SharedCluster, tmp_path: Path) -> Iterator[Prometheus]:
    if operator.devcluster is None:
        pytest.skip("the addresses of pods are reached on the development cluster only")
    pods = operator.get("pods", "-n", "trainium-system", "-l", "app.kubernetes.io/component=operator")["items"]
    targets = [f"{pod['status']['podIP']}:8080" for pod in pods]
    (tmp_path / "alerts.yaml").write_text(without_delays((FILES / "alerts.yaml").read_text()))
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "operator", "static_configs": [{"targets": targets}]}],
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    port = reserve_port()
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: _is_ready(url), (tmp_path / "log").read_text)
            yield Prometheus(url)
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/-/ready", timeout=scaled(2)).close()
    except OSError:
        return False
    return True


@pytest.mark.long
def test_panels_and_alerts_show_faults_of_jobs(
    prometheus: Prometheus, new_job: Callable[..., Job], namespace: str
) -> None:
    job = new_job("tended", "trainer: {steps: 5000}\nworkers: {replicas: 2, spares: 1}")
    job.wait_for_step(3)
    own = f'job_namespace="{namespace}", job_name="tended"'
    prometheus.until(f'trainingjob_operator_job_phase{{{own}, phase="Running"}}')
    prometheus.until(f"trainingjob_operator_job_step{{{own}}} > 3")
    prometheus.until('sum(trainingjob_operator_workers{state="spare_ready"}) == 1')
    calm = prometheus.firing_alerts(namespace)
    job.kill_rank(0)
    job.wait_for_recovery()
    prometheus.until(f'trainingjob_operator_job_interruptions_total{{{own}, cause="Crash"}} == 1')
    # A rate takes two scrapes, and a job that recovers has no loss until its next step.
    for title, query in panels(namespace, "tended"):
        if title not in QUIET:
            prometheus.until(query)

    hopeless = new_job("hopeless", "trainer: {data: {source: /nowhere/corpus.txt}}")
    hopeless.wait_for_phase("Failed")
    stalled = f'ALERTS{{alertstate="firing", alertname="TrainiumNamedJobStalled", job_namespace="{namespace}"}}'
    failed = prometheus.until(stalled)
    prometheus.until('ALERTS{alertstate="firing", alertname="TrainiumJobFailed"}')

    # Jobs of other tests may still be there, and then stall or lose time.
    assert calm <= YOUNG
    assert [item["metric"]["job_name"] for item in failed] == ["hopeless"]


def panels(namespace: str, name: str) -> Iterator[tuple[str, str]]:
    """Return title and query of each panel, with the variables that Grafana sets for this job."""
    for path in (FILES / "dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "10s")
                yield panel["title"], query.replace("$namespace", namespace).replace("$name", name)
