"""Torch's store does not ask DNS for names of peers: proved with a name server that counts and does not answer."""

import socket
import subprocess
import sys
import threading

import pytest

from tests.testing.suite.timeouts import scaled

CHILD = """
import ctypes, os, sys
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
import torch.distributed
from trainium_trainer.agent_workload import NAMELESS, serve_store, stop_reverse_lookups

port, stop = int(sys.argv[1]), sys.argv[2] == "stop"
before = len(os.listdir("/proc/self/task"))
if stop:
    stop_reverse_lookups()
libc = ctypes.CDLL(None)
libc.__res_state.restype = ctypes.c_void_p
assert libc.__res_init() == 0
state = libc.__res_state()
wait, tries = ctypes.c_int.from_address(state), ctypes.c_int.from_address(state + 4)
count = ctypes.c_int.from_address(state + 16)
wait.value = tries.value = count.value = 1
server = ctypes.cast(state + 20, ctypes.POINTER(ctypes.c_ubyte))
for at, byte in enumerate((2, 0, *port.to_bytes(2, "big"), 127, 0, 0, 1)):
    server[at] = byte
threads = len(os.listdir("/proc/self/task")) - before
pid = os.fork()
if pid == 0:
    serve_store(NAMELESS)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(threads)
"""


@pytest.mark.parametrize("stop", [False, True], ids=["as torch does it", "stopped"])
def test_a_process_that_is_forked_from_one_that_stopped_them_asks_no_name_server(stop: bool) -> None:
    """Without it the same process asks, so the name server counts what it should."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        asked = threading.Event()

        def listen() -> None:
            if server.recv(512):
                asked.set()

        thread = threading.Thread(target=listen)
        thread.start()
        port = server.getsockname()[1]
        command = [sys.executable, "-c", CHILD, str(port), "stop" if stop else "go"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
        was_asked = asked.is_set()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"end", ("127.0.0.1", port))
        thread.join()
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    assert was_asked is not stop
