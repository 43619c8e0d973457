"""Commands that start Python, and the modules that a standby imports for them."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainium_agent.ranks.python_command import find_python
from trainium_agent.ranks.python_imports import ImportRecorder, ProgramImports, find_imports, read_recorded


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["python3", "-u", "train.py", "--x"], ("-u", "train.py", "--x")),
        ([sys.executable, "-m", "pack.train"], ("-m", "pack.train")),
        (["sh", "-c", "exec python3 train.py --x 'a b'"], ("train.py", "--x", "a b")),
        (["bash", "-eo", "pipefail", "-c", "cd /src\nexec python3 -m train"], ("-m", "train")),
        (["/bin/sh", "-ec", 'exec python3 train.py "$@"', "sh", "--x"], ("train.py", "$@")),
        (["sh", "-c", "python3 train.py"], None),
        (["sh", "-c", "python3 train.py | tee log"], None),
        (["sh", "-c"], None),
        (["sh", "train.sh"], None),
        (["/bin/true"], None),
        (["no-such-program"], None),
    ],
)
def test_commands_that_start_python_are_found(command: list[str], arguments: tuple[str, ...] | None) -> None:
    found = find_python(command)
    assert (None if found is None else found.arguments) == arguments


@pytest.mark.parametrize("line", [f"#!{sys.executable}", "#!/usr/bin/env python3", "#!/usr/bin/env -S python3 -u"])
def test_a_script_that_names_python_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    script = tmp_path / "launch"
    script.write_text(f"{line}\nprint(1)\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = find_python(["launch", "train.py"])
    assert found is not None
    assert found.arguments == (str(script), "train.py")
    assert Path(found.interpreter).is_absolute()


def run_command(tmp_path: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from trainium_agent.ranks.python_command import run_command; run_command(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )


SHOW = "import json, os, sys; print(json.dumps([sys.argv, os.getcwd(), os.getenv('NEW'), os.getenv('OLD')]))"


def test_a_shell_is_run_up_to_the_line_that_starts_python(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/show.py").write_text(SHOW)
    text = 'echo first; export NEW=$(echo "a b"); unset OLD; cd sub; exec python -u show.py "$NEW" "$@"'
    done = run_command(tmp_path, "sh", "-c", text, "sh", "--last", OLD="1")
    first, shown = done.stdout.splitlines()
    assert (first, done.stderr) == ("first", "")
    assert json.loads(shown) == [["show.py", "a b", "--last"], str(tmp_path / "sub"), "a b", None]


@pytest.mark.parametrize(
    ("text", "code", "output"),
    [
        ("echo x; exit 3; exec python show.py", 3, "x"),
        ("kill -9 $$; exec python show.py", 137, ""),
        ("(exec python -c 'print(1)'); exec python -c 'print(2)'", 0, "1\n2"),
        ("exec python -c 'raise SystemExit(5)'", 5, ""),
    ],
)
def test_a_shell_that_ends_otherwise_keeps_its_code_and_its_output(
    tmp_path: Path, text: str, code: int, output: str
) -> None:
    done = run_command(tmp_path, "sh", "-c", text)
    assert (done.returncode, done.stdout.strip()) == (code, output)


FAILING = """\
def train():
    try:
        {}["text"]
    except KeyError as error:
        raise RuntimeError("no column") from error
