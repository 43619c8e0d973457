"""Container processes with real namespaces, as root and as an ordinary user."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.testing.suite.timeouts import until
from trainium_devcluster.node.processes import isolation
from trainium_devcluster.node.processes.isolation import Namespaces

PREAMBLE = """
import asyncio, json, os, signal, sys
from trainium_devcluster.node.processes import isolation, launcher
detected = isolation.detect()
isolation.enter(detected)
sock, _ = launcher.fork_launcher(detected)
from trainium_devcluster.node.processes.command import ContainerCommand, Mount
from trainium_devcluster.node.processes.launcher_client import Launcher, LaunchError

STATE = sys.argv[1]
os.makedirs(STATE + "/shm"); os.makedirs(STATE + "/vol")
open(STATE + "/vol/file", "w").write("content")

def command(script, **more):
    number = len(os.listdir(STATE))
    scratch = f"{STATE}/scratch-{number}"
    os.makedirs(scratch)
    argv = script if isinstance(script, list) else ["sh", "-c", script]
    base = {"hostname": "pod-1", "scratch": scratch, "shm": STATE + "/shm", "hidden": STATE}
    return ContainerCommand(argv, {"PATH": os.environ["PATH"]}, **{**base, **more})

async def run(launch, cmd):
    read, write = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY)
    process = launch.start(cmd, null, write, write)
    os.close(write); os.close(null)
    text = await asyncio.to_thread(lambda: os.fdopen(read).read())
    return (await process.exited).code, text, process

async def main():
    launch = Launcher(sock)
    print(json.dumps(await work(launch)), flush=True)
    launch.close()
"""


def unprivileged_command() -> list[str]:
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []


def detect_namespaces(prefix: list[str]) -> str:
    code = "from trainium_devcluster.node.processes import isolation; print(isolation.detect().namespaces)"
    done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.fixture(params=["self", "unprivileged"], scope="module")
def prefix(request: pytest.FixtureRequest) -> list[str]:
    """Command prefix of the node's user: the user of the tests, and an unprivileged user."""
    command = unprivileged_command() if request.param == "unprivileged" else []
    if request.param == "unprivileged" and not command:
        pytest.skip("the tests run as an ordinary user already")
    if not detect_namespaces(command):
        pytest.skip("this machine permits no mount namespaces to this user")
    return command


@pytest.fixture
def state(tmp_path: Path) -> Path:
    depth = 3 if tmp_path.parent.name.startswith("popen-") else 2  # pytest-xdist adds a folder
    for folder in (tmp_path, *tmp_path.parents[:depth]):
        folder.chmod(0o755)
    tmp_path.chmod(0o777)
    return tmp_path / "state"


def run_in_node(prefix: list[str], state: Path, work: str) -> Any:
    """Run the coroutine `work(launch)` in a node process and return its result."""
    script = PREAMBLE + textwrap.dedent(work) + "\nasyncio.run(main())\n"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", script, str(state)], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_container_has_its_volumes_and_writes_nothing_to_the_host(prefix: list[str], state: Path) -> None:
    code, text = run_in_node(
        prefix,
        state,
        """
        async def work(launch):
            script = '''echo $$; hostname; cat /etc/trainium/file /made/up/path /var/run/sub/file; echo
            echo x > /etc/trainium-was-here; echo y > /trainium-top; cat /etc/trainium-was-here; ls STATE | wc -l
            touch /ro/x 2>&1 | grep -o "Read-only"; ls /etc/passwd; ls /dev/shm | wc -l; cat /proc/1/comm'''
            mounts = (Mount(STATE + "/vol", "/etc/trainium"), Mount(STATE + "/vol/file", "/made/up/path"),
                      Mount(STATE + "/vol", "/var/run/sub"), Mount(STATE + "/vol", "/ro", True))
            return (await run(launch, command(script.replace("STATE", STATE), mounts=mounts)))[:2]
        """,
    )
    assert (code, text.split()) == (
        0,
        ["1", "pod-1", "contentcontentcontent", "x", "0", "Read-only", "/etc/passwd", "0", "sh"],
    )
    for path in ("/etc/trainium", "/etc/trainium-was-here", "/trainium-top", "/made", "/ro"):
        assert not Path(path).exists()


def test_a_failed_start_reports_its_stage_and_reason(prefix: list[str], state: Path) -> None:
    failures = run_in_node(
        prefix,
        state,
        """
        async def work(launch):
            answers = []
            for cmd in (command(["no-such-program"]), command("true", mounts=(Mount("/no/where", "/x"),))):
                code, _, process = await run(launch, cmd)
                try:
                    await process.running
                except LaunchError as error:
                    answers.append([code, error.stage, str(error)])
            return answers
        """,
    )
    assert failures[0][:2] == [128, "exec"]
    assert "not found in $PATH: no-such-program" in failures[0][2]
    assert failures[1][1] == "file system"
    assert "/no/where" in failures[1][2]


def test_pid_1_ignores_sigterm_and_its_children_end_with_it(prefix: list[str], state: Path) -> None:
    ignored, (code, output), *ended = run_in_node(
        prefix,
        state,
        """
        async def work(launch):
            null = os.open("/dev/null", os.O_RDWR)
            process = launch.start(command("setsid sleep 765432 & exec sleep 765432"), null, null, null)
            await process.running
            process.signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            ignored = not process.exited.done()
            inside = await run(launch, command("hostname; ls /proc | grep -c '^[0-9]*$'", join=process.pid))
            process.signal(signal.SIGKILL)
            ended = await process.exited
            return [ignored, inside[:2], ended.code, ended.signal]
        """,
    )
    hostname, process_count = output.splitlines()
    assert (ignored, code, hostname, ended) == (True, 0, "pod-1", [137, 9])
    assert int(process_count) <= 6
    assert find_sleeping("765432") == []


def find_sleeping(seconds: str) -> list[int]:
    """Return the pids of the processes that sleep for so many seconds."""
    return [
        process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", seconds]
    ]


def test_processes_of_containers_end_with_a_killed_node(prefix: list[str], state: Path) -> None:
    node_script = """
        async def work(launch):
            null = os.open("/dev/null", os.O_RDWR)
            await launch.start(command("setsid sleep 876543 & exec sleep 876543"), null, null, null).running
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(AssertionError):
        run_in_node(prefix, state, node_script)
    until(lambda: not find_sleeping("876543"), "the processes have ended", pause=0.02)


def test_isolation_is_probed_without_changing_this_process() -> None:
    before = Path("/proc/self/ns/mnt").readlink()
    detected = isolation.detect()
    assert Path("/proc/self/ns/mnt").readlink() == before
    if os.geteuid() != 0:
        assert detected.namespaces is not Namespaces.ROOT
