"""The Dockerfile as text, and the requirements of its images from constraints.txt. Images are not built here."""

import importlib.util
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
"""Part of image_requirements.py -> the distributions in its images."""


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
    """Return each instruction with its arguments, without comments and with continued lines joined."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage by its name; the first is its FROM."""
    found: dict[str, list[tuple[str, str]]] = {}
    for instruction, rest in instructions():
        if instruction == "FROM":
            found[rest.rpartition(" AS ")[2]] = [(instruction, rest)]
        elif found:
            found[list(found)[-1]].append((instruction, rest))
    return found


def sources() -> list[str]:
    """Return the paths that are copied from the repository."""
    copies = [
        rest.split() for instruction, rest in instructions() if instruction == "COPY" and not rest.startswith("--from")
    ]
    return [source for copy in copies for source in copy[:-1]]


def find_installation(target: str) -> str:
    """Return the step that installs packages."""
    (run,) = (rest for instruction, rest in stages()[target] if instruction == "RUN" and "pip install" in rest)
    return run


def distributions_of(target: str) -> set[str]:
    """Return the distributions whose wheels an image installs, built in the stage that fills the mounted one."""
    run = find_installation(target)
    mounted = re.search(r"--mount=from=([\w-]+)", run)
    assert mounted is not None
    (wheels,) = (rest for instruction, rest in stages()[mounted[1]] if rest.endswith("/wheels /wheels"))
    maker = wheels.split()[0].removeprefix("--from=")
    (made,) = (rest for instruction, rest in stages()[maker] if "pip wheel" in rest)
    known = {rest.split()[0].partition("/")[0] for instruction, rest in stages()[mounted[1]] if rest.endswith("/")}
    distributions = set(re.findall(r"\./(\w+)", made))
    assert distributions <= known, "their pyproject.toml lists the other requirements"
    return distributions


def test_each_image_has_a_target() -> None:
    assert {*TARGETS, "agent"} <= set(stages())


def test_the_agent_image_has_only_its_folder_and_the_operators_command() -> None:
    assert stages()["agent"][:2] == [("FROM", "scratch AS agent"), ("COPY", "--from=agent-folder /trainium /trainium")]
    entry = dict(stages()["agent"][2:])["ENTRYPOINT"]
    assert json.loads(entry) == [
        *("/trainium/lib/ld.so", "--library-path", "/trainium/lib", "/trainium/bin/python", "-I"),
        *("-m", "trainium_agent"),
    ]
    (run,) = (rest for instruction, rest in stages()["agent-folder"] if instruction == "RUN")
    assert "image_requirements.py agent " in run
    assert run.count("pip install") == run.count("--require-hashes") + run.count("wheels/*.whl") == 2


def test_base_images_are_arguments_with_pinned_defaults() -> None:
    defaults = dict(rest.split("=", 1) for instruction, rest in instructions() if instruction == "ARG")
    assert set(defaults) == {"PYTHON_IMAGE", "NEURON_IMAGE", "TORCH_INDEX"}
    for image in (defaults["PYTHON_IMAGE"], defaults["NEURON_IMAGE"]):
        assert re.search(r":\d+\.\d+\.\d+", image), image
    for steps in stages().values():
        base = steps[0][1].partition(" AS ")[0]
        assert base == "scratch" or base in stages() or base.strip("${}") in defaults


def test_only_the_trainer_is_based_on_the_neuron_image() -> None:
    assert [name for name, steps in stages().items() if "NEURON_IMAGE" in steps[0][1]] == ["trainer"]


