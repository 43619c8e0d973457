"""Lines of output that explain the exit of a program."""

import pytest

from trainium_contract.program_output import drop_noise, explains_exit, is_native_frame

TORCH = "frame #3: c10d::TCPStore::doGet(std::string const&) + 0x2a1 (0x7f12 in /venv/torch/lib/libtorch_cpu.so)"
ADVICE = "Correct the configuration, the data or the image and run the job again (kubectl trn retry)."


@pytest.mark.parametrize(
    "line",
    [
        TORCH,
        "frame #11: clone + 0x40 (0x7f12 in /lib/x86_64-linux-gnu/libc.so.6)",
        "Exception raised from recvBytes at /pytorch/Utils.hpp:682 (most recent call first):",
        "PC: @     0x7f12bd5f1a7c  (unknown)  pthread_kill",
        "    @     0x7f12bd5a1520       4896  (unknown)",
        "*** Begin stack trace ***",
        "\ttsl::CurrentStackTrace[abi:cxx11]()",
        "\t_PyObject_MakeTpCall",
        "*** End stack trace ***",
    ],
)
def test_native_frames_do_not_explain_an_exit(line: str) -> None:
    assert is_native_frame(line)
    assert not explains_exit(line)


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        '  File "/app/train.py", line 7, in main',
        "    loss.backward()",
        "RuntimeError: frame #3 of the video is broken",
        "terminate called after throwing an instance of 'c10::Error'",
        "[W1124 23:12:31 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3): Connection reset by peer",
        "\tindented by a tab",
        "nrt_execute failed with status 1202",
        "",
    ],
)
def test_lines_that_may_explain_an_exit_are_kept(line: str) -> None:
    assert explains_exit(line)


@pytest.mark.parametrize(
    "line",
    [
        "23:12:12 rank 0 INFO step 102/900: loss 5.1400, 1593 tokens/s",
        "23:11:29 rank 1 INFO start-up: data 0.11 s, process group 0.07 s, model 0.07 s, state 0.23 s, files 0.00 s",
    ],
)
def test_lines_about_healthy_steps_do_not_explain_an_exit(line: str) -> None:
    assert not explains_exit(line)
    assert not is_native_frame(line)


def test_noise_within_a_message_is_replaced_by_one_ellipsis() -> None:
    message = (
        f"Rank 3 ended: ValueError: no such column | {TORCH} | {TORCH} | File train.py | step 7/9: loss 2.1. {ADVICE}"
    )
    assert drop_noise(message) == f"Rank 3 ended: ValueError: no such column | … | File train.py | … {ADVICE}"
    assert drop_noise(f"killed by signal 9 | {TORCH}") == "killed by signal 9 | …"
    assert drop_noise(f"as it is | was. {ADVICE}") == f"as it is | was. {ADVICE}"
    assert drop_noise("") == ""
