"""Building blocks of pages: the style, tables, documents, and the policy for a browser.

Invariants: no page loads anything. No element has an inline style or script, so a policy of two digests is enough. All
content is escaped here or where it is drawn.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.svg import COLOURS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COLOUR_CLASSES = "".join(f".c{at}{{fill:{colour};background:{colour}}}" for at, colour in enumerate(COLOURS))
FLUID_RULES = (
    ".fluid{overflow:visible}.plot{padding:0 1rem 0 3.6rem}.plot.named{padding-left:9rem}"
    "@media(max-width:40rem){.wide{display:none}.scroll td:last-child{min-width:14rem}}"
)
"""Rules of charts whose positions are shares of the width: labels are beside the area, fewer of them on a phone."""
STYLE = f"""
:root{{color-scheme:light dark;--ink:#1c2126;--soft:#5f6b76;--line:#d8dde2;--page:#fff;--card:#f6f7f9}}
@media(prefers-color-scheme:dark){{:root{{--ink:#e6e9ec;--soft:#9aa5af;--line:#363d44;--page:#15181b;--card:#1d2226}}}}
body{{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:62rem;margin:2rem auto}}
body{{padding:0 1rem}}a{{color:#3f77c4}}
h1{{font-size:1.5rem;margin:0}}h2{{font-size:1.1rem;margin:2.2rem 0 .6rem}}p.soft,td.soft,.legend{{color:var(--soft)}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem}}dl{{background:var(--card);padding:1rem}}
dt{{font-weight:600}}dd{{margin:0;overflow-wrap:anywhere}}.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-size:.88rem}}th,td{{text-align:left;padding:.3rem .6rem}}
th,td{{border-bottom:1px solid var(--line);vertical-align:top}}
td{{overflow-wrap:anywhere}}th,td.short{{white-space:nowrap}}
.bad{{border-left:4px solid #c2453d;padding:.6rem 1rem;background:var(--card);overflow-wrap:anywhere;
white-space:pre-wrap}}
svg{{width:100%;display:block}}svg:not([height]){{height:auto}}{FLUID_RULES}
svg text{{font-size:12px;fill:var(--soft)}}.grid{{stroke:var(--line)}}
.curve{{fill:none;stroke:#3f77c4;stroke-width:1.6;stroke-linecap:round}}.spread{{fill:#3f77c4;opacity:.18}}.validation{{fill:#d08a1d}}
.mark{{stroke:#c2453d;stroke-width:1.5;stroke-dasharray:4 3}}
.key{{display:inline-block;margin-right:1.2rem}}.key i{{display:inline-block;width:.8em;height:.8em;margin-right:.4em}}
#quiet{{position:sticky;top:0;margin:0}}
{COLOUR_CLASSES}
"""
_MAX_UNWRAPPED_CHARACTERS = 20
"""Longest text of a cell that is not wrapped: a time, a state."""


@dataclass(frozen=True, slots=True)
class Link:
    """A cell that links to another page; `path` consists of names that Kubernetes allows."""

    words: str
    path: str


def compute_csp_digest(content: str) -> str:
    """Return the digest of a style or a script as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


FILE_POLICY = f"default-src 'none'; style-src {compute_csp_digest(STYLE)}"
"""Content policy of a page that is a file: nothing is loaded, and nothing runs."""


def render_document(title: str, body: str, *, script: str = "") -> str:
    """Render a page; with a script the server must send a policy, a file carries its own."""
    policy = "" if script else f'<meta http-equiv="Content-Security-Policy" content="{FILE_POLICY}">'
    run = f"<script>{script}</script>" if script else ""
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8>{policy}"
        f'<meta name=viewport content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}{run}</body></html>\n"
    )


def render_section(name: str, content: str) -> str:
    """Render a part of a page that a live page updates by its name; an empty part keeps its place."""
    return f'<section id="{name}">{content}</section>'


def render_table(head: Sequence[str], rows: Iterable[Sequence[str | Link]]) -> str:
    """Render a table that scrolls if it is too wide."""
    titles = "".join(f"<th>{escape(heading)}</th>" for heading in head)
    body = "".join(f"<tr>{''.join(map(_render_cell, row))}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


def _render_cell(value: str | Link) -> str:
    if isinstance(value, Link):
        return f'<td><a href="{escape(value.path)}">{escape(value.words)}</a></td>'
    return f"<td{' class=short' if len(value) <= _MAX_UNWRAPPED_CHARACTERS else ''}>{escape(value)}</td>"