@pytest.mark.parametrize("source", sources())
def test_a_copied_source_exists_and_is_not_ignored(source: str) -> None:
    assert (ROOT / source).exists()
    assert "*" in IGNORED
    assert any(source == rule[1:] or source.startswith(f"{rule[1:]}/") for rule in IGNORED if rule.startswith("!"))


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_starts_our_program_as_an_unprivileged_user(target: str) -> None:
    steps = stages()[target]
    own = [
        tomllib.loads((ROOT / distribution / "pyproject.toml").read_text(encoding="utf-8"))
        for distribution in distributions_of(target)
    ]
    programs = {name for distribution in own for name in distribution["project"].get("scripts", ())}
    (entry,) = (rest for instruction, rest in steps if instruction == "ENTRYPOINT")
    assert json.loads(entry)[0] in programs
    user = [rest for instruction, rest in steps if instruction == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize("target", TARGETS)
def test_dependencies_are_installed_by_hash(target: str) -> None:
    run = find_installation(target)
    part = re.search(r"image_requirements\.py (\w+)", run)
    assert part is not None
    assert part[1] == target.removesuffix("-cpu")
    # Our own wheels are made in an earlier stage; all else has a hash.
    assert run.count("pip install") == run.count("--require-hashes") + run.count("wheels/*.whl")
    assert run.count("wheels/*.whl") == 1


def test_torch_without_cuda_has_the_version_of_the_constraints() -> None:
    def version(file: str) -> list[str]:
        return re.findall(r"^torch==([\w.]+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)

    assert version("scripts/torch_cpu.txt") == version("constraints.txt")


@pytest.mark.parametrize("target", [*TARGETS, "agent"])
def test_the_last_step_of_an_image_starts_what_it_holds_as_its_user(target: str) -> None:
    names = [instruction for instruction, _ in stages()[target]]
    assert names[-2:] == ["RUN", "ENTRYPOINT"]
    assert "USER" in names
    starts = stages()[target][-2][1]
    assert ("trainium-operator --help" if target == "operator" else "import ") in starts
    assert "||" not in starts, "a failed start ends the build"


@pytest.mark.parametrize("target", [*TARGETS, "agent"])
def test_an_image_has_the_labels_of_oci_and_the_version_of_its_packages(target: str) -> None:
    (labels,) = (rest for instruction, rest in stages()[target] if instruction == "LABEL")
    values = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', labels))
    assert set(values) == {"title", "description", "version", "licenses"}
    assert values["title"] == f"trainium-{target.removesuffix('-cpu')}"
    project = tomllib.loads((ROOT / "contract/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (values["version"], values["licenses"]) == (project["version"], project["license"])


def test_the_operator_connects_with_the_kubernetes_library_but_not_its_models(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG)
    command = [sys.executable, "-c", IMPORTS, str(kubeconfig)]
    imported = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert "kubernetes.aio.client.api_client" in imported
    assert not {"kubernetes.client.models.v1_pod", "kubernetes.aio.client.models.v1_pod"} & set(imported)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_contains_only_its_packages(target: str) -> None:
    assert distributions_of(target) == DISTRIBUTIONS[target.removesuffix("-cpu")]


@pytest.mark.parametrize(
    "file", ["docs/install.md", "docs/job.md", "Dockerfile", "tests/testing/cluster/kind_images.py"]
)
def test_pages_name_existing_targets_and_arguments(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert set(re.findall(r"--target[ =]([\w-]+)", text)) <= set(stages())
    assert set(re.findall(r"--build-arg (\w+)", text)) <= {"PYTHON_IMAGE", "NEURON_IMAGE", "TORCH_INDEX"}


ROOT = Path(__file__).parents[3]


_SPEC = importlib.util.spec_from_file_location("image_requirements", ROOT / "scripts/image_requirements.py")


assert _SPEC is not None


assert _SPEC.loader is not None


script = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(script)


TWICE = """\
Some_Thing==1.0 ; python_full_version < '3.12' \\
    --hash=sha256:aa \\
    --hash=sha256:ab
some-thing==2.0 ; python_full_version >= '3.12' \\
    --hash=sha256:ba
other==3
"""


def test_a_package_pinned_twice_by_markers_keeps_both_pins_and_hashes() -> None:
    found = script.parse_constraints(TWICE)
    assert list(found) == ["some-thing", "other"]
    assert found["some-thing"] == TWICE.rpartition("\nother")[0]
    assert script.strip_hashes(found["some-thing"]) == [
        "Some_Thing==1.0 ; python_full_version < '3.12'",
        "some-thing==2.0 ; python_full_version >= '3.12'",
    ]
    assert script.strip_hashes(found["other"]) == ["other==3"]


@pytest.mark.parametrize("part", [*script.REQUIREMENTS, "build", "dev"])
def test_each_requirement_of_a_part_is_pinned(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = [re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in script.find_part_requirements(part)]
    pinned = script.parse_constraints(Path("constraints.txt").read_text(encoding="utf-8"))
    assert {script.normalize_name(name[0]) for name in names if name} <= pinned.keys()


def test_all_pins_of_constraints_txt_are_selected() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^[A-Za-z0-9][^\\\n]*==[^\\\n]*", text, re.MULTILINE)
    blocks = script.parse_constraints(text)
    kept = [line for block in blocks.values() for line in script.strip_hashes(block)]
    assert sorted(kept) == sorted(pin.strip() for pin in pins)
    assert len(kept) > len(blocks)
    assert "".join(blocks.values()).count("--hash=") == text.count("--hash=")


def test_an_installed_torch_keeps_its_version_and_its_pinned_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {
        "torch": (
            "2.9.0",
            ["sympy>=1.13.3", 'triton==3.5.0; platform_system == "Linux"', "cuda_toolkit[nvrtc]==13.0.3"],
        ),
        "triton": ("3.5.0", []),
        "sympy": ("1.14.0", []),
    }
    for name, (found, wants) in needs.items():
        folder = tmp_path / f"{name}-{found}.dist-info"
        folder.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {found}\n"
        (folder / "METADATA").write_text(head + "".join(f"Requires-Dist: {want}\n" for want in wants))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert script.read_installed_torch() == {
        "torch": "2.9.0",
        "triton": "3.5.0",
    }  # this torch was installed without its CUDA
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").unlink()
    (tmp_path / "torch-2.9.0.dist-info").rmdir()
    assert script.read_installed_torch() == {}


def test_an_image_needs_the_dependencies_of_its_package_and_the_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert any(need.startswith("pytest>") for need in script.find_part_requirements("dev"))
    assert any(need.startswith("obstore>") for need in script.find_part_requirements("trainer"))
    assert script.find_part_requirements("build") == ["hatchling>=1.27"]
    for part in (*script.REQUIREMENTS, "dev"):
        assert any(need.startswith("pydantic>") for need in script.find_part_requirements(part))
        assert not [need for need in script.find_part_requirements(part) if need.startswith("trainium")]
    for image, foreign in (("operator", "torch"), ("operator", "peft"), ("trainer", "kopf"), ("client", "aiohttp")):
        assert not [need for need in script.find_part_requirements(image) if need.startswith(foreign)]
    assert not [
        need for need in script.find_part_requirements("trainer") if need.startswith(("tensorboard", "matplotlib"))
    ]


def test_extras_of_our_packages_are_resolved_and_a_missing_package_is_an_error() -> None:
    distributions = {
        "trainium-one": {"project": {"dependencies": ["a>=1", "trainium-two[x,y]==1"]}},
        "trainium-two": {
            "project": {"dependencies": ["b"], "optional-dependencies": {"x": ["c"], "y": ["d<2"], "z": ["e"]}}
        },
    }
    assert script.find_third_party_requirements("trainium-one==1", distributions) == {"a>=1", "b", "c", "d<2"}
    del distributions["trainium-two"]
    with pytest.raises(SystemExit, match=r"trainium-two\[x,y\]==1 requires trainium-two, but .* is not here; add it"):
        script.find_third_party_requirements("trainium-one==1", distributions)
