# ruff: noqa: INP001 - a script
"""Plays drawn mutants against tests, in the project's environment: which are killed, and which survive.

Usage: python …/mutants_play.py DRAWN --results FILE [--enough SECONDS] [--again] TESTS... [ARGUMENTS OF PYTEST]
A mutant is killed by the first test that fails, by a crash, and by computing twenty times as long as its tests should.

Nothing is written into the source tree. The tests are collected once; first a copy of the process (fork) plays them and
notes which functions each one calls and what it costs, which is kept beside FILE. For a fault inside a function another
copy then exchanges that function's code and plays the tests that call it, those of the same room and the cheap ones
first. A fault outside of functions (constants, defaults), or in one that is called while modules are imported, takes a
new process, in which the mutant is imported in place of its file.
Invariants: the process that collects plays no test itself, so that no mutant sees what another left behind; a mutant
with an outcome in FILE is not played again, so an interrupted run goes on. Source files must not change meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TIMES_AS_LONG, _AT_LEAST_SECONDS = 20, 30.0
"""Processor seconds that a mutant may take, as a multiple of what its tests take without it."""
_MEMORY_BYTES = 6 * 2**30
_SURVIVED, _KILLED = 0, 1
Function = tuple[str, str, int]
"""Where a function stands: file, qualified name, first line."""


def main() -> int:
    """Play, then tell; 0 whatever survived, 2 when the tests fail without a mutant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("drawn", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--enough", type=float, default=math.inf, help="seconds of tests for a mutant, cheapest first")
    parser.add_argument("--again", action="store_true", help="play those that survived before")
    parser.add_argument("tests", nargs="+")
    arguments, rest = parser.parse_known_args()
    drawn = json.loads(arguments.drawn.read_text())
    player = _Player(drawn, arguments.results, arguments.tests, rest, arguments.enough, again=arguments.again)
    code = pytest.main([*_QUIET, *rest, *arguments.tests], plugins=[player])
    if code != 0:
        sys.stderr.write("mutants: the tests do not pass without a mutant, or not one after the other: see above\n")
        return 2
    sys.stdout.write(_told(drawn, _outcomes(arguments.results)))
    return 0


_QUIET = ("-q", "-s", "-p", "no:cacheprovider", "--no-header", "--maxfail=1")


class _Player:
    """A plugin of pytest that plays mutants where pytest would play tests."""

    def __init__(
        self, drawn: dict[str, Any], results: Path, tests: list[str], rest: list[str], enough: float, *, again: bool
    ) -> None:
        self._mutants: list[dict[str, Any]] = drawn["mutants"]
        self._results, self._tests, self._rest, self._enough = results, tests, rest, enough
        self._again = again
        self._calls: dict[str, set[Function]] = {}
        self._seconds: dict[str, float] = {}
        self._imported: set[Function] = set()
        self._failed = False
        self._files = {str(path) for path in Path(drawn["folder"]).absolute().rglob("*.py")}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        sys.settrace(_tracer(self._files, self._imported))

    def pytest_collection_finish(self) -> None:
        sys.settrace(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return True
        self._learn(session.items)
        known = {_key(outcome) for outcome in _outcomes(self._results) if outcome["killed"] or not self._again}
        for number, mutant in enumerate(self._mutants):
            if _key(mutant) in known:
                continue
            killed, by, seconds = self._play(mutant, session.items)
            outcome = {name: value for name, value in mutant.items() if name != "source"}
            outcome |= {"killed": killed, "by": by, "seconds": round(seconds, 1)}
            with self._results.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
            word = "killed" if killed else "SURVIVED"
            sys.stdout.write(f"{number + 1}/{len(self._mutants)} {word} {mutant['file']}:{mutant['line']} {by}\n")
            sys.stdout.flush()
        return True

    def _learn(self, items: list[pytest.Item]) -> None:
        """Play each test once without a mutant, in a copy of this process, unless that is known of these files."""
        notes = self._results.with_name("calls.jsonl")
        digests = self._digests({item.path for item in items})
        self._read(notes, items, digests)
        unknown = [item for item in items if item.nodeid not in self._calls]
        if unknown and _in_copy(lambda: self._note(unknown, notes, digests), math.inf)[0] != _SURVIVED:
            raise pytest.UsageError("a test fails without a mutant: play the tests by themselves to see which")
        self._read(notes, items, digests)

    def _digests(self, tests: set[Path]) -> dict[Path, str]:
        """What the calls of a file's tests follow from: all source files and the file itself."""
        source = hashlib.sha256(b"".join(Path(file).read_bytes() for file in sorted(self._files))).hexdigest()
        return {path: source[:16] + hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in tests}

    def _read(self, notes: Path, items: list[pytest.Item], digests: dict[Path, str]) -> None:
        wanted = {(digests[item.path], item.nodeid) for item in items}
        for line in notes.read_text().splitlines() if notes.exists() else ():
            digest, name, seconds, calls = json.loads(line)
            if (digest, name) in wanted:
                self._seconds[name], self._calls[name] = seconds, {(call[0], call[1], call[2]) for call in calls}

    def _note(self, items: list[pytest.Item], notes: Path, digests: dict[Path, str]) -> int:
        with notes.open("a") as file:
            for item in items:
                calls: set[Function] = set()
                begun = time.process_time()
                sys.settrace(_tracer(self._files, calls))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                sys.settrace(None)
                if self._failed:
                    return _KILLED
                said = [digests[item.path], item.nodeid, time.process_time() - begun, sorted(calls)]
                file.write(json.dumps(said) + "\n")
                file.flush()
        return _SURVIVED

    def _play(self, mutant: dict[str, Any], items: list[pytest.Item]) -> tuple[bool, str, float]:
        """Whether it was killed, by what, and after how many processor seconds."""
        path = str(Path(mutant["file"]).absolute())
        changed = _changed(_code(Path(path).read_text(), path), _code(mutant["source"], path))
        if changed is None or changed[0].co_freevars != changed[1].co_freevars or _place(changed[0]) in self._imported:
            return self._play_imported(mutant, path)
        live = [
            function
            for function in gc.get_objects()
            if isinstance(function, FunctionType) and _place(function.__code__) == _place(changed[0])
        ]
        calling = [item.nodeid for item in items if _place(changed[0]) in self._calls[item.nodeid]]
        names = self._affordable(calling, Path(path).parent.name)
        by_name = {item.nodeid: item for item in items}
        chosen = [by_name[name] for name in names]
        if not live or not chosen:
            return False, "no test calls it", 0.0

        def play(told: Path) -> int:
            for function in live:
                function.__code__ = changed[1]
            for item in chosen:
                told.write_text(item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if self._failed:
                    return _KILLED
            return _SURVIVED

        limit = max(_AT_LEAST_SECONDS, _TIMES_AS_LONG * sum(self._seconds[item.nodeid] for item in chosen))
        with NamedTemporaryFile("r") as told:
            code, seconds = _in_copy(lambda: play(Path(told.name)), limit)
            return code != _SURVIVED, told.read() if code else f"{len(chosen)} of {len(calling)} tests", seconds

    def _affordable(self, names: list[str], room: str) -> list[str]:
        """Those of the same room and the cheap ones first, for as many seconds as are enough."""
        ordered = sorted(names, key=lambda name: self._seconds[name] * (1 if f"/{room}/" in name else 3))
        spent = accumulate(self._seconds[name] for name in ordered)
        return [name for name, seconds in zip(ordered, spent, strict=True) if seconds <= self._enough]

    def _play_imported(self, mutant: dict[str, Any], path: str) -> tuple[bool, str, float]:
        room = [folder for test in self._tests if (folder := Path(test) / Path(path).parent.name).is_dir()]
        rounds = [[str(folder) for folder in room]] if room else []
        rounds.append([*self._tests, *(f"--ignore={folder}" for folder in room)])
        affordable = set(self._affordable(list(self._seconds), Path(path).parent.name))
        left = [f"--deselect={name}" for name in self._seconds if name not in affordable]
        limit = max(_AT_LEAST_SECONDS, _TIMES_AS_LONG * sum(self._seconds.values()))
        spent = _children_seconds()
        for tests in rounds:
            with NamedTemporaryFile("w", suffix=".py") as source:
                source.write(mutant["source"])
                source.flush()
                command = [sys.executable, __file__, "--import", path, source.name, *_QUIET, *self._rest, *left, *tests]
                done = subprocess.run(
                    command,
                    check=False,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=lambda: _limited(limit),  # this process has no threads
                )
            if done.returncode not in {0, pytest.ExitCode.NO_TESTS_COLLECTED}:
                by = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return (
                    True,
                    by[-1].split(" - ")[0].split()[-1] if by else f"exit {done.returncode}",
                    _children_seconds() - spent,
                )
        return False, f"{len(affordable)} of {len(self._seconds)} tests", _children_seconds() - spent


def _in_copy(play: Callable[[], int], limit: float) -> tuple[int, float]:
    """Run in a copy of this process, silently: its exit status, below 0 for a crash or a limit; processor seconds."""
    begun = _children_seconds()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = _KILLED
        with suppress(BaseException):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            _limited(limit)
            code = play()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), _children_seconds() - begun


def _limited(seconds: float) -> None:
    if seconds < math.inf:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tracer(files: set[str], calls: set[Function]) -> Callable[..., None]:
    def trace(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            calls.add(_place(frame.f_code))

    return trace


def _place(code: CodeType) -> Function:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _code(source: str, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def _changed(was: CodeType, now: CodeType) -> tuple[CodeType, CodeType] | None:
    """The function, with those inside it, in which the fault lies; None when it lies in a module or a class."""
    if _own(was) != _own(now):
        return None
    for old, new in zip(_inner(was), _inner(now), strict=True):
        if _differs(old, new):
            return (old, new) if _is_function(old) else _changed(old, new)
    return None


def _differs(was: CodeType, now: CodeType) -> bool:
    return _own(was) != _own(now) or any(_differs(old, new) for old, new in zip(_inner(was), _inner(now), strict=True))


def _own(code: CodeType) -> tuple[object, ...]:
    constants = [repr(const) for const in code.co_consts if not isinstance(const, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, len(_inner(code))


def _inner(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & 0x2)  # CO_NEWLOCALS: a class body has its names in a dict


class _Importer(importlib.abc.MetaPathFinder):
    """Imports the mutant in place of one file."""

    def __init__(self, path: str, source: str) -> None:
        self._path, self._source = path, source

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The file's own spec, with a loader that compiles the mutant."""
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is None or found.origin != self._path:
            return None
        code = _code(self._source, self._path)

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, _: str) -> CodeType:
                return code

        found.loader = Loader(name, self._path)
        return found


def _key(mutant: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(mutant[name] for name in ("file", "operator", "line", "before", "after"))


def _outcomes(results: Path) -> list[dict[str, Any]]:
    """The newest of each mutant."""
    lines = results.read_text().splitlines() if results.exists() else []
    return list({_key(outcome): outcome for outcome in map(json.loads, lines)}.values())


def _told(drawn: dict[str, Any], outcomes: list[dict[str, Any]]) -> str:
    """Survivors, rooms, and the share that is killed with its 95 % interval (Wilson)."""
    wanted = {_key(mutant) for mutant in drawn["mutants"]}
    played = [outcome for outcome in outcomes if _key(outcome) in wanted]
    rooms: defaultdict[str, Counter[bool]] = defaultdict(Counter)
    for outcome in played:
        rooms[Path(outcome["file"]).parent.name][outcome["killed"]] += 1
    lines = []
    for outcome in (each for each in played if not each["killed"]):
        lines += [f"{outcome['file']}:{outcome['line']} {outcome['operator']} ({outcome['by']})"]
        lines += [f"  - {outcome['before']}", f"  + {outcome['after']}"]
    lines += [f"{room:12} {count[True]:4} of {sum(count.values())}" for room, count in sorted(rooms.items())]
    killed, total = sum(outcome["killed"] for outcome in played), len(played)
    low, high = _wilson(killed, total)
    lines.append(
        f"killed {killed} of {total} ({killed / max(total, 1):.1%}; 95 % interval {low:.1%} to {high:.1%}), "
        f"drawn with seed {drawn['seed']} from {drawn['places']}"
    )
    return "\n".join(lines) + "\n"


def _wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    if not trials:
        return 0.0, 1.0
    share, square = successes / trials, z * z / trials
    middle, half = share + square / 2, z * math.sqrt(share * (1 - share) / trials + square / trials / 4)
    return (middle - half) / (1 + square), (middle + half) / (1 + square)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--import"]:
        sys.meta_path.insert(0, _Importer(sys.argv[2], Path(sys.argv[3]).read_text()))
        sys.exit(pytest.main(sys.argv[4:]))
    sys.exit(main())
