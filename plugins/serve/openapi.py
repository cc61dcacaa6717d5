"""The OpenAPI document: what each endpoint takes, what it answers, and how it refuses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import Response

from . import schemas
from .dialect_schemas import AnthropicError

REF = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is refused.",
    401: "A key is needed.",
    404: "No such model.",
    413: "The body is too large.",
    500: "The request failed while it ran.",
    503: "The engine is asleep, or the server is shutting down.",
}


def of_post(path: str, model: type[BaseModel]) -> dict[str, Any]:
    """Return the arguments of `add_api_route` that describe an endpoint with a JSON body."""
    told = schemas.ANSWERS.get(path)
    responses: dict[int | str, Any] = {200: _answer(told)}
    for status in ERRORS:
        responses[status] = _error(status, path)
    return {
        "response_model": None,
        "response_class": Response,
        "responses": responses,
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": _ref(model)}}},
            }
        },
        "operation_id": _operation("POST", path),
    }


def of_plain(method: str, path: str) -> dict[str, Any]:
    """Return the arguments of `add_api_route` that describe an endpoint without a body."""
    told = schemas.ANSWERS.get(path)
    responses: dict[int | str, Any] = {200: _answer(told)}
    if path in ("/health", "/ping"):
        responses[503] = {"description": "The engine is dead."}
    else:
        for status in (400, 401, 404, 500):
            responses[status] = _error(status)
    return {
        "response_model": None,
        "response_class": Response,
        "responses": responses,
        "openapi_extra": {"parameters": schemas.PARAMETERS.get(path, [])},
        "operation_id": _operation(method, path),
    }


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document, with the schemas of bodies and answers, made once."""
    if app.openapi_schema is None:
        told = get_openapi(title=app.title, version="1", routes=app.routes)
        told.setdefault("components", {})["schemas"] = schemas.definitions(REF)
        if app.state.server.settings.api_key:
            told["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            told["security"] = [{"key": []}]
        app.openapi_schema = told
    return app.openapi_schema


def _answer(told: schemas.Answer | None) -> dict[str, Any]:
    if told is None:
        return {"description": "Done."}
    if isinstance(told, str):
        return {"description": "Text.", "content": {told: {"schema": {"type": "string"}}}}
    schema: dict[str, Any] = {"$ref": _ref(told)} if isinstance(told, type) else {
        "type": "array", "items": {"$ref": _ref(told[0])}}  # fmt: skip
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if isinstance(told, type) and told in schemas.STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "The answer.", "content": content}


def _error(status: int, path: str = "") -> dict[str, Any]:
    model: type[BaseModel] = schemas.Unauthorized if status == 401 else schemas.ErrorBody
    if path.startswith("/v1/messages"):
        model = AnthropicError
    return {
        "description": ERRORS[status],
        "content": {"application/json": {"schema": {"$ref": _ref(model)}}},
    }


def _ref(model: type[BaseModel]) -> str:
    return REF.format(model=model.__name__)


def _operation(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").replace(":path", "").strip("/")
    return "_".join([method.lower(), *words.replace("-", "_").split("/")])
