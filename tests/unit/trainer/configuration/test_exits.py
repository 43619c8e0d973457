"""Map exceptions to exit codes and messages."""

import errno
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.log_line import EXIT_LOGGER, read_log_line
from trainium_contract.worker_process import log_lines
from trainium_trainer import exits


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (exits.UserError("x"), ExitCode.USER_ERROR),
        (exits.NumericalError("x"), ExitCode.NUMERICAL),
        (exits.PeerLostError("x"), ExitCode.PEER_LOST),
        (exits.StorageError("x"), ExitCode.STORAGE_UNAVAILABLE),
        (ModuleNotFoundError("No module named 'flash'"), ExitCode.USER_ERROR),
        (MemoryError(), ExitCode.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 66),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4"), 76),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), 76),
        (dist.DistBackendError("NCCL communicator was aborted"), ExitCode.PEER_LOST),
        (dist.DistStoreError("wait timeout after 300000ms"), ExitCode.PEER_LOST),
        (ConnectionResetError(), ExitCode.PEER_LOST),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), ExitCode.USER_ERROR),
        (OSError(errno.ENOSPC, "No space left on device"), ExitCode.STORAGE_UNAVAILABLE),
        (OSError(errno.EIO, "Input/output error"), ExitCode.STORAGE_UNAVAILABLE),
        (KeyboardInterrupt(), 130),
        (SystemExit(3), 3),
        (ZeroDivisionError(), 1),
        (RuntimeError("something else"), 1),
    ],
)
def test_every_exception_has_its_code(error: BaseException, code: int) -> None:
    assert exits.find_exit_code(error) == code


def test_the_message_is_the_last_line_of_stderr_and_the_termination_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setattr(log_lines, "TERMINATION_LOG", log)
    assert exits.report(exits.UserError("steps is 0: use more")) == 64
    assert capsys.readouterr().err == "steps is 0: use more\n"
    assert log.read_text() == "steps is 0: use more\n"


def test_an_error_in_json_has_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TRAINIUM_LOG_FORMAT": "json", "TRAINIUM_JOB": "llama", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyError) as failure:
        raise KeyError("missing")
    assert exits.report(failure.value) == 1
    (text,) = capsys.readouterr().err.splitlines()
    line = read_log_line(text)
    assert (line.message, line.level, line.logger, line.rank) == ("KeyError: 'missing'", "error", EXIT_LOGGER, 3)
    assert line.error.startswith("Traceback")
    assert exits.report(exits.UserError("steps is 0")) == 64
    line = read_log_line(capsys.readouterr().err.strip())
    assert (line.message, line.error) == ("steps is 0", None), "a complete message needs no traceback"


def test_an_unknown_log_format_is_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINIUM_LOG_FORMAT", "xml")
    exits.report(exits.UserError("steps is 0"))
    assert capsys.readouterr().err == "steps is 0\n"


def test_ranks_that_end_because_of_a_failed_peer_report_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.report(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")) == 76
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lost another rank (RuntimeError: ")


def test_an_unexpected_error_shows_its_traceback_before_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError) as failure:
        raise KeyError("missing")
    assert exits.report(failure.value) == 1
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.splitlines()[-1] == "KeyError: 'missing'"
