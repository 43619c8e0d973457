"""Addresses, Service names, logs and exec: how others reach a pod."""

import re
import subprocess

import pytest

from tests.testing.cluster.pod_client import PodClient, status
from tests.testing.suite.timeouts import scaled

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(240)]

SERVE = (
    "import http.server, os\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers(); self.wfile.write(os.environ['NAME'].encode())\n"
    "    def log_message(self, *_): pass\n"
    "http.server.HTTPServer((os.environ['IP'], 8080), Handler).serve_forever()\n"
)
WHO = [
    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
]
READY = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}


def service(name: str, selector: dict[str, str], **spec: object) -> dict[str, object]:
    body = {"selector": selector, "ports": [{"name": "web", "port": 8080}], **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": body}


def test_every_pod_has_its_own_address_and_serves_on_the_same_port(client: PodClient) -> None:
    group = client.name("group")
    pods = [
        client.create_pod("server", client.python(SERVE, env=WHO, readinessProbe=READY), labels={"app": group})
        for _ in range(2)
    ]
    addresses = [client.wait_ready(pod)["status"]["podIP"] for pod in pods]
    assert len(set(addresses)) == 2
    fetch = "; ".join(f"print(urllib.request.urlopen('http://{a}:8080').read().decode())" for a in addresses)
    caller = client.create_pod("client", client.python(f"import urllib.request; {fetch}"))
    assert client.output(caller).split() == pods
    for pod in pods:
        client.delete(pod, "--grace-period=1")


def test_a_headless_service_resolves_to_all_its_pods_and_each_has_a_name(client: PodClient) -> None:
    name = client.name("headless")
    client.create(service(name, {"app": name}, clusterIP="None", publishNotReadyAddresses=True))
    pods = [
        client.create_pod(
            "member",
            client.container("exec sleep 600", readinessProbe={"exec": {"command": ["false"]}}),
            labels={"app": name},
            hostname=f"host-{number}",
            subdomain=name,
        )
        for number in (1, 2)
    ]
    expected = sorted(
        client.wait(pod, lambda p: p["status"].get("podIP") and status(p)["state"].get("running"), "it ran")["status"][
            "podIP"
        ]
        for pod in pods
    )
    script = (
        "import socket, time\n"
        "def look(name):\n"
        "    try: return sorted({a[4][0] for a in socket.getaddrinfo(name, 80, socket.AF_INET)})\n"
        "    except OSError: return []\n"
        f"names = ['{name}', '{name}.{client.namespace}', '{name}.{client.namespace}.svc.cluster.local']\n"
        f"while any(len(look(n)) < 2 for n in names) or not look('host-2.{name}'): time.sleep(0.1)\n"
        "for n in names: print(*look(n))\n"
        f"print(*look('host-2.{name}'))\n"
        "print(*look(socket.gethostname()))\n"
    )
    caller = client.create_pod("resolver", client.python(script))
    lines = [line.split() for line in client.output(caller).splitlines()]
    assert [sorted(line) for line in lines[:3]] == [expected] * 3
    assert lines[3] == [client.get(pods[1])["status"]["podIP"]]
    assert lines[4] == [client.get(caller)["status"]["podIP"]]
    for pod in pods:
        client.delete(pod, "--grace-period=1")


def test_a_service_routes_to_ready_pods(client: PodClient) -> None:
    name = client.name("service")
    client.create(service(name, {"app": name}))
    script = (
        "import time, urllib.request\n"
        "seen = []\n"
        "while len(set(seen)) < 2:\n"
        "    try:\n"
        f"        found = urllib.request.urlopen('http://{name}:8080', timeout=2).read().decode()\n"
        "    except OSError:\n"
        "        found = ''\n"
        "    if found and found not in seen: print('reached', found); seen.append(found)\n"
        "    time.sleep(0.1)\n"
    )
    caller = client.create_pod("client", client.python(script))
    first = client.create_pod("server", client.python(SERVE, env=WHO, readinessProbe=READY), labels={"app": name})
    client.wait_for_log(caller, f"reached {first}")
    client.delete(first, "--grace-period=1")
    second = client.create_pod("server", client.python(SERVE, env=WHO, readinessProbe=READY), labels={"app": name})
    assert client.output(caller).split() == ["reached", first, "reached", second]
    client.delete(second, "--grace-period=1")


def test_logs_show_the_requested_lines(client: PodClient) -> None:
    script = (
        "for i in range(1, 6): print('line', i)\nimport sys; print('oops', file=sys.stderr); sys.stdout.write('no end')"
    )
    name = client.create_pod("logs", client.python(script))
    lines = client.output(name).splitlines()
    assert sorted(lines) == ["line 1", "line 2", "line 3", "line 4", "line 5", "no end", "oops"]
    assert client.logs(name, "--tail=2").splitlines() == lines[-2:]
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z line 1$", client.logs(name, "--timestamps"), re.MULTILINE)
    assert len(client.logs(name, "--limit-bytes=8")) == 8
    assert client.logs(name, "--since=1h").splitlines() == lines
    assert client.logs(name, "--since-time=2100-01-01T00:00:00Z") == ""


def test_followed_logs_end_with_the_container(client: PodClient) -> None:
    script = "echo line 1; until test -e /opt/go; do sleep 0.1; done; echo line 2"
    name = client.create_pod("follow", client.container(script))
    client.wait_for_log(name, "line 1")
    command = ["kubectl", "-n", client.namespace, "logs", "-f", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=client.environment()) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "line 1\n"  # while the container still runs
            client.kubectl("exec", name, "--", "touch", "/opt/go")
            assert process.stdout.readlines() == ["line 2\n"]
            assert process.wait(scaled(10)) == 0
        finally:
            process.kill()  # leaving waits for it


def test_exec_has_input_output_and_exit_code(client: PodClient) -> None:
    name = client.create_pod(
        "exec", client.container("echo mark > /opt/mark; exec sleep 600", env=[{"name": "X", "value": "y"}])
    )
    client.wait_ready(name)
    script = "cat /opt/mark; echo $X; ls /proc | grep -c '^[0-9]*$'; cat; echo oops >&2; exit 7"
    done = client.cluster.run(
        "kubectl", "-n", client.namespace, "exec", "-i", name, "--", "sh", "-c", script, stdin="from here\n"
    )
    output = done.stdout.splitlines()
    assert (output[0], output[1], output[-1]) == ("mark", "y", "from here")
    assert int(output[2]) < 8  # the container's own processes, not the machine's
    assert "oops" in done.stderr
    assert done.returncode == 7
    # A process inside can be ended by a signal from inside.
    client.cluster.run("kubectl", "-n", client.namespace, "exec", name, "--", "sh", "-c", "kill -9 -1")
    assert status(client.get(name))["state"].get("running")
    client.delete(name, "--grace-period=1")
