"""The Dockerfile, read as text: its targets, arguments, sources and programs are real. Images are not built here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
TARGETS = ("operator", "trainer", "trainer-cpu")
DISTRIBUTIONS = {"operator": {"contract", "operator"}, "trainer": {"agent", "contract", "trainer_image", "worker"}}
"""Part of image_requirements.py -> the rooms that its images hold."""


KUBECONFIG = json.dumps(
    {
        "current-context": "one",
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "clusters": [{"name": "one", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "one", "user": {"token": "none"}}],
    }
)
IMPORTS = """
import asyncio, sys
import trainium_operator.main
from trainium_operator.cluster.api.transport import connect

async def met() -> None:
    await (await connect(sys.argv[1])).close()

asyncio.run(met())
print(*sys.modules)
"""
"""The operator as far as a client of a cluster, and the names of its modules."""


def instructions() -> list[tuple[str, str]]:
    """Every instruction with its arguments, comments left out and continued lines joined."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Name of each stage -> its instructions, the first its FROM."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            found[rest.rpartition(" AS ")[2]] = [(word, rest)]
        elif found:
            found[list(found)[-1]].append((word, rest))
    return found


def sources() -> list[str]:
    """Return what is copied out of the repository."""
    copies = [rest.split() for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    return [source for copy in copies for source in copy[:-1]]


def distributions_of(target: str) -> set[str]:
    """The rooms whose wheels an image installs: made in the stage that fills the one that is mounted."""
    (run,) = (rest for word, rest in stages()[target] if word == "RUN")
    mounted = re.search(r"--mount=from=([\w-]+)", run)
    assert mounted is not None
    (wheels,) = (rest for word, rest in stages()[mounted[1]] if rest.endswith("/wheels /wheels"))
    maker = wheels.split()[0].removeprefix("--from=")
    (made,) = (rest for word, rest in stages()[maker] if "pip wheel" in rest)
    known = {rest.split()[0].partition("/")[0] for word, rest in stages()[mounted[1]] if rest.endswith("/")}
    distributions = set(re.findall(r"\./(\w+)", made))
    assert distributions <= known, "their pyproject.toml says what else is needed"
    return distributions


def test_there_is_a_target_for_each_image() -> None:
    assert {*TARGETS, "agent"} <= set(stages())


def test_the_agents_image_holds_its_folder_alone_and_starts_it_as_the_operator_does() -> None:
    assert stages()["agent"][:2] == [("FROM", "scratch AS agent"), ("COPY", "--from=agent-folder /trainium /trainium")]
    entry = dict(stages()["agent"][2:])["ENTRYPOINT"]
    assert json.loads(entry) == [
        *("/trainium/lib/ld.so", "--library-path", "/trainium/lib", "/trainium/bin/python", "-I"),
        *("-m", "trainium_agent"),
    ]
    (run,) = (rest for word, rest in stages()["agent-folder"] if word == "RUN")
    assert "image_requirements.py agent " in run
    assert run.count("pip install") == run.count("--require-hashes") + run.count("wheels/*.whl") == 2


def test_a_base_is_an_argument_with_a_pinned_default() -> None:
    defaults = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    assert set(defaults) == {"PYTHON_IMAGE", "NEURON_IMAGE"}
    for image in defaults.values():
        assert re.search(r":\d+\.\d+\.\d+", image), image
    for steps in stages().values():
        base = steps[0][1].partition(" AS ")[0]
        assert base == "scratch" or base in stages() or base.strip("${}") in defaults


def test_only_the_trainer_needs_the_vendor_s_image() -> None:
    assert [name for name, steps in stages().items() if "NEURON_IMAGE" in steps[0][1]] == ["trainer"]


@pytest.mark.parametrize("source", sources())
def test_what_is_copied_is_in_the_repository_and_not_ignored(source: str) -> None:
    assert (ROOT / source).exists()
    assert "*" in IGNORED
    assert any(source == rule[1:] or source.startswith(f"{rule[1:]}/") for rule in IGNORED if rule.startswith("!"))


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_starts_a_program_of_ours_as_an_ordinary_user(target: str) -> None:
    steps = stages()[target]
    own = [
        tomllib.loads((ROOT / distribution / "pyproject.toml").read_text(encoding="utf-8"))
        for distribution in distributions_of(target)
    ]
    programs = {name for distribution in own for name in distribution["project"].get("scripts", ())}
    (entry,) = (rest for word, rest in steps if word == "ENTRYPOINT")
    assert json.loads(entry)[0] in programs
    user = [rest for word, rest in steps if word == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize("target", TARGETS)
def test_packages_are_installed_by_hash_for_a_part_that_is_known(target: str) -> None:
    (run,) = (rest for word, rest in stages()[target] if word == "RUN")
    part = re.search(r"image_requirements\.py (\w+)", run)
    assert part is not None
    assert part[1] == target.removesuffix("-cpu")
    # Our own wheels are made in an earlier stage; all else has a hash.
    assert run.count("pip install") == run.count("--require-hashes") + run.count("wheels/*.whl") == 2


def test_the_operator_imports_no_client_library_of_kubernetes(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG)
    command = [sys.executable, "-c", IMPORTS, str(kubeconfig)]
    imported = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert "trainium_contract.api_server.aio" in imported
    assert not {"kubernetes", "requests", "oauthlib"} & {name.partition(".")[0] for name in imported}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_the_contract_and_its_own_package_only(target: str) -> None:
    assert distributions_of(target) == DISTRIBUTIONS[target.removesuffix("-cpu")]


@pytest.mark.parametrize(
    "file", ["docs/install.md", "docs/job.md", "Dockerfile", "tests/testing/cluster/kind_images.py"]
)
def test_what_is_written_about_building_names_real_targets_and_arguments(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert set(re.findall(r"--target[ =]([\w-]+)", text)) <= set(stages())
    assert set(re.findall(r"--build-arg (\w+)", text)) <= {"PYTHON_IMAGE", "NEURON_IMAGE"}