"""


@pytest.mark.parametrize("start", ["train()", "import runpy; runpy.run_path('other.py')", "for", "exit('no data')"])
@pytest.mark.parametrize("arguments", [("train.py",), ("-m", "train")])
def test_an_error_is_printed_as_a_new_interpreter_prints_it(
    tmp_path: Path, arguments: tuple[str, ...], start: str
) -> None:
    (tmp_path / "train.py").write_text(f"{FAILING}\n{start}\n")
    (tmp_path / "other.py").write_text(f"{FAILING}\ntrain()\n")
    plain = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    done = run_command(tmp_path, "python", *arguments)
    expected, shown = (each.stderr.replace(f"{tmp_path}/", "").splitlines() for each in (plain, done))
    assert (done.returncode, shown[-1]) == (1, expected[-1])
    assert "python_command.py" not in done.stderr
    if arguments[0] != "-m":  # with it, an interpreter shows its own frames
        assert shown == expected


def test_another_python_that_the_shell_chooses_is_executed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    text = ". other/bin/activate; exec python -c 'import sys; print(sys.prefix)'"
    assert run_command(tmp_path, "sh", "-c", text).stdout.strip() == str(tmp_path / "other")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "pack").mkdir()
    files = {
        "train.py": "import helper, colorsys as c, torch_xla\nfrom pack.parts import *\nimport no_such\n",
        "helper.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wave\nelse:\n    import bdb\n",
        "pack/__init__.py": "raise RuntimeError('a program is read, not executed')",
        "pack/parts.py": "from . import deep\ndef later():\n    from xml.dom import minidom\n",
        "pack/deep.py": "this is no Python",
        "pack/__main__.py": "from .parts import later\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_modules_are_read_from_the_source_of_the_program(program: Path) -> None:
    names = [module for module, _ in find_imports(["-u", "train.py"], str(program))]
    assert {"colorsys", "bdb", "xml.dom", "no_such", "torch_xla"} <= {*names}
    assert not {"helper", "pack", "pack.parts", "pack.deep", "wave"} & {*names}
    assert ("xml.dom", "minidom") in find_imports(["-m", "pack"], str(program))
    assert find_imports(["-c", "import colorsys"], str(program)) == []
    assert find_imports(["nowhere.py"], str(program)) == []


def test_modules_of_our_library_are_imported_ahead_wherever_it_is(program: Path) -> None:
    (program / "train.py").write_text("from trainium_worker.hooks.transformers import elastic\n")
    names = [module for module, _ in find_imports(["train.py"], str(program))]
    assert {"trainium_worker.hooks.transformers", "trainium_worker.hooks.elastic.run"} <= {*names}


def test_what_the_last_start_imported_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "imports"
    recorder = ImportRecorder(str(record))
    for name in ("colorsys", "bdb", "bdb", "jax", "no_such_module"):
        recorder.find_spec(name)
    assert read_recorded(str(record)) == ["colorsys", "bdb", "no_such_module"]
    for name in ("colorsys", "bdb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    program = ProgramImports(["train.py"], str(tmp_path), str(record))
    assert program.has_new
    program.import_new()
    assert {"colorsys", "bdb"} <= {*sys.modules}
    assert (program.has_new, program.suspect) == (False, "")
    recorder.find_spec("wave")
    assert program.has_new


def test_a_library_that_needs_a_device_when_it_is_imported_is_left_to_the_ranks(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    (site / "torchtitan").mkdir(parents=True)
    (site / "torchtitan" / "trainer.py").write_text("import no_device_before_the_fork\n")
    (site / "beside.py").touch()
    (tmp_path / "train.py").write_text("from torchtitan.trainer import Trainer\nimport beside\n")
    code = "import sys; from trainium_agent.ranks.python_imports import ImportRecorder, ProgramImports\n"
    code += (
        "recorder = ImportRecorder('record'); recorder.find_spec('torchtitan.tools'); recorder.find_spec('beside')\n"
    )
    code += "ProgramImports(['train.py'], '.', 'record').import_new()\n"
    code += "print(sorted({'torchtitan', 'beside'} & {*sys.modules}), open('record').read().split())"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['beside'] ['beside']\n"


def test_a_cache_that_each_rank_would_fill_again_is_filled_ahead(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "transformers"
    library.mkdir(parents=True)
    (library / "__init__.py").touch()
    (library / "conversion_mapping.py").write_text(
        "calls = []\ndef get_checkpoint_conversion_mapping(model_type):\n    calls.append(model_type); raise KeyError\n"
    )
    (tmp_path / "train.py").write_text("from transformers import conversion_mapping\n")
    code = "from trainium_agent.ranks.python_imports import ProgramImports\n"
    code += "ProgramImports(['train.py'], '.', 'record').import_new()\n"
    code += "from transformers.conversion_mapping import calls; print(calls)"
    environment = {**os.environ, "PYTHONPATH": str(library.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['']\n"


def test_a_module_that_leaves_a_thread_is_named(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = program / "site-packages"
    site.mkdir()
    code = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (site / "threaded.py").write_text(code)
    (program / "train.py").write_text("import colorsys, threaded\n")
    code = "import sys; from trainium_agent.ranks.python_imports import ProgramImports\n"
    code += "program = ProgramImports(['train.py'], sys.argv[1], 'record'); program.import_new()\n"
    code += "open('record', 'w').write('wave'); program.import_new(); print(program.suspect, 'wave' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, program],
        cwd=program,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "threaded True\n", "later passes import, too"


STOPPING = """
import atexit, gzip, sys
class Unloaded:
    def __init__(self, name): self.name = name
    def __del__(self): write(self.name)
def write(name, write=open):
    with write(name, "w") as file: file.write("x")
unloaded = Unloaded("unloaded")
atexit.register(write, "handled")
text, archive = open("text", "w"), gzip.open("archive", "wt")
text.write("x"), archive.write("x")
try:
    sys.exit(int(sys.argv[1]))
finally:
    write("finally")
"""
STOPPING_MAIN = """
import sys
from trainium_agent.ranks import rank_exit
from trainium_agent.ranks.python_command import run_command
rank_exit.register()
with rank_exit.record_exit():
    run_command(["python", "stop.py", sys.argv[1]])
"""


@pytest.mark.parametrize("code", [75, 0])
def test_a_rank_that_stops_on_request_is_not_unloaded_but_loses_nothing(tmp_path: Path, code: int) -> None:
    (tmp_path / "stop.py").write_text(STOPPING)
    command = [sys.executable, "-c", STOPPING_MAIN, str(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert all((tmp_path / name).read_text() == "x" for name in ("text", "handled", "finally"))
    assert gzip.decompress((tmp_path / "archive").read_bytes()) == b"x"
    assert (tmp_path / "unloaded").exists() is (code == 0)
