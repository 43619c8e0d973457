"""Settings of the agent from its environment, and its checks of configuration, folders and devices."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.agent.pod_environment import environment
from trainium_agent.checks.preflight import preflight
from trainium_agent.settings import Endpoint, SettingsError, settings_from
from trainium_contract.exit_codes import ExitCode


def test_a_complete_environment_is_parsed(tmp_path: Path) -> None:
    settings = settings_from(environment(tmp_path, TRAINIUM_COORDINATOR="[::1]:1,coordinator.svc:8443"))
    assert settings.coordinator == (Endpoint("::1", 1), Endpoint("coordinator.svc", 8443))
    assert settings.processes_per_node == 2
    assert settings.run_id == "team.job"
    assert settings.rank_entry == "trainium_trainer.cli:main"
    assert settings.token_path == Path("/var/run/secrets/trainium.dev/token")


def test_all_missing_variables_are_named_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="POD_IP, TRAINIUM_GRACE_SECONDS; the operator sets them"):
        settings_from(environment(tmp_path, POD_IP="", TRAINIUM_GRACE_SECONDS=""))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("TRAINIUM_COORDINATOR", "coordinator", "must be host:port"),
        ("TRAINIUM_COORDINATOR", "coordinator:70000", "must be host:port"),
        ("TRAINIUM_PROCESSES_PER_NODE", "0", "whole number of at least 1"),
        ("TRAINIUM_PROCESSES_PER_NODE", "-2", "whole number of at least 1"),
        ("TRAINIUM_MAX_IN_PLACE_RESTARTS", "many", "whole number of at least 0"),
        ("TRAINIUM_GRACE_SECONDS", "nan", "number of seconds"),
        ("TRAINIUM_GRACE_SECONDS", "-1", "number of seconds"),
        ("TRAINIUM_MINIMUM_BANDWIDTH_GBPS", "fast", "number of Gbit/s"),
        ("TRAINIUM_RANK_ENTRY", "main", "module:function"),
        ("TRAINIUM_NEURON_DEVICES", "x", "whole number of at least 0"),
        ("TRAINIUM_BACKGROUND_SIZES", "64,many", "numbers of nodes separated by commas"),
    ],
)
def test_a_malformed_variable_is_an_error(tmp_path: Path, name: str, value: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        settings_from(environment(tmp_path, **{name: value}))


def test_a_healthy_pod_has_no_fatal_finding(tmp_path: Path) -> None:
    assert not [found for found in preflight(settings_from(environment(tmp_path))) if found.code is not None]


def test_a_missing_or_empty_configuration_is_a_user_error(tmp_path: Path) -> None:
    settings = settings_from(environment(tmp_path, TRAINIUM_CONFIG=str(tmp_path / "none.yaml")))
    (finding,) = [found for found in preflight(settings) if found.code is not None]
    assert finding.code is ExitCode.USER_ERROR
    assert "none.yaml cannot be read" in finding.sentence
    settings = settings_from(environment(tmp_path))
    settings.config_path.write_text("\n")
    (finding,) = [found for found in preflight(settings) if found.code is not None]
    assert "is empty" in finding.sentence


def test_a_memory_directory_that_cannot_be_created_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = settings_from(environment(tmp_path, TRAINIUM_MEMORY_DIR=str(tmp_path / "file" / "memory")))
    (finding,) = [found for found in preflight(settings) if found.code is not None]
    assert finding.code is ExitCode.USER_ERROR
    assert "not writable" in finding.sentence


def test_missing_devices_are_a_device_fault(tmp_path: Path) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("neuron0", "neuron1", "neuron_monitor"):
        (devices / name).touch()
    settings = settings_from(environment(tmp_path, TRAINIUM_NEURON_DEVICES="2"))
    assert not [found for found in preflight(settings, devices) if found.code is not None]
    (devices / "neuron1").unlink()
    (finding,) = [found for found in preflight(settings, devices) if found.code is not None]
    assert finding.code is ExitCode.DEVICE_FAULT
    assert "1 Neuron devices are visible" in finding.sentence


def test_an_unresolvable_coordinator_is_a_warning(tmp_path: Path) -> None:
    settings = settings_from(environment(tmp_path, TRAINIUM_COORDINATOR="no-such-host.invalid:1"))
    assert [found.code for found in preflight(settings) if "no-such-host" in found.sentence] == [None]


PROGRAM = """
import signal, sys
def first(number, handler):
    print(number == signal.SIGTERM, sorted(name for name in sys.modules if name in SLOW))
    sys.exit()
SLOW = {"asyncio", "pydantic", "torch", "trainium_contract", "logging"}
signal.signal = first
from trainium_agent.__main__ import main
main()
"""


def test_sigterm_is_handled_before_anything_slow_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True []\n", "")
