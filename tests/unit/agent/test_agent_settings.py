"""Settings of the agent from its environment, and its early handling of SIGTERM."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.agent.pod_environment import environment
from trainium_agent.settings import Endpoint, SettingsError, parse_settings


def test_a_complete_environment_is_parsed(tmp_path: Path) -> None:
    settings = parse_settings(environment(tmp_path, TRAINIUM_COORDINATOR="[::1]:1,coordinator.svc:8443"))
    assert settings.coordinator == (Endpoint("::1", 1), Endpoint("coordinator.svc", 8443))
    assert settings.processes_per_node == 2
    assert settings.run_id == "team.job"
    assert settings.rank_entry == "trainium_trainer.cli:main"
    assert settings.token_path == Path("/var/run/secrets/trainium.dev/token")


def test_all_missing_variables_are_named_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="POD_IP, TRAINIUM_GRACE_SECONDS; the operator sets them"):
        parse_settings(environment(tmp_path, POD_IP="", TRAINIUM_GRACE_SECONDS=""))


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
        parse_settings(environment(tmp_path, **{name: value}))


PROGRAM = """
import signal, sys
def on_first_signal_handler(number, handler):
    print(number == signal.SIGTERM, sorted(name for name in sys.modules if name in SLOW))
    sys.exit()
SLOW = {"asyncio", "pydantic", "torch", "trainium_contract", "logging"}
signal.signal = on_first_signal_handler
from trainium_agent.__main__ import main
main()
"""


def test_sigterm_is_handled_before_anything_slow_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True []\n", "")
