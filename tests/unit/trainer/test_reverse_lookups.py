"""Stop the store of torch from asking DNS for names of peers; a fake name server receives its requests."""

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
from trainium_trainer.reverse_lookups import NAMELESS, open_store, stop_reverse_lookups

port, stop = int(sys.argv[1]), sys.argv[2] == "stop"
before = len(os.listdir("/proc/self/task"))
if stop:
    stop_reverse_lookups()
libc = ctypes.CDLL(None)
libc.__res_state.restype = ctypes.c_void_p
assert libc.__res_init() == 0
state = libc.__res_state()
timeout, attempts = ctypes.c_int.from_address(state), ctypes.c_int.from_address(state + 4)
count = ctypes.c_int.from_address(state + 16)
timeout.value = attempts.value = count.value = 1
server = ctypes.cast(state + 20, ctypes.POINTER(ctypes.c_ubyte))
for index, byte in enumerate((2, 0, *port.to_bytes(2, "big"), 127, 0, 0, 1)):
    server[index] = byte
threads = len(os.listdir("/proc/self/task")) - before
pid = os.fork()
if pid == 0:
    open_store(NAMELESS)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(threads)
"""


@pytest.mark.parametrize("stop", [False, True], ids=["default", "stopped"])
def test_a_forked_process_asks_no_name_server_after_lookups_were_stopped(stop: bool) -> None:
    """The case without the stop proves that the name server receives requests."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        received = threading.Event()

        def listen() -> None:
            if server.recv(512):
                received.set()

        thread = threading.Thread(target=listen)
        thread.start()
        port = server.getsockname()[1]
        command = [sys.executable, "-c", CHILD, str(port), "stop" if stop else "go"]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
        was_asked = received.is_set()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"end", ("127.0.0.1", port))
        thread.join()
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "0\n", "")
    assert was_asked is not stop
