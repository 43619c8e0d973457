# ruff: noqa: INP001 - a script
"""Gather the source of the documentation site: docs/, the pages at the root, and files to which they link.

Usage, from the repository's root: python scripts/site/docs_source.py FOLDER

Pages are written for the repository, where a link may leave docs/. On the site README.md is the first page, the other
pages of the root are beside docs/, and a linked file becomes a page that shows it, so that no link leaves the site.
Only the targets of links change, not the text.
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
SHOWN = "files"
"""Folder of the site for files that are not pages."""
_LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".py": "python", ".sh": "sh", ".toml": "toml"}
_LINK = re.compile(r"(`+).+?\1|(?<!\\)\]\((?P<target>[^()\s]+)\)")
"""Matches inline code, which is skipped, or the second half of a link."""
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)")


def is_external_link(target: str) -> bool:
    """Return whether a link leads out of the repository."""
    return re.match(r"[a-z][a-z0-9+.-]*:", target) is not None


def lines_with_prose(text: str) -> list[tuple[str, bool]]:
    """Return each line with its end, and whether it is outside fenced code blocks."""
    found, fence = [], ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
            found.append((line, False))
        elif mark and mark[1].startswith(fence) and line.strip() == mark[1]:
            fence = ""
            found.append((line, False))
        else:
            found.append((line, not fence))
    return found


def links(text: str) -> list[str]:
    """Return the targets of a page's links and images, in order."""
    prose = [line for line, counts in lines_with_prose(text) if counts]
    return [match["target"] for line in prose for match in _LINK.finditer(line) if match["target"]]


def heading_anchors(text: str) -> list[str]:
    """Return the anchors of a page, as on GitHub and the site."""
    titles = [match[1] for line, counts in lines_with_prose(text) if counts and (match := re.match(r"#+ +(.+)", line))]
    return [_anchor(title) for title in titles]


def _anchor(title: str) -> str:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title.strip().rstrip("#").strip())
    return re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")


def site_path(root: Path, path: str) -> str:
    """Return the path on the site of a file or folder of the repository. Raises ValueError if it is missing."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path == DECISIONS:
        return "decisions/index.md"
    if path == DOCS or path.startswith(f"{DOCS}/"):
        return path.removeprefix(DOCS).lstrip("/") or "index.md"
    if (root / path).is_dir():
        return f"{SHOWN}/{path}/index.md"
    return f"{SHOWN}/{path}.md"


def resolve_link(root: Path, page: str, target: str) -> tuple[str, str]:
    """Return the file or folder of a link, below the root, and its anchor. Raises ValueError."""
    path, _, anchor = target.partition("#")
    found = normpath(str(PurePosixPath(page).parent / path)) if path else page
    if found.startswith("..") or not (root / found).exists():
        raise ValueError(f"{page} links to {target}, and there is no {found}")
    return found, anchor


def rewrite_links(root: Path, page: str, text: str) -> tuple[str, set[str]]:
    """Rewrite the links of a page for the site; return it and its targets outside of docs/."""
    here = PurePosixPath(site_path(root, page)).parent
    outside = set()

    def moved(match: re.Match[str]) -> str:
        target = match["target"]
        if not target or is_external_link(target) or target.startswith("#"):
            return match[0]
        found, anchor = resolve_link(root, page, target)
        if not found.startswith(f"{DOCS}/") and found not in ROOT_PAGES:
            outside.add(found)
        return f"]({relpath(site_path(root, found), str(here))}{'#' + anchor if anchor else ''})"

    return "".join(_LINK.sub(moved, line) if counts else line for line, counts in lines_with_prose(text)), outside


def render_file(root: Path, path: str) -> str:
    """Return the page that shows a file or lists a folder."""
    file = root / path
    if file.is_dir():
        names = sorted(child.name for child in file.iterdir() if child.is_file())
        return f"# {path}\n\n" + "".join(f"- [{name}]({name}.md)\n" for name in names)
    language = _LANGUAGES.get(file.suffix, "text")
    return f"# {file.name}\n\n`{path}`\n\n````{language}\n{file.read_text(encoding='utf-8')}````\n"


def render_decisions(root: Path) -> str:
    """Return the page that lists the decisions, newest first."""
    rows = []
    for file in sorted((root / DECISIONS).glob("[0-9]*.md"), reverse=True):
        title, _, status, *_ = file.read_text(encoding="utf-8").splitlines()
        rows.append(f"- [{title.lstrip('# ')}]({file.name}) ({status.removeprefix('Status: ')})\n")
    return "# Decisions\n\nThe reasons for the design: decisions, alternatives, measurements.\n\n" + "".join(rows)


def write_site(root: Path, folder: Path) -> None:
    """Write the source of the site; the previous content of the folder is removed."""
    if folder.exists():
        shutil.rmtree(folder)
    pages = [*ROOT_PAGES, *(str(file.relative_to(root)) for file in (root / DOCS).rglob("*.md"))]
    outside: set[str] = set()
    for page in pages:
        text, more = rewrite_links(root, page, (root / page).read_text(encoding="utf-8"))
        outside |= more
        _write(folder / site_path(root, page), text)
    _write(folder / "decisions/index.md", render_decisions(root))
    for path in sorted(outside):
        inside = (
            [f"{path}/{file.name}" for file in (root / path).iterdir() if file.is_file()]
            if (root / path).is_dir()
            else []
        )
        for each in (path, *inside):
            _write(folder / site_path(root, each), render_file(root, each))
    for file in (root / DOCS).rglob("*"):
        if file.is_file() and file.suffix != ".md":
            target = folder / file.relative_to(root / DOCS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


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
