"""Gather the source of the documentation site: docs/, the pages at the root, and files to which they link.

Usage, from the repository's root: python scripts/site/docs_source.py FOLDER

Pages are written for the repository, where a link may leave docs/. On the site, README.md is the first page, the other
pages of the root are beside docs/, and a linked file becomes a page that shows it, so no link leaves the site. Targets
of links and the indentation of lists change; each row of the page of fields gets an anchor.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

DOCS = "docs"
DECISIONS = f"{DOCS}/decisions"
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Name on the site of each page at the root."""
FILES = "files"
"""Folder of the site for files that are not pages."""
_LANGUAGE_BY_SUFFIX = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".py": "python", ".sh": "sh", ".toml": "toml"}
_LINK = re.compile(r"(`+).+?\1|(?<!\\)\]\((?P<target>[^()\s]+)\)")
"""Matches inline code, which is skipped, or the second half of a link."""
_ITEM = re.compile(r" *(?:[-*+]|\d+\.) +(?=\S)")
_BEHIND_PAGES = "---\nsearch:\n  boost: 0.2\n---\n\n"
"""Start of a page that a search lists after those for users: a decision, a file, the changelog."""
FIELDS_PAGE = f"{DOCS}/job-fields.md"
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)")


def is_external_link(target: str) -> bool:
    """Return whether a link leads out of the repository."""
    return re.match(r"[a-z][a-z0-9+.-]*:", target) is not None


def classify_lines(text: str) -> list[tuple[str, bool]]:
    """Return each line with its end, and whether it is outside fenced code blocks."""
    lines, fence = [], ""
    for line in text.splitlines(keepends=True):
        match = _FENCE.match(line)
        if match and not fence:
            fence = match[1]
            lines.append((line, False))
        elif match and match[1].startswith(fence) and line.strip() == match[1]:
            fence = ""
            lines.append((line, False))
        else:
            lines.append((line, not fence))
    return lines


def find_links(text: str) -> list[str]:
    """Return the targets of a page's links and images, in order."""
    prose = [line for line, is_prose in classify_lines(text) if is_prose]
    return [match["target"] for line in prose for match in _LINK.finditer(line) if match["target"]]


