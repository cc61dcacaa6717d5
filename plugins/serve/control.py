"""Health, names, and the operator's endpoints: sleep, pause, caches."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...core.errors import EngineDeadError
from .errors import bad, not_found
from .state import ServerState
from .wire import Json

STARTED = int(time.time())


async def health(state: ServerState, request: Request) -> Response:
    """200 while the engine lives, 503 when it is dead."""
    try:
        await state.engine.check_health()
    except EngineDeadError:
        return Response(status_code=503)
    return Response(status_code=200)


async def version(state: ServerState, request: Request) -> Response:
    """Return the version of the package."""
    import importlib
    import sys

    package = __name__.partition(".")[0]
    face = sys.modules.get(package) or importlib.import_module(package)
    return Json({"version": getattr(face, "__version__")})  # noqa: B009


async def models(state: ServerState, request: Request) -> Response:
    """List the served names."""
    return Json({"object": "list", "data": [_card(state, name) for name in state.names]})


async def model(state: ServerState, request: Request) -> Response:
    """Return one served name."""
    name = request.path_params["model"]
    if name not in state.names:
        raise not_found(f"the model {name!r} does not exist", "model")
    return Json(_card(state, name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    preset = state.policy.preset(name)
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "decodekit",
        "root": state.engine.engine.config.model or state.engine.engine.model_name,
        "parent": None,
        "max_model_len": state.max_model_len,
        "preset": None if preset is None else preset.name,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": STARTED,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


async def metrics(state: ServerState, request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    text, kind = state.meters.page()
    return Response(text, headers={"content-type": kind})


# --- the operator's -------------------------------------------------------------------------------


async def sleep(state: ServerState, request: Request) -> Response:
    """Put the engine to sleep: `?level=1&mode=abort`."""
    level = request.query_params.get("level", "1")
    if level not in ("0", "1", "2"):
        raise bad(f"level must be 0, 1 or 2, got {level!r}", "level")
    mode = request.query_params.get("mode", "abort")
    try:
        await state.engine.sleep(int(level), mode)
    except EngineDeadError:
        raise
    except RuntimeError as error:  # the engine was made without sleep mode
        raise bad(str(error), "level") from None
    return Response(status_code=200)


async def wake_up(state: ServerState, request: Request) -> Response:
    """Wake the engine, or the parts named by `?tags=`."""
    tags = request.query_params.getlist("tags")
    await state.engine.wake_up(tags or None)
    return Response(status_code=200)


async def is_sleeping(state: ServerState, request: Request) -> Response:
    """Tell whether the engine is paused or its memory is away."""
    return Json({"is_sleeping": await state.engine.is_sleeping()})


async def reset_prefix_cache(state: ServerState, request: Request) -> Response:
    """Forget all cached prefixes; 400 while requests hold blocks and are not to be reset."""
    running = _switch(request, "reset_running_requests")
    if _switch(request, "reset_external"):
        raise bad("reset_external must be false: there is no external cache", "reset_external")
    if not await state.engine.reset_prefix_cache(running):
        raise bad(
            "the prefix cache is in use; wait, or send reset_running_requests=true",
            "reset_running_requests",
        )
    return Response(status_code=200)


async def pause(state: ServerState, request: Request) -> Response:
    """Let nothing run: `?mode=abort|wait|keep&clear_cache=true`."""
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise bad(f"mode must be 'abort', 'wait' or 'keep', got {mode!r}", "mode")
    await state.engine.pause_generation(mode, _switch(request, "clear_cache", True))
    return Json({"status": "paused"})


async def resume(state: ServerState, request: Request) -> Response:
    """Undo `pause`."""
    await state.engine.resume_generation()
    return Json({"status": "resumed"})


async def is_paused(state: ServerState, request: Request) -> Response:
    """Tell whether nothing runs."""
    return Json({"is_paused": await state.engine.is_paused()})


def _switch(request: Request, name: str, default: bool = False) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise bad(f"{name} must be true or false, got {value!r}", name)
    return value.lower() in ("true", "1")
