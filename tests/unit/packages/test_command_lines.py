"""The programs have one style of help and of errors."""

import subprocess
import sys

import pytest

PROGRAMS = {
    "trainium-operator": ("trainium_operator.main", 2),
    "trainium-operator check": ("trainium_operator.main", 2),
    "trainium-operator simulate": ("trainium_operator.main", 64),
    "trainium-agent": ("trainium_agent", 64),
    "trainium-devcluster": ("trainium_devcluster.cli", 1),
    "kubectl trn": ("trainium_client.commands.main", 1),
    "kubectl trn status": ("trainium_client.commands.main", 1),
    "trainium-trainer": ("trainium_trainer.cli", 64),
}
"""Module and exit code of a wrong command line, by the name that the program gives itself."""


def run(name: str, argument: str) -> subprocess.CompletedProcess[str]:
    module = PROGRAMS[name][0]
    words = name.removeprefix("kubectl ").split()[1:]
    start = [sys.executable, "-c", f"import sys, {module}; sys.exit({module}.main())"]
    if module == "trainium_agent":
        start = [sys.executable, "-m", module]
    return subprocess.run([*start, *words, argument], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wrong_command_line_is_one_sentence_that_names_the_help(name: str) -> None:
    done = run(name, "--no-such-option")
    assert done.returncode == PROGRAMS[name][1]
    prefix = "" if name == "trainium-trainer" else "error: "  # its agent prefixes the lines of a rank
    assert done.stderr.startswith(f"{prefix}No such option")
    assert done.stderr.endswith(f"; see {name} --help\n")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_has_one_form(name: str, option: str) -> None:
    done = run(name, option)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[: 1 + len(name.split())] == ["Usage:", *name.split()]
