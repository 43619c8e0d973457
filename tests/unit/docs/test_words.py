"""Names, docstrings, comments, messages and pages use standard words: `private_words.toml` lists the others."""

import ast
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
LIST = tomllib.loads((Path(__file__).parent / "private_words.toml").read_text(encoding="utf-8"))
NO_FIRST_WORDS = ("What", "How", "Of", "As", "Who", "Until", "Whether")
MOST_CELL_WORDS = 15
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_MESSAGE_KEYWORDS = {"help", "message", "reason", "description", "title", "detail", "epilog"}


class Text(NamedTuple):
    """A text and its place."""

    line: int
    kind: str
    text: str


@cache
def list_tracked_files(*patterns: str) -> tuple[str, ...]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(sorted(path for path in set(listed) if (ROOT / path).exists()))


def matches(path: str, pattern: str) -> bool:
    """Return whether a glob of the list matches; `*` stays within a folder, `**` does not."""
    if pattern.endswith("**"):
        return path.startswith(pattern.removesuffix("**"))
    return fnmatch.fnmatch(path, pattern) and path.count("/") == pattern.count("/")


@cache
def word_pattern(*sections: str) -> re.Pattern[str]:
    words = [word.replace("_", " ") for section in sections for key in LIST[section] for word in key.split()]
    return re.compile(rf"\b(?:{'|'.join(sorted(words, key=len, reverse=True))})\b")


def replacement(word: str) -> str:
    for section in ("everywhere", "names", "pages"):
        for key, use in LIST[section].items():
            if word.replace(" ", "_") in key.split():
                return str(use)
    raise KeyError(word)


def private_words(path: str, text: str, *sections: str) -> list[str]:
    """Return the private words in a text, without phrases that an exception allows in this file."""
    plain = re.sub(r"\s+", " ", text).lower()
    pattern = word_pattern(*sections)
    if not pattern.search(plain):
        return []
    for exception in LIST["exceptions"]:
        if any(matches(path, item) for item in exception["paths"].split()):
            phrases = "|".join(phrase.replace("_", " ") for phrase in exception["phrase"].split())
            plain = re.sub(rf"\b(?:{phrases})\b", "-", plain)
    return pattern.findall(plain)


def name_parts(name: str) -> str:
    return " ".join(part.lower() for part in _PART.findall(name))


@cache
def may_be_private(name: str) -> bool:
    """Return whether a name has a private word in some file; most names are those of many files."""
    return word_pattern("everywhere", "names").search(name_parts(name)) is not None


def without_code(text: str) -> str:
    """Return prose without inline code, link targets and URLs."""
    return re.sub(r"``.+?``|`[^`]*`|(?<=\]\()[^)]*|https?://\S+", "", text, flags=re.DOTALL)


