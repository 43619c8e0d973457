"""Pages of the documentation: navigation, links, decision records, and the files that they name."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainium_devcluster.binaries.cache import find_cache_root

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("docs_source", ROOT / "scripts/site/docs_source.py")
assert _SPEC is not None
assert _SPEC.loader is not None
source = importlib.util.module_from_spec(_SPEC)
sys.modules.setdefault("docs_source", source)
_SPEC.loader.exec_module(source)

PAGES = sorted([*source.ROOT_PAGES, *(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md"))])
LISTED = "docs/decisions/"
"""Pages that a page of the site lists by itself."""


class _Loader(yaml.SafeLoader):
    """A loader that ignores the Python functions named in mkdocs.yml."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def _in_navigation(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for child in (entry if isinstance(entry, list) else entry.values()) for page in _in_navigation(child)]


NAVIGATION = _in_navigation(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)["nav"])


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_once() -> None:
    expected = {source.find_site_path(ROOT, page) for page in PAGES if not page.startswith(LISTED)} | {
        "decisions/index.md"
    }
    assert sorted(NAVIGATION) == sorted(expected), "mkdocs.yml: `nav` and docs/ differ"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_an_existing_file_and_heading(page: str) -> None:
    for target in source.find_links(read(page)):
        if source.is_external_link(target):
            continue
        found, anchor = source.resolve_link(ROOT, page, target)
        if anchor:
            assert found.endswith(".md"), f"{target}: only pages have anchors"
            anchors = source.find_heading_anchors(read(found))
            assert anchors.count(anchor) == 1, f"{target}: {anchors.count(anchor)} headings of {found} have that anchor"


@pytest.mark.parametrize("page", PAGES)
def test_a_list_has_an_empty_line_before_it(page: str) -> None:
    before = ""
    for line, is_prose in source.classify_lines(read(page)):
        if is_prose and re.match(r"([-*]|1\.) ", line):
            within = before.startswith((" ", "- ", "* ")) or re.match(r"\d+\. ", before)
            assert within or not before.strip(), f"the site would not show a list: {line.strip()}"
        before = line


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_conflict_markers(page: str) -> None:
    assert not re.search(r"^(<{7}|>{7}|={7})( |$)", read(page), re.MULTILINE)


def test_named_tests_exist() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    names = {file.name for file in files}
    names |= {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))}
    named = {name for page in PAGES for name in re.findall(r"`(?:[\w/]*/)?(test_\w+(?:\.py)?)`", read(page))}
    assert sorted(named - names) == []


def test_links_are_rewritten_for_the_site() -> None:
    text = "[a](../CONTRIBUTING.md#style) [b](../manifests/examples) `[c](x)` [d](decisions/)\n```\n[e](y)\n```\n"
    moved, non_page_targets = source.rewrite_links(ROOT, "docs/job.md", text)
    assert moved == (
        "[a](contributing.md#style) [b](files/manifests/examples/index.md) `[c](x)` [d](decisions/index.md)\n"
        "```\n[e](y)\n```\n"
    )
    assert non_page_targets == {"manifests/examples"}


def test_a_broken_link_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"docs/job\.md links to nowhere\.md, and there is no docs/nowhere\.md"):
        source.rewrite_links(ROOT, "docs/job.md", "[a](nowhere.md)")


def test_anchors_are_those_of_github() -> None:
    assert source.find_heading_anchors("# A `b` *c*: d, e_f\n```\n# no\n```\n## [x](y) & z\n") == [
        "a-b-c-d-e_f",
        "x--z",
    ]


def test_lists_are_indented_as_the_site_needs_it() -> None:
    text = "1. one\n   more\n\n   ```sh\n   - run\n     it\n   ```\n\n2. two\n   - inner\n     text\n10. ten\n\nend\n"
    assert source.indent_lists(text) == (
        "1. one\n    more\n\n    ```sh\n    - run\n      it\n    ```\n\n"
        "2. two\n    - inner\n        text\n10. ten\n\nend\n"
    )
    plain = "text\n\n    - an output\n\n- item\n"
    assert source.indent_lists(plain) == plain


def test_each_field_of_a_job_has_an_anchor_on_the_site(tmp_path: Path) -> None:
    source.write_site(ROOT, tmp_path / "site")
    page = (tmp_path / "site/job-fields.md").read_text(encoding="utf-8")
    anchors = re.findall(r'<a id="([^"]+)"', page)
    assert (
        len(anchors) == len(set(anchors)) == len(re.findall(r"^\| `", read("docs/job-fields.md"), re.MULTILINE)) > 400
    )
    assert {"spec.trainer.model.weights", "status.history.cause"} <= set(anchors)