def find_heading_anchors(text: str) -> list[str]:
    """Return the anchors of a page, as on GitHub and the site."""
    anchors = []
    for line, is_prose in classify_lines(text):
        if is_prose and (match := re.match(r"#+ +(.+)", line)):
            title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", match[1].strip().rstrip("#").strip())
            anchors.append(re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-"))
    return anchors


def indent_lists(text: str) -> str:
    """Indent the content of list items by four spaces a level, as Python's Markdown needs and GitHub does not.

    With fewer, a block of code ends the list, and the next item has number 1 again.
    """
    lines: list[str] = []
    columns: list[int] = []
    for line, is_prose in classify_lines(text):
        indent = len(line) - len(line.lstrip(" "))
        if line.strip():
            while columns and indent < columns[-1]:
                columns.pop()
        item = _ITEM.match(line) if is_prose and indent < (columns[-1] if columns else 0) + 4 else None
        inner = line[columns[-1] if columns else 0 :] if line.strip() else "\n"
        lines.append(" " * 4 * len(columns) + inner if line.strip() else inner)
        if item:
            columns.append(len(item[0]))
    return "".join(lines)


def add_field_anchors(text: str) -> str:
    """Make the first cell of each row of the page of fields a link to itself, as `#spec.workers.replicas`."""
    section, lines = "", []
    for line in text.splitlines(keepends=True):
        section = line.removeprefix("## ").strip() if line.startswith("## ") else section
        if match := re.match(r"\| `([^`]+)` \|", line):
            anchor = f"{section}.{match[1].replace('[]', '')}"
            line = f'| <a id="{anchor}" href="#{anchor}"><code>{match[1]}</code></a> |{line[match.end() :]}'  # noqa: PLW2901 - the row
        lines.append(line)
    return "".join(lines)


def find_site_path(root: Path, path: str) -> str:
    """Return the path on the site of a file or folder of the repository."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path == DECISIONS:
        return "decisions/index.md"
    if path == DOCS or path.startswith(f"{DOCS}/"):
        return path.removeprefix(DOCS).lstrip("/") or "index.md"
    if (root / path).is_dir():
        return f"{FILES}/{path}/index.md"
    return f"{FILES}/{path}.md"


def resolve_link(root: Path, page: str, target: str) -> tuple[str, str]:
    """Return the path of a link below the root, and its anchor; raise ValueError if nothing has that path."""
    relative, _, anchor = target.partition("#")
    path = normpath(str(PurePosixPath(page).parent / relative)) if relative else page
    if path.startswith("..") or not (root / path).exists():
        raise ValueError(f"{page} links to {target}, and there is no {path}")
    return path, anchor


def rewrite_links(root: Path, page: str, text: str) -> tuple[str, set[str]]:
    """Rewrite the links of a page for the site; return its text and its targets that are not pages."""
    site_folder = str(PurePosixPath(find_site_path(root, page)).parent)
    non_page_targets = set()

    def rewrite(match: re.Match[str]) -> str:
        target = match["target"]
        if not target or is_external_link(target) or target.startswith("#"):
            return match[0]
        path, anchor = resolve_link(root, page, target)
        if not path.startswith(f"{DOCS}/") and path not in ROOT_PAGES:
            non_page_targets.add(path)
        return f"]({relpath(find_site_path(root, path), site_folder)}{'#' + anchor if anchor else ''})"

    lines = [_LINK.sub(rewrite, line) if is_prose else line for line, is_prose in classify_lines(text)]
    return "".join(lines), non_page_targets


def render_file(root: Path, path: str) -> str:
    """Return the page that shows a file or lists a folder."""
    file = root / path
    if file.is_dir():
        names = sorted(child.name for child in file.iterdir() if child.is_file())
        return f"# {path}\n\n" + "".join(f"- [{name}]({name}.md)\n" for name in names)
    language = _LANGUAGE_BY_SUFFIX.get(file.suffix, "text")
    return f"# {file.name}\n\n`{path}`\n\n````{language}\n{file.read_text(encoding='utf-8')}````\n"


def render_decisions(root: Path) -> str:
    """Return the page that lists the decisions, newest first."""
    rows = []
    for file in sorted((root / DECISIONS).glob("[0-9]*.md"), reverse=True):
        title, _, first, *_ = file.read_text(encoding="utf-8").splitlines()
        status = f" ({first.removeprefix('Status: ')})" if first.startswith("Status: ") else ""
        rows.append(f"- [{title.lstrip('# ')}]({file.name}){status}\n")
    return "# Decisions\n\nThe reasons for the design: decisions, alternatives, measurements.\n\n" + "".join(rows)


def write_site(root: Path, folder: Path) -> None:
    """Write the source of the site; remove the previous content of the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / DOCS, folder, ignore=shutil.ignore_patterns("*.md"))
    non_page_targets: set[str] = set()
    for page in (*ROOT_PAGES, *(str(file.relative_to(root)) for file in (root / DOCS).rglob("*.md"))):
        text, targets = rewrite_links(root, page, (root / page).read_text(encoding="utf-8"))
        non_page_targets |= targets
        text = indent_lists(add_field_anchors(text) if page == FIELDS_PAGE else text)
        is_behind = page.startswith(f"{DECISIONS}/") or page == "CHANGELOG.md"
        _write(folder / find_site_path(root, page), (_BEHIND_PAGES if is_behind else "") + text)
    _write(folder / "decisions/index.md", _BEHIND_PAGES + render_decisions(root))
    for path in sorted(non_page_targets):
        children = sorted((root / path).iterdir()) if (root / path).is_dir() else []
        files = [f"{path}/{child.name}" for child in children if child.is_file()]
        for shown in (path, *files):
            _write(folder / find_site_path(root, shown), _BEHIND_PAGES + render_file(root, shown))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/site/docs_source.py FOLDER")
    try:
        write_site(Path(), Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"docs: {error}")
