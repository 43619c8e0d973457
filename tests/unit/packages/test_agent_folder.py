"""The agent's folder, which runs in an image that has nothing else."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "annotated_types",
    "pydantic",
    "pydantic_core",
    "typing_inspection",
    "trainium_agent",
    "trainium_contract",
    "trainium_worker",
)


def find_module_file(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


PLATFORM_PYTHON = "/usr/bin/python3"
"""On Debian and Ubuntu it searches dist-packages instead of site-packages."""


def has_version_of_the_tests(python: str) -> bool:
    """Return whether compiled packages of the tests work with this interpreter."""
    command = [python, "-c", "import sys; print(sys.implementation.cache_tag)"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() == sys.implementation.cache_tag
    return False


@pytest.fixture(scope="module", params=[sys.executable, PLATFORM_PYTHON], ids=["tests", "platform"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root folder with `trainium`, made of one interpreter, and nothing else."""
    if not has_version_of_the_tests(request.param):
        pytest.skip(f"{request.param} is not the Python version of the tests")
    site, root = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("image")
    for name in PACKAGES:
        shutil.copytree(find_module_file(name).parent, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(find_module_file("typing_extensions"), site)
    script = ROOT / "scripts/agent_folder.py"
    subprocess.run([request.param, str(script), str(root / "trainium"), str(site)], check=True)
    return root


def command(root: str, *arguments: str) -> list[str]:
    start = (f"{root}/lib/ld.so", "--library-path", f"{root}/lib", f"{root}/bin/python", "-I")
    return [*start, *arguments]


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_the_agent_starts_in_an_image_without_shell_python_or_libc(image: Path) -> None:
    done = subprocess.run(
        ["chroot", str(image), *command("/trainium", "-m", "trainium_agent")],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64, done.stderr
    assert "lacks the environment variables TRAINIUM_COORDINATOR" in done.stderr


def test_a_moved_folder_imports_only_its_own_modules(image: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(image / "trainium", moved)
    code = (
        "import sys, trainium_agent.bootstrap, trainium_agent.supervisor\n"
        "print(sys.prefix, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmRSS')))\n"
        "print(*sorted({m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)}), sep='\\n')\n"
    )
    done = subprocess.run(command(str(moved), "-c", code), env={}, capture_output=True, text=True, check=True)
    first, kilobytes, *files = done.stdout.splitlines()
    assert first == f"{moved} False False"
    assert int(kilobytes) < 44 << 10, "it is in the memory of every worker"
    assert [file for file in files if not file.startswith(f"{moved}/")] == []
    sources = [file for file in files if file.endswith(".py")]
    assert len(sources) > 100
    kept = {path.name for path in moved.rglob("trainium_contract/*")}
    assert "wire" in kept
    assert not {"api_server", "definition", "pages", "views"} & kept, "the agent has neither pages nor a client"
    assert [file for file in sources if not Path(importlib.util.cache_from_source(file)).exists()] == []


def test_the_worker_library_has_its_own_folder(image: Path) -> None:
    assert [path.name for path in (image / "trainium/site").iterdir()] == ["trainium_worker"]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    script = ROOT / "scripts/agent_folder.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "exists already" in done.stderr
