"""The application: routes, middleware, errors and the OpenAPI document of one server."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ...core.async_llm import AsyncLLM
from ...core.errors import ValidationError
from . import chat, completions, control, messages, openapi, page, protocol, responses, tokens
from .auth import Authorized
from .errors import ApiError, as_api_error
from .fields import IGNORED_HEADER, NO_EFFECT, NOTE_HEADER, sort_fields
from .messages_body import CountRequest, MessagesRequest
from .meters import Measured, Meters
from .policy import make_policy
from .responses_body import ResponsesRequest
from .settings import ServeSettings
from .sse import ClientGone
from .state import ServerState
from .tool_choice import parser_named
from .wire import Json, LimitedBody, read_json

CLIENT_GONE = 499  # nobody reads it; it stands in the metrics

Handler = Callable[
    [ServerState, Request, Any, Mapping[str, Any], Mapping[str, str]], Awaitable[Response]
]
Shape = Callable[[ApiError], dict[str, Any]]
Plain = Callable[[ServerState, Request], Awaitable[Response]]


def shape_of_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error as OpenAI has it."""
    return error.body


def build_app(engine: AsyncLLM, settings: ServeSettings | None = None) -> FastAPI:
    """Return the ASGI application that serves `engine`; its state is `app.state.server`.

    ValidationError for settings that do not fit the engine. The engine is shut down by whoever
    made it.
    """
    settings = settings or ServeSettings()
    state = ServerState(engine, settings, None, None)  # type: ignore[arg-type]
    state.policy = make_policy(settings, state.names, engine.engine)
    if settings.tool_call_parser is not None:
        parser_named(state, settings.tool_call_parser)
    state.meters = Meters(engine, state.names[0])
    is_shown = not settings.disable_fastapi_docs
    app = FastAPI(
        title="decodekit",
        docs_url="/docs" if is_shown else None,
        redoc_url=None,
        openapi_url="/openapi.json" if is_shown else None,
        root_path=settings.root_path,
    )
    app.state.server = state
    _add_routes(app, state)
    _add_error_handlers(app)
    _add_middleware(app, state)
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]
    return app


# --- routes ---------------------------------------------------------------------------------------


def _add_routes(app: FastAPI, state: ServerState) -> None:
    post(app, "/inference/v1/generate", protocol.GenerateRequest, tokens.generate)
    if not state.settings.tokens_only:
        post(app, "/v1/chat/completions", protocol.ChatRequest, chat.complete)
        post(app, "/v1/chat/completions/batch", protocol.BatchChatRequest, chat.batch)
        post(app, "/v1/chat/completions/render", protocol.ChatRequest, chat.render)
        post(app, "/v1/completions", protocol.CompletionRequest, completions.complete)
        post(app, "/v1/completions/render", protocol.CompletionRequest, completions.render)
        post(app, "/v1/messages", MessagesRequest, messages.create, messages.error_body)
        post(app, "/v1/messages/count_tokens", CountRequest, messages.count, messages.error_body)
        post(app, "/v1/responses", ResponsesRequest, responses.create)
        plain(app, "GET", "/v1/responses/{response_id}", responses.get)
        plain(app, "POST", "/v1/responses/{response_id}/cancel", responses.cancel)
        plain(app, "GET", "/v1/schema", page.schema)
        if not state.settings.disable_playground:
            plain(app, "GET", "/", page.page)
            plain(app, "GET", "/page.js", page.script)
        post(app, "/tokenize", protocol.TokenizeRequest, tokens.tokenize)
        post(app, "/detokenize", protocol.DetokenizeRequest, tokens.detokenize)
    plain(app, "GET", "/v1/models", control.models)
    plain(app, "GET", "/v1/models/{model:path}", control.model)
    plain(app, "GET", "/health", control.health)
    plain(app, "GET", "/ping", control.health)
    plain(app, "POST", "/ping", control.health)
    plain(app, "GET", "/version", control.version)
    if not state.settings.disable_log_stats:
        plain(app, "GET", "/metrics", control.metrics)
    if state.settings.control_endpoints:
        _add_control(app)


def _add_control(app: FastAPI) -> None:
    """Serve what is for the operator rather than for clients."""
    post(app, "/abort_requests", protocol.AbortRequest, tokens.abort)
    plain(app, "GET", "/is_sleeping", control.is_sleeping)
    plain(app, "GET", "/is_paused", control.is_paused)
    plain(app, "POST", "/sleep", control.sleep)
    plain(app, "POST", "/wake_up", control.wake_up)
    plain(app, "POST", "/pause", control.pause)
    plain(app, "POST", "/resume", control.resume)
    plain(app, "POST", "/reset_prefix_cache", control.reset_prefix_cache)


def post(
    app: FastAPI, path: str, model: type[BaseModel], handler: Handler, shape: Shape = shape_of_error
) -> None:
    """Serve POST `path`: the body is sorted, checked as `model`, and given to `handler`.

    `shape` writes the bodies of errors.

    The handler gets the state, the request, the checked body, the body as it came, and headers for
    its answer.
    """
    state: ServerState = app.state.server

    async def endpoint(request: Request) -> Response:
        told: Mapping[str, str] = {}
        try:
            raw = await read_json(request)
            stages = state.engine.engine.parts.registry.stages
            found = sort_fields(raw, model, strict=state.settings.strict_fields, stages=stages)
            told = found.headers
            for name in found.ignored:
                state.meters.ignored(name, NO_EFFECT)
            body = model.model_validate(found.body)
            return await handler(state, request, body, found.body, told)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return failure(error, told, shape)

    endpoint.__doc__ = handler.__doc__
    app.add_api_route(path, endpoint, methods=["POST"], **openapi.of_post(path, model))


def plain(app: FastAPI, method: str, path: str, handler: Plain) -> None:
    """Serve an endpoint without a body."""
    state: ServerState = app.state.server

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(state, request)
        except Exception as error:
            return failure(error)

    endpoint.__doc__ = handler.__doc__
    app.add_api_route(path, endpoint, methods=[method], **openapi.of_plain(method, path))


# --- errors ---------------------------------------------------------------------------------------


def failure(
    error: Exception, headers: Mapping[str, str] | None = None, shape: Shape = shape_of_error
) -> Response:
    """Return the answer to a request that raised."""
    told = as_api_error(error)
    return Json(shape(told), told.status, headers)


def _add_error_handlers(app: FastAPI) -> None:
    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = {405: f"{request.method} is not served at {request.url.path}"}
        message = told.get(error.status_code, f"there is no {request.url.path}")
        kind = None if error.status_code == 404 else error.detail
        answer = ApiError(error.status_code, message, kind=kind)
        return Json(answer.body, answer.status, error.headers)

    app.add_exception_handler(HTTPException, unknown)


# --- middleware -----------------------------------------------------------------------------------


def _add_middleware(app: FastAPI, state: ServerState) -> None:
    """Put the layers around the routes, the innermost first."""
    settings = state.settings
    app.add_middleware(LimitedBody, most=settings.max_body_bytes)
    if settings.api_key:
        app.add_middleware(
            Authorized,
            keys=settings.api_key,
            v1_only=settings.auth_v1_only,
            root_path=settings.root_path,
        )
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=[IGNORED_HEADER, NOTE_HEADER, "X-Request-Id"],
    )
    app.add_middleware(Measured, meters=state.meters)
    for name in settings.middleware:
        app.add_middleware(_imported(name))


def _imported(name: str) -> Any:
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValidationError(
            f"middleware {name!r} cannot be imported: {error}", parameter="middleware", value=name
        ) from error
    return found