def test_the_navigation_has_no_title_twice() -> None:
    titles = re.findall(
        r"^ +- \"?([^\":]+)\"?: \S+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    words = [title.lower().removeprefix("run ") for title in titles]
    assert len(words) == len(set(words)) > 40


def test_a_search_lists_decisions_and_files_after_pages(tmp_path: Path) -> None:
    source.write_site(ROOT, tmp_path / "site")
    behind = {
        path.relative_to(tmp_path / "site").parts[0]
        for path in (tmp_path / "site").rglob("*.md")
        if "boost: 0.2" in path.read_text()[:40]
    }
    assert behind == {"decisions", "files", "changelog.md"}


def test_all_pages_are_gathered(tmp_path: Path) -> None:
    source.write_site(ROOT, tmp_path / "site")
    assert (tmp_path / "site/index.md").read_text().startswith("# trainium-operator")
    assert "[0012: " in (tmp_path / "site/decisions/index.md").read_text()
    assert "```yaml" in (tmp_path / "site/files/manifests/install.yaml.md").read_text()


RECORDS = sorted((Path(__file__).parents[3] / "docs/decisions").glob("*.md"))


PARTS = ["Context", "Options", "Decision", "Consequences", "Evidence"]


def test_decisions_have_distinct_numbers() -> None:
    assert len({path.name[:4] for path in RECORDS}) == len(RECORDS)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_decision_has_its_title_and_parts_in_order(path: Path) -> None:
    """A decision without a status is accepted."""
    text = path.read_text(encoding="utf-8")
    title, _, first, *_ = text.splitlines()
    assert title.startswith(f"# {path.name[:4]}: ")
    assert re.match(r"Status: proposed\b|\*\*Context\.\*\*", first)
    assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == PARTS


ROOT = Path(__file__).parents[3]


ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


BASES = [
    "", "agent/trainium_agent/", "client/trainium_client/", "contract/trainium_contract/",
    "operator/trainium_operator/",
    "operator/trainium_operator/cluster/", "operator/trainium_operator/plan/", "tests/testing/",
    "trainer_image/trainium_trainer/", "worker/", "worker/trainium_worker/",
    "trainer_image/trainium_trainer/backends/", "trainer_image/trainium_trainer/backends/nxd/",
    "trainer_image/trainium_trainer/checkpoint/", "trainer_image/trainium_trainer/data/",
]  # fmt: skip


FILES = set(
    subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()
)  # fmt: skip


FOLDERS = {str(parent) for path in FILES for parent in Path(path).parents}


NAMES = {Path(path).name for path in FILES}


def named_paths() -> list[str]:
    """Return the names of files and folders in the tables of the architecture page."""
    cells = " ".join(line for line in ARCHITECTURE.splitlines() if line.startswith("|"))
    return sorted(set(re.findall(r"`([\w./-]+(?:\.py|\.txt|/[\w/]*))`", cells)))


@pytest.mark.parametrize("name", named_paths())
def test_a_file_or_package_of_the_architecture_page_exists(name: str) -> None:
    path = name.rstrip("/")
    found = any(f"{base}{path}" in FILES | FOLDERS for base in BASES)
    assert found or ("/" not in path and path in NAMES), f"docs/architecture.md names {name}, which does not exist"


def test_every_package_states_its_subject_in_its_docstring() -> None:
    packages = [path for path in FILES if path.endswith("/__init__.py") and not path.startswith(("tests/", "scripts/"))]
    assert [path for path in packages if not ast.get_docstring(ast.parse(read(path)))] == []


MERMAID = sorted(find_cache_root().glob("docs-scripts/mermaid-*.js"))


@pytest.mark.skipif(not MERMAID or not shutil.which("node"), reason="needs node and what `make docs` downloads")
def test_a_diagram_with_a_syntax_error_is_found_without_a_browser(tmp_path: Path) -> None:
    def check(*pages: Path) -> subprocess.CompletedProcess[str]:
        command = ["node", ROOT / "scripts/site/check_diagrams.mjs", MERMAID[-1], *pages]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```mermaid\nsequenceDiagram\n    A->>B: one; two\n```\n")
    assert check(page).returncode == 1
    assert f"{page}:3: mermaid cannot parse this diagram" in check(page).stderr
    found = check(*(ROOT / "docs").rglob("*.md"))
    assert (found.returncode, found.stderr) == (0, "")
