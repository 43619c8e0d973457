"""Every page has a place on the site, and every link leads somewhere, in the repository and on the site."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    """mkdocs.yml names Python functions, which are none of this test's business."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def _in_navigation(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry if isinstance(entry, list) else entry.values()) for page in _in_navigation(each)]


NAVIGATION = _in_navigation(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)["nav"])


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    wanted = {source.place(ROOT, page) for page in PAGES if not page.startswith(LISTED)} | {"decisions/index.md"}
    assert sorted(NAVIGATION) == sorted(wanted), "mkdocs.yml: `nav` and docs/ differ"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_to_a_heading_that_are_there(page: str) -> None:
    for target in source.links(read(page)):
        if source.is_elsewhere(target):
            continue
        found, anchor = source.resolved(ROOT, page, target)
        if anchor:
            assert found.endswith(".md"), f"{target}: only pages have anchors"
            anchors = source.headings(read(found))
            assert anchors.count(anchor) == 1, f"{target}: {anchors.count(anchor)} headings of {found} have that anchor"


@pytest.mark.parametrize("page", PAGES)
def test_a_list_after_a_line_of_text_has_an_empty_line_before_it(page: str) -> None:
    before = ""
    for line, prose in source.lines_with_prose(read(page)):
        if prose and re.match(r"([-*]|1\.) ", line):
            within = before.startswith((" ", "- ", "* ")) or re.match(r"\d+\. ", before)
            assert within or not before.strip(), f"the site would not show a list: {line.strip()}"
        before = line


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_marks_of_a_merge(page: str) -> None:
    assert not re.search(r"^(<{7}|>{7}|={7})( |$)", read(page), re.MULTILINE)


def test_tests_that_pages_name_exist() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    there = {file.name for file in files}
    there |= {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))}
    named = {name for page in PAGES for name in re.findall(r"`(?:[\w/]*/)?(test_\w+(?:\.py)?)`", read(page))}
    assert sorted(named - there) == []


def test_links_are_turned_to_where_things_are_on_the_site() -> None:
    text = "[a](../CONTRIBUTING.md#style) [b](../manifests/examples) `[c](x)` [d](decisions/)\n```\n[e](y)\n```\n"
    moved, outside = source.on_the_site(ROOT, "docs/job.md", text)
    assert moved == (
        "[a](contributing.md#style) [b](files/manifests/examples/index.md) `[c](x)` [d](decisions/index.md)\n"
        "```\n[e](y)\n```\n"
    )
    assert outside == {"manifests/examples"}


def test_a_link_to_nothing_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"docs/job\.md links to nowhere\.md, and there is no docs/nowhere\.md"):
        source.on_the_site(ROOT, "docs/job.md", "[a](nowhere.md)")


def test_anchors_are_githubs() -> None:
    assert source.headings("# A `b` *c*: d, e_f\n```\n# no\n```\n## [x](y) & z\n") == ["a-b-c-d-e_f", "x--z"]


def test_all_pages_gather(tmp_path: Path) -> None:
    source.gather(ROOT, tmp_path / "site")
    assert (tmp_path / "site/index.md").read_text().startswith("# trainium-operator")
    assert "[0012: " in (tmp_path / "site/decisions/index.md").read_text()
    assert "```yaml" in (tmp_path / "site/files/manifests/install.yaml.md").read_text()
