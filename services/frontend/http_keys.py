"""Where the HTTP application and its requests keep what is theirs."""

from __future__ import annotations

from aiohttp import web

from services.frontend.context import FrontendContext

CONTEXT = web.AppKey("context", FrontendContext)
FINGERPRINT = web.AppKey("fingerprint", str)
REQUEST_ID = web.RequestKey("request_id", str)
