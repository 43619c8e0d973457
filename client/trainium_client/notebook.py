"""Render a job as the output of a notebook cell: facts, advice, and the curve."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.job_page import render_advice, render_facts
from trainium_contract.pages.svg import draw_loss_chart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.views.curve import CurvePoint
    from trainium_contract.views.job_view import JobView

_RULES = (
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1.2rem;margin:.4rem 0}",
    "dt{font-weight:600}",
    "dd{margin:0;overflow-wrap:anywhere}",
    ".bad{border-left:4px solid #c2453d;padding:.3rem .8rem;white-space:pre-wrap}",
    ".plot{max-width:60rem;padding:0 1rem 0 3.6rem}",
    ".fluid{overflow:visible}",
    "svg text{font-size:12px;fill:#8a949e}",
    ".grid{stroke:#8a949e;opacity:.35}",
    ".curve{fill:none;stroke:#3f77c4;stroke-width:1.6;stroke-linecap:round}",
    ".spread{fill:#3f77c4;opacity:.18}",
    ".validation{fill:#d08a1d}",
)
_STYLE = "".join(f".trn-job {rule}" for rule in _RULES)
"""Scoped to this element, because a notebook has many."""


def render_cell(view: JobView, curve: Sequence[CurvePoint] = ()) -> str:
    """Render the job as it is now."""
    title = f"<h3>{escape(view.namespace)}/{escape(view.name)}</h3>"
    drawn = draw_loss_chart(curve, ())
    return f'<div class="trn-job"><style>{_STYLE}</style>{title}{render_advice(view)}{render_facts(view)}{drawn}</div>'