def defined_names(nodes: Iterable[ast.AST]) -> Iterator[Text]:
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield Text(node.lineno, "name", node.name)
            case ast.arg():
                yield Text(node.lineno, "name", node.arg)
            case ast.Name(ctx=ast.Store()):
                yield Text(node.lineno, "name", node.id)
            case ast.Attribute(ctx=ast.Store()):
                yield Text(node.lineno, "name", node.attr)
            case _:
                pass


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[Text]:
    """Yield docstrings of modules, classes and functions, and strings below a constant or field."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(node.lineno, "docstring", node.value.value)


def comments(source: str) -> Iterator[Text]:
    """Comments of a file; none where nothing behind a `#` is a private word, since tokens take most of the time."""
    behind = (re.sub(r"\s+", " ", line.partition("#")[2]).lower() for line in source.splitlines() if "#" in line)
    if not any(map(word_pattern("everywhere").search, behind)):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], "comment", token.string)


def literal(node: ast.AST) -> str:
    return " ".join(
        item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)
    )


def messages(nodes: Iterable[ast.AST]) -> Iterator[Text]:
    """Yield texts of log calls, raised errors and help."""
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield Text(node.lineno, "error", " ".join(literal(argument) for argument in node.exc.args))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _LOG_METHODS and node.args:
                yield Text(node.lineno, "log message", literal(node.args[0]))
            for keyword in node.keywords:
                if keyword.arg in _MESSAGE_KEYWORDS and isinstance(keyword.value, (ast.Constant, ast.JoinedStr)):
                    yield Text(node.lineno, keyword.arg, literal(keyword.value))


def find_words_in_code(path: str, source: str) -> list[str]:
    """Return the private words in a Python file, with places and words to use."""
    nodes = [*ast.walk(ast.parse(source))]
    names = [Text(1, "file name", Path(path).stem), *defined_names(nodes)]
    prose = [*docstrings(nodes), *comments(source), *messages(nodes)]
    found = {
        (alias.line, alias.kind, word)
        for alias in names
        if may_be_private(alias.text)
        for word in private_words(path, name_parts(alias.text), "everywhere", "names")
    }
    found |= {
        (item.line, item.kind, word)
        for item in prose
        for word in private_words(path, without_code(item.text), "everywhere")
    }
    return [
        f"{path}:{line}: {kind} has `{word}`; use {replacement(word)}" for line, kind, word in sorted(found)
    ] + first_lines(path, nodes)


def first_lines(path: str, nodes: Iterable[ast.AST]) -> list[str]:
    """Return the docstrings that do not begin with a verb or a noun."""
    found = []
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            first = (text.split() or [""])[0].rstrip(",:")
            if first not in NO_FIRST_WORDS:
                continue
            is_property = any("property" in ast.unparse(item) for item in getattr(node, "decorator_list", ()))
            if not (is_property and first == "Whether"):
                line = getattr(node, "lineno", 1)
                found.append(f"{path}:{line}: docstring begins with `{first}`; begin with a verb and its object")
    return found


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of code and comments."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r" *(```+|~~~+)", line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        elif not fence and not line.startswith(("    ", "<!--")):
            yield number, line


def find_words_in_page(path: str, text: str) -> list[str]:
    found = []
    lines = dict(prose_lines(text))
    paragraph: list[int] = []
    for number in [*lines, 0]:
        if number and lines[number].strip() and not lines[number].startswith(("|", "- ", "#")):
            paragraph.append(number)
            continue
        for block in (paragraph, [number] if number else []):
            words = private_words(
                path, without_code(" ".join(lines[number] for number in block)), "everywhere", "pages"
            )
            found += [f"{path}:{block[0]}: `{word}`; use {replacement(word)}" for word in words]
        paragraph = []
    return found


def long_cells(path: str, text: str) -> list[str]:
    """Return the table cells with more than MOST_CELL_WORDS words."""
    return [
        f"{path}:{number}: a cell of {len(cell.split())} words: {cell.strip()[:60]}"
        for number, line in prose_lines(text)
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", re.sub(r"(?<=\]\()[^)]*", "", line))
        if len(cell.split()) > MOST_CELL_WORDS
    ]


def findings(find: Callable[[str, str], list[str]], paths: Iterable[str]) -> list[str]:
    """Return what `find(path, content)` finds in these files."""
    return [finding for path in paths for finding in find(path, (ROOT / path).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("folder", sorted({path.partition("/")[0] for path in list_tracked_files("*.py")}))
def test_code_uses_standard_words(folder: str) -> None:
    assert findings(find_words_in_code, list_tracked_files(f"{folder}/*.py")) == []


def test_pages_use_standard_words() -> None:
    assert findings(find_words_in_page, list_tracked_files("*.md")) == []


def test_table_cells_are_short() -> None:
    assert (
        findings(long_cells, (path for path in list_tracked_files("*.md") if path not in LIST["reference_pages"])) == []
    )


@pytest.mark.parametrize("exception", LIST["exceptions"], ids=lambda each: each["phrase"])
def test_an_exception_names_files_and_a_reason(exception: dict[str, Any]) -> None:
    assert exception["reason"]
    for pattern in exception["paths"].split():
        assert any(matches(path, pattern) for path in list_tracked_files("*.py", "*.md")), f"{pattern} names no file"


SAMPLE = '''"""What a job needs."""

class Told:
    """Tell a caller."""

def take_down_pods(guest: str) -> None:
    """Return `told`."""
    lookUp = 1  # taken down later
    logger.info("begun %s", guest)
    raise ValueError(f"in vain: {lookUp}")

def look_up(gone_by: int) -> str:
    """Whether a word of the wire arrives
    anew."""
'''


def test_private_words_are_found_in_names_docstrings_comments_and_messages() -> None:
    assert [item.partition(";")[0] for item in find_words_in_code("a.py", SAMPLE)] == [
        "a.py:3: name has `told`",
        "a.py:4: docstring has `tell`",
        "a.py:6: name has `guest`",
        "a.py:6: name has `take down`",
        "a.py:8: comment has `taken down`",
        "a.py:9: log message has `begun`",
        "a.py:10: error has `in vain`",
        "a.py:12: name has `gone`",
        "a.py:13: docstring has `anew`",
        "a.py:13: docstring has `word of`",
        "a.py:1: docstring begins with `What`",
        "a.py:12: docstring begins with `Whether`",
    ]


def test_private_words_are_found_in_the_prose_of_a_page_only() -> None:
    page = "# Told\n\nIt is `told` to [you](told.md), taken\ndown.\n\n```\ntold\n```\n\n    told\n\n| a | anew |\n"
    assert [item.partition(";")[0] for item in find_words_in_page("a.md", page)] == [
        "a.md:1: `told`", "a.md:3: `taken down`", "a.md:12: `anew`",
    ]  # fmt: skip


def test_a_cell_with_a_paragraph_is_found() -> None:
    cell = " ".join(["word"] * 16)
    assert long_cells("a.md", f"| a | {cell} |\n") == [f"a.md:1: a cell of 16 words: {cell[:60]}"]
    assert long_cells("a.md", "| a | [b](c d e f g h i j k l m n o p q r) |\n") == []


if __name__ == "__main__":
    listed = list_tracked_files(*sys.argv[1:])
    code, pages = ([path for path in listed if path.endswith(ending)] for ending in (".py", ".md"))
    sys.stdout.writelines(
        f"{finding}\n" for finding in findings(find_words_in_code, code) + findings(find_words_in_page, pages)
    )
