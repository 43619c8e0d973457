"""Errors as answers that a person reads: one sentence of plain text."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from trainium_operator.entrance.reception import refusal_of

if TYPE_CHECKING:
    from trainium_operator.entrance.reception import Handler

logger = logging.getLogger(__name__)


async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or a sentence."""
    try:
        return await handler(request)
    except Exception as error:
        refusal = refusal_of(error)
        if refusal is None:
            logger.exception("answering %s failed", request.path)
            return web.Response(status=500, text="defect in the operator; its log has the details\n")
        return web.Response(status=refusal.status, text=f"{refusal.sentence}\n", headers=refusal.headers)
