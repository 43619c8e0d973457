"""The operator as a process with the chart's rights and arguments, whose HTTPS port for readers is open."""

import base64
import http.client
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.testing.suite.timeouts import scaled, until

KINDS = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Secret"}


@dataclass
class LocalOperator:
    """An operator process whose HTTPS port is open; `api` is the cluster's kubectl and helm."""

    api: Any
    port: int
    trust: ssl.SSLContext
    authority: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, token: str = "", source: str = "127.0.0.1", path: str = "/metrics") -> tuple[int, str]:
        """Return status and text, over a new connection."""
        connection = http.client.HTTPSConnection(
            "localhost", self.port, timeout=scaled(30), context=self.trust, source_address=(source, 0)
        )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def request_token(api: Any, account: str, namespace: str) -> str:
    """Return a token of a ServiceAccount for the API server."""
    token: str = api.kubectl("create", "token", account, "-n", namespace)
    return token.strip()


def write_kubeconfig(api: Any, token: str, path: Path) -> str:
    """Return a kubeconfig with this token."""
    config = json.loads(api.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    cluster = config["clusters"][0]["cluster"]
    if "certificate-authority" in cluster:
        authority = Path(cluster.pop("certificate-authority"))
        cluster["certificate-authority-data"] = base64.b64encode(authority.read_bytes()).decode()
    path.write_text(json.dumps(config))
    return str(path)


@contextmanager
def run_local_operator(api: Any, folder: Path, release: str, namespace: str, settings: str) -> Iterator[LocalOperator]:
    """Install the chart and run its Deployment as a local process with the token of its ServiceAccount."""
    text = api.helm("template", release, api.chart, "--namespace", namespace, "--set", settings)
    manifests = [manifest for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]
    api.run(
        "kubectl",
        "apply",
        "-f",
        "-",
        stdin=yaml.safe_dump_all(manifest for manifest in manifests if manifest["kind"] in KINDS),
    )
    (deployment,) = [manifest for manifest in manifests if manifest["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    log = folder / "log"
    credentials = write_kubeconfig(api, request_token(api, account, namespace), folder / "kubeconfig")
    arguments = ["--namespace", namespace, "--kubeconfig", credentials, "--bind-address", "127.0.0.1"]
    arguments += ["--coordinator-port", "0", "--metrics-port", "0", "--https-port", "0"]
    command = [sys.executable, "-m", "trainium_operator.main", *container["args"], *arguments]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            line = until(lambda: find_log_message(log, "readers are served on port"), log.read_text)
            secret = json.loads(
                api.kubectl("get", "secret", f"{account}-coordinator-tls", "-n", namespace, "-o", "json")
            )
            authority = base64.b64decode(secret["data"]["ca.crt"]).decode()
            port = int(line.rpartition(" ")[2])
            yield LocalOperator(api, port, ssl.create_default_context(cadata=authority), authority, process, log)
        finally:
            process.terminate()
            process.wait(scaled(30))
    for manifest in manifests:
        if manifest["kind"].startswith("ClusterRole"):
            api.run("kubectl", "delete", manifest["kind"], manifest["metadata"]["name"], "--ignore-not-found")


def find_log_message(log: Path, text: str) -> str:
    """Return the first message of a log with this text; empty without one."""
    lines = [json.loads(line)["message"] for line in log.read_text().splitlines() if line.startswith("{")]
    return next((line for line in lines if text in line), "")
