"""The playground at `/`: two static files, and the schema that its controls are made from."""

from __future__ import annotations

import importlib
import sys
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .state import ServerState
from .wire import Json

# The page talks to its own server alone, and nobody may frame it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def page(state: ServerState, request: Request) -> Response:
    """Return the page."""
    return _file("page.html", "text/html")


async def script(state: ServerState, request: Request) -> Response:
    """Return the page's script."""
    return _file("page.js", "text/javascript")


async def schema(state: ServerState, request: Request) -> Response:
    """Return the JSON schema of a request's fields, with this engine's stages and presets."""
    package = __name__.partition(".")[0]
    face = sys.modules.get(package) or importlib.import_module(package)
    parts = state.engine.engine.parts
    told: dict[str, Any] = face.request_schema(parts.registry, presets=parts.presets)
    return Json(told)


def _file(name: str, kind: str) -> Response:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff",
               "Cache-Control": "no-cache"}  # fmt: skip
    return Response(text, media_type=f"{kind}; charset=utf-8", headers=headers)
